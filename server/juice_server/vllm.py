"""Steering under a plain `vllm serve`: what it is told to load, by short names that stay.

    --logits-processors juice_server.vllm:RowWriter
    --scheduler-cls juice_server.vllm.scheduler
    --middleware juice_server.vllm.Steering

A JSON body may have `steer`, as on JuICE's own routes, or within `vllm_xargs` as text or JSON text.
It becomes the coefficients that the plugin reads; what cannot be steered is refused before vLLM
sees it, and every other request passes unchanged. A body is read when vLLM reads it, which is after
it has checked the key of who sends it.
"""

from __future__ import annotations

import asyncio
import json
from importlib import import_module
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from juice.engine.contract import Capability
from juice.engine.steer import Steer
from juice.engine.vllm.plugin import FIELDS, PlainVllm, take_requests
from juice.errors import MissingCapabilityError, RequestError
from juice.formula import CONTRASTS
from juice_server.errors import failure_of
from juice_server.fields import SteerField
from juice_server.http import replaying

# What needs vLLM itself.
HOMES = {
    "RowWriter": ("juice.engine.vllm.state", "RowWriter"),
    "scheduler": ("juice.engine.vllm.patches", "salting_scheduler"),
}
STEER = TypeAdapter(SteerField)
# The routes whose `vllm_xargs` reach the sampling parameters; /invocations leads to the others.
STEERED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/invocations",
)


class Steering:
    """The middleware, which passes requests on with coefficients where they steer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._made: asyncio.Future[PlainVllm] | None = None
        take_requests()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await asyncio.wait([self._model_of(scope)])  # a failure is that of what steers
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        del MutableHeaders(scope=scope)["content-length"]  # of a body that may become another
        call = _Call(self, scope, receive, send)
        await self._app(scope, call.receive, call.send)

    def _model_of(self, scope: Scope) -> asyncio.Future[PlainVllm]:
        """Return the model, made once, in a thread of its own: its files are read.

        One that could not be made is made again.
        """
        if self._made is None or _has_failed(self._made):
            config = scope["app"].state.vllm_config
            self._made = asyncio.ensure_future(asyncio.to_thread(PlainVllm.of, config))
        return self._made

    async def translated(self, body: bytes, scope: Scope) -> bytes:
        """Return a body with coefficients in place of `steer`.

        Raises JuiceError or RequestValidationError for one that cannot be steered as it asks, and
        whatever reading the model's files does.
        """
        try:
            fields = json.loads(body)
        except ValueError:
            return body  # vLLM refuses it, or it is no JSON at all
        except RecursionError as error:
            raise RequestError("the body is nested too deeply; send a flatter one") from error
        if not isinstance(fields, dict):
            return body
        others, params = fields.get("vllm_xargs"), fields.get("sampling_params")
        others = dict(others) if isinstance(others, dict) else {}
        given: dict[str, Any] = {"vllm_xargs": others}
        if isinstance(params, dict):
            given["sampling_params.extra_args"] = params.get("extra_args")
        for where, names in given.items():
            if isinstance(names, dict) and (taken := sorted(FIELDS & names.keys())):
                raise RequestError(
                    f"{where} holds {taken[0]!r}, which JuICE writes itself; send steer",
                    param=where,
                )
        asked = fields.pop("steer", None)
        if asked is None:
            asked = others.pop("steer", None)
        if asked is None:
            return body
        steer = _parsed(asked)
        if steer.method in CONTRASTS:
            raise MissingCapabilityError(
                f"vLLM cannot {Capability.CONTRAST.value}; use juice's own engine"
            )
        if steer.gate == "auto" or steer.positions != "all" or isinstance(steer.strength, tuple):
            raise MissingCapabilityError(
                "a plain vllm serve has no gates, and steers all positions by one strength; use "
                "`juice serve --engine vllm`, or drop gate, positions and schedule"
            )
        model = await asyncio.shield(self._model_of(scope))
        if written := model.extra_args(steer):
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path not in STEERED:
                raise MissingCapabilityError(
                    f"{path} takes no steering; expected one of {', '.join(STEERED)}"
                )
            if fields.get("use_beam_search"):
                raise MissingCapabilityError(
                    "vLLM's beam search does not steer; drop use_beam_search or steer"
                )
        fields["vllm_xargs"] = {**others, **written}
        return json.dumps(fields).encode()


class _Call:
    """A request whose body is translated once it is asked for.

    Where that fails, the failure is the answer, and what vLLM answers to a client that it takes for
    gone is dropped.
    """

    def __init__(self, steering: Steering, scope: Scope, receive: Receive, send: Send) -> None:
        self._steering, self._scope = steering, scope
        self._receive, self._send = receive, send
        self._given: Receive | None = None  # what comes once the body is translated
        self._has_failed = False

    async def receive(self) -> Message:
        """Return the next message, the first of which holds the whole body."""
        if self._given is None:
            self._given = await self._translate()
        return await self._given()

    async def send(self, message: Message) -> None:
        """Pass on what vLLM answers."""
        if not self._has_failed:
            await self._send(message)

    async def _translate(self) -> Receive:
        scope, receive = self._scope, self._receive
        try:
            body = await Request(scope, receive).body()
            return replaying(await self._steering.translated(body, scope), receive)
        except ClientDisconnect:
            pass
        except Exception as error:  # of whatever kind, vLLM would blame the body for it
            self._has_failed = True
            await failure_of(error).response(scope)(scope, receive, self._send)
        return _gone


def _has_failed(made: asyncio.Future[PlainVllm]) -> bool:
    return made.done() and (made.cancelled() or made.exception() is not None)


async def _gone() -> Message:
    return {"type": "http.disconnect"}


def _parsed(asked: Any) -> Steer:
    """Return what a request asks for; an object may be JSON text, as `vllm_xargs` hold no other."""
    try:
        if isinstance(asked, str) and asked.lstrip().startswith("{"):
            asked = json.loads(asked)
        steer = STEER.validate_python(asked)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RequestError(f"steer is not JSON: {error}", param="steer") from error
    except ValidationError as error:
        errors = [{**each, "loc": ("body", "steer", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(errors) from error
    assert steer is not None, "null means no steering, and was taken for that"
    return steer


def __getattr__(name: str) -> Any:
    """Return one of HOMES, imported when it is asked for."""
    if name not in HOMES:
        raise AttributeError(f"module 'juice_server.vllm' has no attribute {name!r}")
    module, attribute = HOMES[name]
    return getattr(import_module(module), attribute)
