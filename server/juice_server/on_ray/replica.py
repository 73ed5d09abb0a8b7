"""A replica: the server's app for one model, in a Ray actor, called by the ingress."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from starlette.types import Message, Scope

from juice.errors import JuiceError
from juice_server import settings as settings_module
from juice_server.app import create
from juice_server.clients import Client
from juice_server.intake import replaying
from juice_server.service import LOST, Service
from juice_server.telemetry import logs
from juice_server.trace import Trace

LOG = logging.getLogger("juice_server")
# The last message of every answer, which the ingress keeps: the tokens that it took.
USED = "juice.used"
# Names the replica in every answer, by its host and process.
REPLICA_HEADER = b"x-juice-replica"
# Time to report the loss of the engine to clients.
LAST_WORDS_S = 1.0


class Replica:
    """The deployment of one model; its actor is up when the model is loaded.

    Args:
        flags: The settings of `juice serve`.
    """

    async def __init__(self, flags: dict[str, Any]) -> None:  # type: ignore[misc]
        settings = settings_module.read(flags)
        logs.set_up(settings.log_format)
        loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[None] = loop.create_future()
        self._app = create(
            settings,
            on_ready=lambda _model: self._loaded.set_result(None),
            on_failure=self._fail,
        )
        self._service: Service = self._app.state.service
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        await self._loaded

    def _fail(self, error: JuiceError) -> None:
        """Report why the model is not served; without its engine the process ends."""
        if not self._loaded.done():
            self._loaded.set_exception(error)
            return
        LOG.critical("the engine is lost: %s", error)
        self._service.is_draining = True
        self._service.cut()
        asyncio.get_running_loop().call_later(LAST_WORDS_S, os._exit, 1)

    async def check_health(self) -> None:
        """Raise for Ray Serve when the engine no longer runs, by its heartbeat."""
        if (state := self._service.state) in LOST:
            raise RuntimeError(state)

    async def metrics(self) -> bytes:
        """Return the metrics, in Prometheus' text format."""
        return self._service.metrics.render()

    async def answer(
        self, scope: dict[str, Any], body: bytes, request_id: str, client: Client
    ) -> AsyncIterator[list[Message]]:
        """Yield the messages of an answer, those that are there together, and last its use.

        Args:
            scope: The request, in ASGI's terms.
            body: Its body.
            request_id: Its id, for the log.
            client: Whose it is; the ingress has applied its bounds.
        """
        client = replace(
            client,
            requests_per_minute=None,
            tokens_per_minute=None,
            max_running=None,
            max_waiting=None,
        )
        trace = Trace(id=request_id, client=client)
        own: Scope = {**scope, "state": {"trace": trace}}
        messages: asyncio.Queue[Message | None] = asyncio.Queue()

        async def never() -> Message:
            # Who leaves cancels this call, and the app with it.
            return await asyncio.Future[Message]()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = (REPLICA_HEADER, f"{socket.gethostname()}/{os.getpid()}".encode())
                message = {**message, "headers": [*message.get("headers", ()), named]}
            messages.put_nowait(message)

        async def run() -> None:
            try:
                await self._app(own, replaying(body, never), send)
            finally:
                messages.put_nowait(None)

        running = asyncio.create_task(run())
        try:
            is_over = False
            while not is_over:
                there = [await messages.get()]
                while not messages.empty():
                    there.append(messages.get_nowait())
                is_over = there[-1] is None
                if ready := [message for message in there if message is not None]:
                    yield ready
            await running
            yield [{"type": USED, "n_tokens": trace.n_prompt_tokens + trace.n_generated_tokens}]
        finally:
            running.cancel()

    async def __del__(self) -> None:
        """Close the engine; Ray Serve awaits this before it ends the actor."""
        await self._lifespan.__aexit__(None, None, None)
