"""The one ingress of a cluster: keys, bounds and turns by key, then on to a model's replica."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from juice_server import errors
from juice_server.errors import ClientGoneError, NotReadyError
from juice_server.intake import BodyIntake
from juice_server.on_ray import config
from juice_server.on_ray.asked import Asked, read
from juice_server.on_ray.autoscaling import PREFIX, needed
from juice_server.on_ray.naming import deployment_name
from juice_server.on_ray.pool import Pool
from juice_server.presence import while_present
from juice_server.rates import RateLimits
from juice_server.schemas.streams import STEERING_HEADER
from juice_server.security import KeyCheck
from juice_server.telemetry import logs
from juice_server.trace import trace_of

LOG = logging.getLogger("juice_server")
LOOK_S = 1.0  # how often the replicas are counted
LISTING_S = 10.0  # for a model to say under which names it is served
GRACE_S = 5.0  # beyond the time of a request, for its replica to report that it is over
GAUGES: tuple[tuple[str, str, Callable[[Pool], float]], ...] = (
    ("replicas", "Replicas that run.", lambda pool: pool.n_replicas),
    ("requests_waiting", "Generations at the ingress.", lambda pool: pool.turns.n_waiting),
    ("requests_running", "Generations in replicas.", lambda pool: pool.turns.n_running),
    ("tokens_waiting", "Their tokens.", lambda pool: pool.turns.waiting_tokens),
)


class Ingress:
    """The deployment that Ray Serve's proxy calls.

    Args:
        arguments: Those of the application.
        handles: How to call the replicas of each model.
    """

    def __init__(self, arguments: Mapping[str, Any], handles: dict[str, DeploymentHandle]) -> None:
        own = config.read(arguments)
        self._settings = own.of_ingress()
        logs.set_up(self._settings.log_format)
        self._keys = self._settings.read_keys()
        self._limits = RateLimits()
        self._tokens = {name: model.waiting_tokens for name, model in own.models.items()}
        self._pools = {name: Pool(own.of_model(name), handles[name]) for name in own.models}
        self._timeouts = {name: own.of_model(name).request_timeout for name in own.models}

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the app; Ray Serve calls this."""
        middleware = []
        if self._settings.cors_origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=self._settings.cors_origins,
                    allow_methods=["*"],
                    allow_headers=["*"],
                    expose_headers=["x-request-id", STEERING_HEADER, "retry-after"],
                )
            )
        if self._keys is not None:
            middleware.append(Middleware(KeyCheck, keys=self._keys))
        max_body, timeout_s = self._settings.max_body, self._settings.body_timeout
        middleware.append(Middleware(BodyIntake, max_bytes=max_body, timeout_s=timeout_s))
        app = Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Mount("/", self._forward),
            ],
            middleware=middleware,
            lifespan=self._lifespan,
        )
        errors.install(app)
        return app

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report for each deployment how many replicas it needs; Ray Serve calls this."""
        return {
            PREFIX + deployment_name(name): needed(
                n_running=pool.turns.n_running,
                rows=pool.turns.rows_of_a_replica,
                waiting_tokens=pool.turns.waiting_tokens,
                tokens_of_a_replica=self._tokens[name],
            )
            for name, pool in self._pools.items()
        }

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        counting = asyncio.create_task(self._count_replicas())
        yield
        counting.cancel()

    async def _count_replicas(self) -> None:
        """Keep up with how many replicas run, as they join, leave and are lost."""
        application = serve.get_replica_context().app_name
        while True:
            try:
                status = await asyncio.to_thread(serve.status)
                deployments = status.applications[application].deployments
                for name, pool in self._pools.items():
                    states = deployments[deployment_name(name)].replica_states
                    pool.resize(states.get("RUNNING", 0))
            except Exception:
                # The controller may be away for a while; what was known still holds.
                LOG.warning("the replicas could not be counted", exc_info=True)
            await asyncio.sleep(LOOK_S)

    async def _healthz(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _readyz(self, _request: Request) -> Response:
        """Report whether every model has a replica."""
        n_replicas = {name: pool.n_replicas for name, pool in self._pools.items()}
        is_ready = all(n_replicas.values())
        state = {"status": "ready" if is_ready else "loading", "replicas": n_replicas}
        return JSONResponse(state, 200 if is_ready else 503)

    async def _metrics(self, _request: Request) -> Response:
        """Report what waits here and what runs; the engines' own metrics are in their replicas."""
        lines: list[str] = []
        for metric, text, value in GAUGES:
            lines += [f"# HELP juice_{metric} {text}", f"# TYPE juice_{metric} gauge"]
            lines += [
                f'juice_{metric}{{model="{name}"}} {value(pool)}'
                for name, pool in self._pools.items()
            ]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def _models(self, request: Request) -> Response:
        """List the names of all models; one without a replica is left out."""
        up = [name for name, pool in self._pools.items() if pool.n_replicas]
        lists = await asyncio.gather(*(self._names(request, name) for name in up))
        if not any(lists):
            raise NotReadyError("no model has a replica; ask /readyz")
        return JSONResponse({"object": "list", "data": [own for names in lists for own in names]})

    async def _names(self, request: Request, name: str) -> list[dict[str, Any]]:
        body = bytearray()

        async def keep(message: Message) -> None:
            body.extend(message.get("body", b""))

        trace = trace_of(request.scope)
        asked = Asked(model=name, generates=False)
        try:
            async with asyncio.timeout(LISTING_S):
                await self._pools[name].relay(request.scope, b"", asked, trace, trace.client, keep)
        except TimeoutError:
            return []
        names: list[dict[str, Any]] = json.loads(body)["data"]
        return names

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await request.body()
        trace = trace_of(scope)
        client = trace.client
        asked = read(scope, body, self._pools)
        pool = self._pools[asked.model]
        pool.turns.check(client, asked)
        if asked.generates:
            self._limits.take(client, asked.cost)
        n_used = 0.0
        try:
            n_used = await while_present(
                request,
                self._timeouts[asked.model] + GRACE_S,
                pool.relay(scope, body, asked, trace, client, send),
            )
        except ClientGoneError:
            return
        finally:
            if asked.generates:
                self._limits.give_back(client, asked.cost - int(n_used))
