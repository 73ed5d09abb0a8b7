"""The FastAPI app: its routes and middleware."""

from __future__ import annotations

import logging
from asyncio import create_task, to_thread
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module

from fastapi import FastAPI, Security
from fastapi.security import APIKeyHeader, HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware

import juice
from juice import SteeredModel, load
from juice.errors import JuiceError
from juice_server import errors
from juice_server.document import describe_fields
from juice_server.head_sets import check_setting
from juice_server.intake import BodyIntake
from juice_server.keys import Keys
from juice_server.routes import (
    chat,
    compare,
    completions,
    explain,
    generate,
    head_sets,
    messages,
    models,
    origins,
    playground,
    probes,
    responses,
    sweep,
    tokens,
)
from juice_server.schemas.failures import (
    CHANGES,
    STATUSES,
    ErrorAnswer,
    MessagesErrorAnswer,
    documented,
)
from juice_server.schemas.streams import STEERING_HEADER
from juice_server.security import KeyCheck
from juice_server.service import Service
from juice_server.settings import Settings
from juice_server.telemetry.metrics import Metrics
from juice_server.telemetry.observe import Observer

LOG = logging.getLogger("juice_server")
BEARER = HTTPBearer(auto_error=False, description="The key, as OpenAI's clients send it.")
X_API_KEY = APIKeyHeader(
    name="x-api-key", auto_error=False, description="The key, as Anthropic's clients send it."
)


def create(
    settings: Settings,
    keys: Keys | None = None,
    *,
    on_ready: Callable[[SteeredModel], None] = lambda _model: None,
    on_failure: Callable[[JuiceError], None] = lambda _error: None,
) -> FastAPI:
    """Make the app; once it starts, the model loads in the background.

    `on_ready` is called with the loaded model; `on_failure` with the reason when it cannot be
    loaded, or when the engine loses a process. Without `keys`, nobody needs one. Raises UsageError
    for traces that cannot be sent, and where nobody may make the changes that the settings allow.
    """
    check_setting(settings, keys)

    def load_model() -> SteeredModel:
        model = load(
            settings.model,
            head_sets=settings.head_sets,
            limits=settings.limits(),
            **settings.load_options(),
        )
        if settings.chat_template is not None:
            tokenizer = model.description.tokenizer
            tokenizer.chat_template = model.with_chat_template(
                settings.chat_template
            ).prompts.chat_template
        return model

    model_name = settings.served_model_name or settings.model
    metrics, spans = Metrics(model_name), None
    if settings.otlp_traces_endpoint is not None:
        spans = import_module("juice_server.telemetry.spans").Spans(
            settings.otlp_traces_endpoint, model_name
        )
    service = Service(load_model, settings, metrics)

    async def start() -> None:
        try:
            await service.start()
            service.when_lost(on_failure)
            on_ready(service.model)
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
        service.close()
        if spans is not None:
            await to_thread(spans.close)

    app = FastAPIOffline(
        title="JuICE",
        version=juice.__version__,
        lifespan=lifespan,
        redirect_slashes=False,  # a redirect would repeat whatever host the client sent
        redoc_url=None,  # its page asks another host for a picture
    )
    app.state.service = service
    errors.install(app)
    # Only for the document: the middleware below checks the key.
    key = [] if keys is None else [Security(own) for own in (BEARER, X_API_KEY)]
    looking_inside = (compare, origins, sweep, explain)
    generating = (generate, *looking_inside, completions, chat, responses)
    for room in (*generating, models, head_sets, tokens):
        app.include_router(room.router, dependencies=key, responses=documented(ErrorAnswer))
    if settings.allow_head_set_changes:
        app.include_router(
            head_sets.changes,
            dependencies=key,
            responses=documented(ErrorAnswer, *STATUSES, *CHANGES),
        )
    seen = documented(ErrorAnswer, *(() if keys is None else (401, 403)), 500)
    app.include_router(probes.keyed, dependencies=key, responses=seen)
    app.include_router(messages.router, dependencies=key, responses=documented(MessagesErrorAnswer))
    app.include_router(probes.router)
    app.include_router(playground.router)
    # The last one added runs first.
    app.add_middleware(BodyIntake, max_bytes=settings.max_body, timeout_s=settings.body_timeout)
    if keys is not None:
        app.add_middleware(KeyCheck, keys=keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", STEERING_HEADER, "retry-after"],
        )
    describe_fields(app)
    app.add_middleware(Observer, metrics=metrics, spans=spans)
    return app


def create_admin(service: Service) -> FastAPI:
    """Make the app of the port for probes and metrics, which needs no key."""
    app = FastAPI(title="JuICE", openapi_url=None, redirect_slashes=False)
    app.state.service = service
    errors.install(app)
    app.include_router(probes.router)
    app.include_router(probes.keyed)
    return app
