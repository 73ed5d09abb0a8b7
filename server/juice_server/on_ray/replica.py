"""A replica: the server's app for one model, in a Ray actor, called by the ingress."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import Message

from juice.errors import JuiceError
from juice_server import settings as settings_module
from juice_server.app import create
from juice_server.http import replaying
from juice_server.keys import Client
from juice_server.service import LOST, Service
from juice_server.telemetry import logs
from juice_server.trace import Trace

LOG = logging.getLogger("juice_server")
# Names the replica in every answer, by its host and process.
REPLICA_HEADER = "x-juice-replica"
# Time to report the loss of the engine to clients.
LAST_WORDS_S = 1.0


class Replica:
    """The deployment of one model with these settings; its actor is up when the model is loaded."""

    async def __init__(self, flags: dict[str, Any]) -> None:  # type: ignore[misc]
        settings = settings_module.read(flags)
        logs.set_up(settings.log_format)
        self._name = f"{socket.gethostname()}/{os.getpid()}"
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
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

    async def answer(
        self, scope: dict[str, Any], body: bytes, request_id: str, client: Client
    ) -> AsyncIterator[list[Message]]:
        """Yield ASGI's messages of an answer, those that are there together.

        The ingress has checked the key of the client.
        """
        request = {**scope, "state": {"trace": Trace(id=request_id, client=client)}}
        messages: asyncio.Queue[Message | None] = asyncio.Queue()

        async def never() -> Message:
            # Who leaves cancels this call, and the app with it.
            return await asyncio.Future[Message]()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REPLICA_HEADER] = self._name
            messages.put_nowait(message)

        running = asyncio.create_task(self._app(request, replaying(body, never), send))
        running.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            is_over = False
            while not is_over:
                ready = [await messages.get()]
                while not messages.empty():
                    ready.append(messages.get_nowait())
                is_over = ready[-1] is None
                if batch := [message for message in ready if message is not None]:
                    yield batch
            await running
        finally:
            running.cancel()

    async def __del__(self) -> None:
        """Close the engine; Ray Serve awaits this before it ends the actor."""
        await self._lifespan.__aexit__(None, None, None)
