"""How many replicas a model needs, by what runs and what waits at the ingress.

    needed = running / rows of a replica + tokens waiting / `waiting_tokens`

The ingress reports it for every model, and Ray Serve, which calls `policy`, averages it over its
look-back period and applies its own bounds and delays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

PREFIX = "replicas_needed/"


def needed(*, n_running: int, rows: int, waiting_tokens: float, tokens_of_a_replica: int) -> float:
    """Return how many replicas are needed; Ray Serve rounds up.

    Args:
        n_running: The generations that run.
        rows: How many run in one replica.
        waiting_tokens: The tokens that wait at the ingress.
        tokens_of_a_replica: How many may wait before a replica is added.
    """
    return n_running / rows + waiting_tokens / tokens_of_a_replica


def policy(
    contexts: Mapping[Any, AutoscalingContext],
) -> tuple[dict[Any, float], dict[Any, dict[str, Any]]]:
    """Return how many replicas each deployment should have: Ray Serve's `autoscaling_policy`."""
    reported: dict[str, float] = {}
    for context in contexts.values():
        for name, values in (context.aggregated_metrics or {}).items():
            if name.startswith(PREFIX) and values:
                reported[name.removeprefix(PREFIX)] = max(values.values())
    wanted = {own: reported.get(own.name, 0.0) for own in contexts if own.name in reported}
    return wanted, {}
