"""The process that serves the app: socket, signals, shutdown. `juice serve` calls `serve`."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from threading import Timer
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from juice.errors import JuiceError, UsageError
from juice.steered_model import SteeredModel
from juice_server.app import create, create_admin
from juice_server.connections import Refusals, guarded
from juice_server.keys import Keys
from juice_server.service import Service
from juice_server.settings import Settings, injected_names

KEEP_ALIVE_S = 75
# Time to report the cut at the drain limit to clients.
LAST_WORDS_S = 5.0
CLOSING_S = 15.0  # to close the engine and end the process
ADMIN_CONNECTIONS = 32
RESERVED_FILES = 64 + ADMIN_CONNECTIONS  # for weights, logs and libraries, too
LOG = logging.getLogger("juice_server")


class Server(uvicorn.Server):
    """Uvicorn that leaves in steps.

    At a signal /readyz fails; after the time for that to be noticed it drains: it takes nothing
    new, and cuts what runs at the limit. Whatever hangs, it then ends.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        keys: Keys | None,
        admin: uvicorn.Config | None,
    ) -> None:
        super().__init__(config)
        self._service, self._keys = service, keys
        self._admin = None if admin is None else uvicorn.Server(admin)
        self._n_signals = 0
        self._drains_at: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Start to leave; a second signal cuts what runs, a third exits without waiting."""
        self._n_signals += 1
        LOG.info("shutting down", extra={"fields": {"signal": sig, "n_signals": self._n_signals}})
        settings = self._service.settings
        if self._drains_at is None:
            self._service.is_leaving = True
            self._drains_at = time.monotonic() + settings.lame_duck
            _end_within(settings.lame_duck + settings.drain + LAST_WORDS_S + CLOSING_S)
        if settings.lame_duck == 0 or self._n_signals > 1:
            self._drain()
        if self._n_signals > 1 and self._loop is not None:
            # Not here: the signal may have come while this thread holds a lock.
            self._loop.call_soon_threadsafe(self._service.cut)
        self.force_exit = self._n_signals > 2

    async def on_tick(self, counter: int) -> bool:
        if self._drains_at is not None and time.monotonic() >= self._drains_at:
            self._drain()
        return await super().on_tick(counter)

    def _read_keys(self) -> None:
        """Read the keys again; a file that cannot be read changes nothing."""
        try:
            if self._keys is not None:
                self._keys.reload()
        except UsageError as error:
            LOG.error("the keys stay as they are: %s", error)
        else:
            LOG.info("read the keys again", extra={"fields": {"n_keys": len(self._keys or ())}})

    def lose_engine(self) -> None:
        """End at once what the engine no longer answers, and leave."""
        self.config.timeout_graceful_shutdown = int(LAST_WORDS_S)
        _end_within(LAST_WORDS_S + CLOSING_S)
        self._drain()
        self._service.cut()

    def _drain(self) -> None:
        self._service.is_draining = self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGHUP, self._read_keys)
        if self._admin is not None:
            self._admin.config.load()
            self._admin.lifespan = self._admin.config.lifespan_class(self._admin.config)
            await self._admin.startup()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what runs, up to the drain limit; the probes answer until then."""
        cut = asyncio.get_running_loop().call_later(self._service.settings.drain, self._service.cut)
        await super().shutdown(sockets)
        cut.cancel()
        if self._admin is not None:
            await self._admin.shutdown()


def serve(settings: Settings, on_ready: Callable[[SteeredModel], None]) -> None:
    """Serve until a signal ends the process, calling `on_ready` once the model is loaded.

    Raises JuiceError when the model cannot be loaded, the engine is lost, or the address cannot be
    listened on.
    """
    failures: list[JuiceError] = []

    def fail(error: JuiceError) -> None:
        failures.append(error)
        server.lose_engine()

    _check_ports(settings)
    keys = settings.read_keys()
    app = create(settings, keys, hosts=settings.hosts, on_ready=on_ready, on_failure=fail)
    service: Service = app.state.service
    n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = connection_bound(settings.max_connections, n_files)
    refused = Refusals(service.metrics)
    config = _config(settings, app, settings.port, most, refused)
    admin = None
    if settings.admin_port is not None:
        probes = create_admin(service)
        admin = _config(
            settings, probes, settings.admin_port, ADMIN_CONNECTIONS, refused, lifespan="off"
        )
    server = Server(config, service, keys, admin)
    LOG.info("settings", extra={"fields": settings.public()})
    if ignored := injected_names():
        LOG.info(
            "ignoring variables that Kubernetes sets for a Service",
            extra={"fields": {"variables": ignored}},
        )
    if settings.is_open:
        LOG.warning(
            "anybody who reaches %s may use this server: set --api-key or --api-keys-file",
            settings.host,
        )
    server.run()
    if failures:
        raise failures[0]


def _config(
    settings: Settings,
    app: FastAPI,
    port: int,
    max_connections: int,
    refused: Refusals,
    **options: Any,
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        port=port,
        http=guarded(settings, max_connections, refused),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(settings.drain + LAST_WORDS_S),
        **options,
    )


def _end_within(seconds: float) -> None:
    """End the process with status 1 unless it ends by itself within this time."""

    def end() -> None:
        LOG.critical("the process does not end by itself: something hangs")
        os._exit(1)

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()


def connection_bound(asked: int, n_files: int) -> int:
    """Return the most open connections when the system allows `n_files` open files."""
    if n_files == resource.RLIM_INFINITY:
        return asked
    return max(1, min(asked, n_files - RESERVED_FILES))


def _check_ports(settings: Settings) -> None:
    """Raise UsageError, before the model is loaded, when an address cannot be listened on."""
    host = settings.host
    if settings.admin_port == settings.port != 0:
        raise UsageError(f"port and admin-port are both {settings.port}; choose another")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for option, port in (("port", settings.port), ("admin-port", settings.admin_port)):
        if port is None:
            continue
        try:
            socket.create_server((host, port), family=family).close()
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror}; "
                f"choose another --{option} or --host"
            ) from error
