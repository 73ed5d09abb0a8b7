"""The application of Ray Serve: `import_path: juice_server.on_ray.application:application`.

An ingress checks keys, bounds bodies, and passes each request on to a replica of its model, which
answers as `juice serve` does. What no replica has room for waits in Ray Serve's bounded queue.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from fastapi import Request
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve import Application
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from juice.engine.queue import with_room
from juice.errors import EngineStoppedError
from juice_server import errors
from juice_server.app import allow_origins, guard
from juice_server.errors import BusyError, ClientGoneError, NotReadyError, failure_of
from juice_server.http import while_present
from juice_server.on_ray import config
from juice_server.on_ray.config import deployment_name
from juice_server.on_ray.replica import Replica
from juice_server.routes.stream import line
from juice_server.telemetry import logs
from juice_server.trace import trace_of

LOG = logging.getLogger("juice_server")
# The ingress ends with the head node, and with no other.
ON_THE_HEAD = {"num_cpus": 0.1, "resources": {"node:__internal_head__": 0.001}}
HEALTH = {"health_check_period_s": 5, "health_check_timeout_s": 10}
LAST_WORDS_S = 5.0
MAX_TRIES, PAUSE_S = 3, 0.2
LISTING_S = 10.0  # for a model to say under which names it is served
GRACE_S = 5.0  # beyond the time of a request, for its replica to report that it is over
LOST = "the replica that worked on this request was lost; send it again"
PASSED_ON = ("type", "asgi", "http_version", "method", "scheme", "path", "headers", "client")
RESPONSES = "/v1/responses"


def application(args: dict[str, Any]) -> Application:
    """Return the ingress, bound to a deployment for each model; raises UsageError."""
    arguments = config.read(args)
    settings = {name: arguments.of_model(name) for name in arguments.models}
    models = {
        name: serve.deployment(Replica)
        .options(
            name=deployment_name(name),
            # As many as may run and wait in a replica: its own queue decides whose turn it is.
            max_ongoing_requests=with_room(of_model.max_batch) + with_room(of_model.max_queue),
            max_queued_requests=of_model.max_queue,
            graceful_shutdown_timeout_s=of_model.drain,
            **HEALTH,
        )
        .bind(arguments.flags_of(name))
        for name, of_model in settings.items()
    }
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        num_replicas=1,
        ray_actor_options=ON_THE_HEAD,
        max_ongoing_requests=100_000,
        max_surge_percent=100,  # the next one is up before this one leaves
        graceful_shutdown_timeout_s=LAST_WORDS_S + max(one.drain for one in settings.values()),
        **HEALTH,
    )
    return ingress.bind(args, models)


class Ingress:
    """The deployment that Ray Serve's proxy calls; it calls the replicas of each model."""

    def __init__(self, arguments: dict[str, Any], handles: dict[str, DeploymentHandle]) -> None:
        read = config.read(arguments)
        self._settings = read.of_ingress()
        logs.set_up(self._settings.log_format)
        self._timeouts = {name: read.of_model(name).request_timeout for name in read.models}
        self._calls = {
            name: handles[name].options(stream=True, method_name="answer") for name in read.models
        }
        self._n_replicas = dict.fromkeys(read.models, 0)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the app; Ray Serve calls this."""
        app = Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Mount("/", self._forward),
            ]
        )
        errors.install(app)
        guard(app, self._settings, self._settings.read_keys())
        allow_origins(app, self._settings)
        return app

    async def _healthz(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _readyz(self, _request: Request) -> Response:
        """Report how many replicas each model has, and whether all have one."""
        n_replicas = await self._counted()
        status, code = ("ready", 200) if all(n_replicas.values()) else ("loading", 503)
        return JSONResponse({"status": status, "replicas": n_replicas}, code)

    async def _counted(self) -> dict[str, int]:
        """Return how many replicas each model has, as last known where Ray cannot say."""
        try:
            status = await asyncio.to_thread(serve.status)
        except (RayError, RayServeException) as error:
            LOG.warning("Ray does not say how many replicas run: %s", type(error).__name__)
            return self._n_replicas
        deployments = status.applications[serve.get_replica_context().app_name].deployments
        running = {name: one.replica_states.get("RUNNING", 0) for name, one in deployments.items()}
        self._n_replicas = {name: running.get(deployment_name(name), 0) for name in self._calls}
        return self._n_replicas

    async def _metrics(self, _request: Request) -> Response:
        raise HTTPException(404, "Ray exports the metrics of all replicas, on each host")

    async def _models(self, request: Request) -> Response:
        """List the names of all models; one without a replica is left out."""
        running = [name for name, n in (await self._counted()).items() if n]
        lists = await asyncio.gather(*(self._names(request.scope, name) for name in running))
        if not any(lists):
            raise NotReadyError("no model has a replica; ask /readyz")
        return JSONResponse({"object": "list", "data": [one for names in lists for one in names]})

    async def _names(self, scope: Scope, model: str) -> list[dict[str, Any]]:
        body = b""
        try:
            async with asyncio.timeout(LISTING_S):
                async for message in self._answer(model, scope, b""):
                    body += message.get("body", b"")
        except (TimeoutError, RayError, RayServeException):
            return []
        names: list[dict[str, Any]] = json.loads(body)["data"]
        return names

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to its model, while the client is there and its time is not up."""
        request = Request(scope, receive)
        body = await request.body()
        model = config.model_of(scope, body, self._calls)
        timeout_s = self._timeouts[model] + GRACE_S
        with suppress(ClientGoneError):
            await while_present(request, timeout_s, self._relay(model, scope, body, send))

    async def _relay(self, model: str, scope: Scope, body: bytes, send: Send) -> None:
        """Pass on the answer; where its replica is lost before it began, try another replica.

        A stream that has begun ends with an event of the error, and without `[DONE]`. Raises
        BusyError, and EngineStoppedError where no stream has begun.
        """
        n_sent, is_stream = 0, False
        for n_tries in range(1, MAX_TRIES + 1):
            try:
                async with aclosing(self._answer(model, scope, body)) as messages:
                    async for message in messages:
                        is_stream = is_stream or _begins_stream(message)
                        n_sent += 1
                        await send(message)
                return
            except RayTaskError:
                raise
            except BackPressureError as error:
                raise BusyError(f"too much waits for {model}: try again later") from error
            except (RayError, RayServeException) as error:
                LOG.warning("a replica was lost: %s", type(error).__name__)
                lost = EngineStoppedError(LOST)
                if is_stream:
                    event = line(_failed(lost, scope["path"], n_sent - 1))
                    await send({"type": "http.response.body", "body": event.encode()})
                    return
                if n_sent or n_tries == MAX_TRIES:
                    raise lost from error
                await asyncio.sleep(PAUSE_S * n_tries)

    async def _answer(self, model: str, scope: Scope, body: bytes) -> AsyncGenerator[Message]:
        """Yield the messages of a replica's answer."""
        trace = trace_of(scope)
        request: dict[str, Any] = {name: scope[name] for name in PASSED_ON if name in scope}
        request["query_string"] = config.without_model(scope.get("query_string", b""))
        batches = self._calls[model].remote(request, body, trace.id, trace.client)
        try:
            async for messages in batches:
                for message in messages:
                    yield message
        finally:
            batches.cancel()


def _begins_stream(message: Message) -> bool:
    headers = dict(message.get("headers", ()))
    return bool(headers.get(b"content-type", b"").startswith(b"text/event-stream"))


def _failed(error: EngineStoppedError, path: str, n_events: int) -> dict[str, Any]:
    """Return the event of an error that the clients of a route expect."""
    failure = failure_of(error)
    if path.startswith(RESPONSES):
        about = {"code": failure.code, "message": failure.message, "param": None}
        return {"type": "error", "sequence_number": n_events, **about}
    return failure.body_for(path)
