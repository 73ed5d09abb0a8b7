"""The FastAPI app: the protocols' routers, middleware, the OpenAPI document, the playground at /.

The playground is plain files that ask nobody but this server; its requests need the key, not it.
"""

from __future__ import annotations

import json
import logging
from asyncio import create_task, to_thread
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import docstring_parser
from fastapi import APIRouter, FastAPI, Security
from fastapi.responses import FileResponse
from fastapi.security import APIKeyHeader, HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import juice
from juice.errors import GenerationError, JuiceError, RequestError
from juice.files import LOOK
from juice.loading import load
from juice.steered_model import SteeredModel
from juice_server import errors
from juice_server.errors import ErrorAnswer, MessagesErrorAnswer, documented
from juice_server.fields import STEERING_HEADER
from juice_server.head_sets import check_start
from juice_server.http import BodyIntake, HostCheck, KeyCheck, Observer, PlainPath
from juice_server.keys import Keys
from juice_server.routes import about, anthropic, compare, explain, native, openai, responses
from juice_server.service import Service
from juice_server.settings import Settings
from juice_server.telemetry.metrics import Metrics


def describe_fields(app: FastAPI) -> None:
    """Describe the fields that have no text of their own, and the headers of answers.

    The library's dataclasses list their fields in their docstrings; a constant is its value.
    """
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = make()
            for schema in document["components"]["schemas"].values():
                _describe(schema)
            for methods in document["paths"].values():
                for operation in methods.values():
                    _add_headers(operation["responses"])
        return make()

    app.openapi = openapi  # type: ignore[method-assign]


def _add_headers(responses: dict[str, Any]) -> None:
    for status, response in responses.items():
        texts = {"x-request-id": "The id of the request: the client's own, or a new one."}
        if status in ("429", "503"):
            texts["retry-after"] = "After how many seconds there may be room."
        headers = response.setdefault("headers", {})
        for name, text in texts.items():
            headers[name] = {"description": text, "schema": {"type": "string"}}


def _describe(schema: dict[str, Any]) -> None:
    for field in schema.get("properties", {}).values():
        if "const" in field:
            constant = json.dumps(field["const"]).strip('"')
            field.setdefault("description", f"Always `{constant}`.")
        elif field.get("type") == "null":
            field.setdefault("description", "Always null.")
    text = docstring_parser.parse(schema.get("description", ""))
    for argument in text.params:
        if argument.arg_name in schema.get("properties", {}):
            field = schema["properties"][argument.arg_name]
            field.setdefault("description", " ".join((argument.description or "").split()))
    if text.params:
        schema["description"] = text.short_description or ""


FOLDER = Path(__file__).parent / "playground"
FILES = {path.name: path for path in (*sorted(FOLDER.iterdir()), LOOK) if path.is_file()}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # the files of another version have the same names
}

pages = APIRouter(include_in_schema=False)


@pages.api_route("/", methods=["GET", "HEAD"])
async def page() -> FileResponse:
    """Return the page."""
    return await file("index.html")


@pages.get("/playground/{name}")
async def file(name: str) -> FileResponse:
    """Return one of its files."""
    if name not in FILES:
        raise HTTPException(404)
    path = FILES[name]
    return FileResponse(path, headers=HEADERS, media_type=TYPES[path.suffix])


LOG = logging.getLogger("juice_server")
BEARER = HTTPBearer(auto_error=False, description="The key, as OpenAI's clients send it.")
X_API_KEY = APIKeyHeader(
    name="x-api-key", auto_error=False, description="The key, as Anthropic's clients send it."
)


def load_model(settings: Settings) -> SteeredModel:
    """Load the model that the settings name, with their head sets and chat template.

    No request waits for what structures need: that is made here, where the model can have any.
    Raises JuiceError where it cannot be loaded, or its head sets do not serve the defaults.
    """
    model = load(settings.model, **settings.load_options())
    try:
        if settings.chat_template is not None:
            template = model.with_chat_template(settings.chat_template).prompts.chat_template
            if template != model.own_chat_template:
                model.description.tokenizer.chat_template = template
        check_start(model.head_sets, settings)
        try:
            model.engine.prepare_structures()
        except (RequestError, GenerationError) as error:
            LOG.info("%s", error)  # and so is who asks for one
    except BaseException:
        model.close()
        raise
    return model


def create(
    settings: Settings,
    keys: Keys | None = None,
    *,
    hosts: Collection[str] | None = None,
    on_ready: Callable[[SteeredModel], None] = lambda _model: None,
    on_failure: Callable[[JuiceError], None] = lambda _error: None,
) -> FastAPI:
    """Make the app; once it starts, the model loads in the background.

    `on_ready` is called with the loaded model, `on_failure` when it cannot be loaded or its engine
    is lost. Without `keys`, nobody needs one. It is asked by any host, or by loopback ones and
    `hosts` alone. Raises UsageError for traces that cannot be sent.
    """
    model_name = settings.served_model_name or settings.model
    metrics, spans = Metrics(model_name), None
    if settings.otlp_traces_endpoint is not None:
        spans = import_module("juice_server.telemetry.spans").Spans(
            settings.otlp_traces_endpoint, model_name
        )
    service = Service(lambda: load_model(settings), settings, metrics)

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
        root_path=settings.root_path,
        redirect_slashes=False,  # a redirect would repeat whatever host the client sent
        redoc_url=None,  # its page asks another host for a picture
    )
    app.state.service = service
    errors.install(app)
    # Only for the document: the middleware below checks the key.
    key = [] if keys is None else [Security(scheme) for scheme in (BEARER, X_API_KEY)]
    for protocol in (native, compare, explain, openai, responses, about):
        app.include_router(protocol.router, dependencies=key, responses=documented(ErrorAnswer))
    seen = documented(ErrorAnswer, *(() if keys is None else (401, 403)), 500)
    app.include_router(about.keyed_router, dependencies=key, responses=seen)
    app.include_router(
        anthropic.router, dependencies=key, responses=documented(MessagesErrorAnswer)
    )
    app.include_router(about.open_router)
    app.include_router(pages)
    guard(app, settings, keys)
    if hosts is not None:
        app.add_middleware(HostCheck, hosts=hosts)
    describe_fields(app)
    app.add_middleware(Observer, metrics=metrics, spans=spans)
    allow_origins(app, settings)
    return app


def guard(app: Starlette, settings: Settings, keys: Keys | None) -> None:
    """Put what every request passes before an app: paths, keys, then the bounds of bodies."""
    # The last one added runs first.
    app.add_middleware(BodyIntake, max_bytes=settings.max_body, timeout_s=settings.body_timeout)
    if keys is not None:
        app.add_middleware(KeyCheck, keys=keys)
    app.add_middleware(PlainPath, prefix=settings.root_path)


def allow_origins(app: Starlette, settings: Settings) -> None:
    """Let pages of other origins read answers: last, so that they read every refusal, too."""
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", STEERING_HEADER, "retry-after"],
        )


def create_admin(service: Service) -> FastAPI:
    """Make the app of the port for probes and metrics, which needs no key."""
    app = FastAPI(title="JuICE", openapi_url=None, redirect_slashes=False)
    app.state.service = service
    errors.install(app)
    app.include_router(about.open_router)
    app.include_router(about.keyed_router)
    return app
