"""The process that serves the app: its socket, its signals, and how it ends. `juice serve` calls `serve`."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from juice.errors import JuiceError, UsageError
from juice.steered_model import SteeredModel
from juice_server.app import create
from juice_server.connection import guarded
from juice_server.observe import log_as_json
from juice_server.service import Service
from juice_server.settings import Settings

KEEP_ALIVE_S = 75
# What is cut at the drain limit still says so to its client.
LAST_WORDS_S = 5.0
LOG = logging.getLogger("juice_server")


class Server(uvicorn.Server):
    """Uvicorn, which on a signal takes nothing new, finishes what runs, and cuts it at the drain limit."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; a second signal ends at once."""
        self.force_exit = self.should_exit
        self._service.is_draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what runs."""
        cut = asyncio.get_running_loop().call_later(self._service.settings.drain, self._service.cut)
        await super().shutdown(sockets)
        cut.cancel()


def serve(settings: Settings, on_ready: Callable[[SteeredModel], None]) -> None:
    """Serve until a signal ends the process, calling `on_ready` once the model is loaded; raises JuiceError when it cannot be."""
    failures: list[JuiceError] = []

    def fail(error: JuiceError) -> None:
        failures.append(error)
        server.should_exit = True

    log_as_json("juice", "juice_server", "uvicorn.error")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    _check_port(settings)
    app = create(settings, on_ready=on_ready, on_failure=fail)
    protocol = guarded(header_timeout_s=settings.header_timeout, write_stall_s=settings.write_stall)
    config = uvicorn.Config(
        app, host=settings.host, port=settings.port, http=protocol, ws="none", log_config=None, access_log=False, server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=int(settings.drain + LAST_WORDS_S),
    )  # fmt: skip
    server = Server(config, app.state.service)
    LOG.info("settings", extra={"fields": {"settings": settings.public()}})
    # Uvicorn raises the signal that ended it once more, for handlers such as these: the end was asked for, so it is a success.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)
    server.run()
    if failures:
        raise failures[0]


def _ignore(_number: int, _frame: Any) -> None:
    """Let the process end by itself."""


def _check_port(settings: Settings) -> None:
    """Raise UsageError before the model is loaded when the address cannot be listened on."""
    try:
        with socket.create_server((settings.host, settings.port)):
            pass
    except OSError as error:
        raise UsageError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose another --port or --host") from error
