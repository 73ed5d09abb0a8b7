"""The application of Ray Serve: `import_path: juice_server.on_ray.application:application`."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from juice_server.fair_queue import with_room
from juice_server.on_ray import config
from juice_server.on_ray.ingress import Ingress
from juice_server.on_ray.naming import deployment_name
from juice_server.on_ray.replica import Replica

# The ingress ends with the head node, and with no other.
ON_THE_HEAD = {"num_cpus": 0.1, "resources": {"node:__internal_head__": 0.001}}
# Requests whose rows are free again, but whose call has not ended: they are in nobody's way.
ENDING = 8
HEALTH = {"health_check_period_s": 5, "health_check_timeout_s": 10}
LAST_WORDS_S = 5.0


def application(args: dict[str, Any]) -> Application:
    """Return the ingress, bound to a deployment for each model; raises UsageError.

    Args:
        args: As in `juice_server.on_ray.config`.
    """
    arguments = config.read(args)
    models: dict[str, Application] = {}
    longest_drain = 0.0
    for name in arguments.models:
        settings = arguments.of_model(name)
        longest_drain = max(longest_drain, settings.drain)
        models[name] = (
            serve.deployment(Replica)
            .options(
                name=deployment_name(name),
                max_ongoing_requests=with_room(settings.max_batch) + ENDING,
                graceful_shutdown_timeout_s=settings.drain,
                **HEALTH,
            )
            .bind(arguments.flags_of(name))
        )
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        # One, whose numbers the autoscaling of the others reads.
        autoscaling_config={"min_replicas": 1, "max_replicas": 1, "metrics_interval_s": 1},
        ray_actor_options=ON_THE_HEAD,
        max_ongoing_requests=100_000,
        max_surge_percent=100,  # the next one is up before this one leaves
        graceful_shutdown_timeout_s=longest_drain + LAST_WORDS_S,
        **HEALTH,
    )
    return ingress.bind(args, models)
