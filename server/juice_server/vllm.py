"""Steering under a plain `vllm serve`: what it is told to load, by short names that stay.

    --logits-processors juice_server.vllm:RowWriter
    --scheduler-cls juice_server.vllm.scheduler
    --middleware juice_server.vllm.Steering

A JSON body may have `steer`, as on JuICE's own routes, or within `vllm_xargs` as text or JSON text.
It becomes the coefficients that the plugin reads; what cannot be steered is refused before vLLM
sees it, and every other request passes unchanged.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from juice.engine.contract import Capability
from juice.engine.steer import Steer
from juice.engine.vllm.plugin import FIELDS, PlainVllm, take_requests
from juice.errors import JuiceError, MissingCapabilityError, RequestError
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
        self._model: PlainVllm | None = None
        take_requests()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            body = self._translated(await Request(scope, receive).body(), scope)
        except ClientDisconnect:
            return
        except (JuiceError, RequestValidationError) as error:
            await failure_of(error).response(scope)(scope, receive, send)
            return
        MutableHeaders(scope=scope)["content-length"] = str(len(body))
        await self._app(scope, replaying(body, receive), send)

    def _translated(self, body: bytes, scope: Scope) -> bytes:
        """Return a body with coefficients in place of `steer`.

        Raises JuiceError or RequestValidationError for one that cannot be steered as it asks.
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
        if self._model is None:
            self._model = PlainVllm.of(scope["app"].state.vllm_config)
        if written := self._model.extra_args(steer):
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
