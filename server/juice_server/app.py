"""The FastAPI app, and the process that serves it: `juice serve` calls `serve`."""

from __future__ import annotations

import logging
import socket
from asyncio import create_task
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

import juice
from juice.errors import JuiceError, UsageError
from juice.steered_model import SteeredModel, load
from juice_server import errors
from juice_server.routes import generate, probes
from juice_server.service import Service
from juice_server.settings import Settings

LOG = logging.getLogger("juice_server")


def serve(settings: Settings, on_ready: Callable[[], None]) -> None:
    """Serve until a signal ends the process, calling `on_ready` once the model is loaded; raises JuiceError when it cannot be."""
    failures: list[JuiceError] = []

    def fail(error: JuiceError) -> None:
        failures.append(error)
        server.should_exit = True

    _check_port(settings)
    app = create(settings, on_ready=on_ready, on_failure=fail)
    server = uvicorn.Server(uvicorn.Config(app, host=settings.host, port=settings.port, log_level="warning"))
    server.run()
    if failures:
        raise failures[0]


def _check_port(settings: Settings) -> None:
    """Raise UsageError before the model is loaded when the address cannot be listened on."""
    try:
        with socket.create_server((settings.host, settings.port)):
            pass
    except OSError as error:
        raise UsageError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; choose another --port or --host") from error


def create(settings: Settings, *, on_ready: Callable[[], None], on_failure: Callable[[JuiceError], None]) -> FastAPI:
    """Make the app; the model loads in the background once it starts, `on_ready` hears that it is, or `on_failure` why it is not."""

    def load_model() -> SteeredModel:
        return load(
            settings.model, head_sets=settings.head_sets, device=settings.device, dtype=settings.dtype,
            revision=settings.revision, attn_implementation=settings.attn_implementation,
        )  # fmt: skip

    service = Service(load_model)

    async def start() -> None:
        try:
            await service.start()
            on_ready()
        except JuiceError as error:
            on_failure(error)
        except Exception as error:
            LOG.exception("loading failed")
            on_failure(JuiceError(f"{settings.model} could not be loaded: {error!r}"))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        loading = create_task(start())
        yield
        loading.cancel()

    app = FastAPI(title="JuICE", version=juice.__version__, lifespan=lifespan)
    app.state.service = service
    errors.install(app)
    app.include_router(generate.router)
    app.include_router(probes.router)
    return app
