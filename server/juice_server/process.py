"""The process that serves the app: socket, signals, shutdown. `juice serve` calls `serve`."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from juice import SteeredModel
from juice.errors import JuiceError, UsageError
from juice_server.app import create
from juice_server.connection import guarded
from juice_server.observe import log_as_json
from juice_server.service import Service
from juice_server.settings import Settings

KEEP_ALIVE_S = 75
# Time to report the cut at the drain limit to clients.
LAST_WORDS_S = 5.0
RESERVED_FILES = 64  # for weights, logs and libraries
LOG = logging.getLogger("juice_server")


class Server(uvicorn.Server):
    """Uvicorn that drains on a signal: it takes nothing new, and cuts what runs at the limit."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._n_signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Start to drain; a second signal cuts what runs, a third exits without waiting."""
        self._n_signals += 1
        LOG.info("shutting down", extra={"fields": {"signal": sig, "n_signals": self._n_signals}})
        self._service.is_draining = self.should_exit = True
        if self._n_signals > 1:
            self._service.cut()
        self.force_exit = self._n_signals > 2

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what runs, up to the drain limit."""
        cut = asyncio.get_running_loop().call_later(self._service.settings.drain, self._service.cut)
        await super().shutdown(sockets)
        cut.cancel()


def serve(settings: Settings, on_ready: Callable[[SteeredModel], None]) -> None:
    """Serve until a signal ends the process, calling `on_ready` once the model is loaded.

    Raises JuiceError when the model cannot be loaded or the engine loses a process, and UsageError
    when the address cannot be listened on.
    """
    failures: list[JuiceError] = []

    def fail(error: JuiceError) -> None:
        failures.append(error)
        server.should_exit = True

    log_as_json("juice", "juice_server", "uvicorn.error", "asyncio")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    _check_port(settings)
    app = create(settings, on_ready=on_ready, on_failure=fail)
    protocol = guarded(
        header_timeout_s=settings.header_timeout,
        write_stall_s=settings.write_stall,
        max_connections=_max_connections(
            settings.max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        ),
    )
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=protocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(settings.drain + LAST_WORDS_S),
    )
    server = Server(config, app.state.service)
    LOG.info("settings", extra={"fields": {"settings": settings.public()}})
    server.run()
    if failures:
        raise failures[0]


def _max_connections(asked: int, n_files: int) -> int:
    """Return how many connections may be open when the system allows `n_files` open files."""
    return (
        asked if n_files == resource.RLIM_INFINITY else max(1, min(asked, n_files - RESERVED_FILES))
    )


def _check_port(settings: Settings) -> None:
    """Raise UsageError, before the model is loaded, when the address cannot be listened on."""
    try:
        with socket.create_server((settings.host, settings.port)):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
            "choose another --port or --host"
        ) from error
