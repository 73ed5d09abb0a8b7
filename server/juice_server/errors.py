"""Every failure leaves in OpenAI's envelope: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import math
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from juice.errors import (
    ContextLengthError,
    HeadSetError,
    HeadSetMismatchError,
    HeadSetNotFoundError,
    JuiceError,
    RequestError,
)

LOG = logging.getLogger("juice_server")


class NotReadyError(JuiceError):
    """The model is still loading."""


def envelope(
    status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> JSONResponse:
    """Return an error answer; what a client sent may hold lone surrogates, which UTF-8 cannot."""
    error = {"message": _encodable(message), "type": kind, "param": _encodable(param) if param else None, "code": code}
    return JSONResponse({"error": error}, status)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def install(app: FastAPI) -> None:
    """Route every exception of an app through the envelope."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(JuiceError, _refused)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)


# Where pydantic's own words do not say what to do.
REMEDIES = {
    "extra_forbidden": "unknown field; /docs lists the fields of each request",
    "model_attributes_type": "expected a JSON object, sent with the header content-type: application/json",
    "model_type": "expected an object or, for steer, a name: none, context or parametric",
}


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return envelope(400, f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}", code="invalid_json")
    path = [str(part) for part in first["loc"] if part != "body"]
    message = f"{'.'.join(path) or 'body'}: {REMEDIES.get(first['type'], first['msg'])}{_got(first)}"
    return envelope(400, message, param=".".join(path) or None, code="invalid_value")


def _got(error: dict[str, Any]) -> str:
    value = error.get("input")
    if isinstance(value, float) and not math.isfinite(value):
        return f" (got {value})"
    return f" (got {value!r})" if isinstance(value, str | int | float) and len(repr(value)) < 100 else ""


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    match error:
        case ContextLengthError():
            return envelope(400, str(error), param=error.param, code="context_length_exceeded")
        case RequestError():
            return envelope(400, str(error), param=error.param, code="invalid_value")
        case NotReadyError():
            return envelope(503, str(error), kind="server_error", code="not_ready")
        case HeadSetMismatchError():
            return envelope(422, str(error), param="steer.head_set", code="head_set_mismatch")
        case HeadSetNotFoundError():
            return envelope(404, str(error), param="steer.head_set", code="head_set_not_found")
        case HeadSetError():
            return envelope(400, str(error), param="steer.head_set", code="invalid_head_set")
    return envelope(500, str(error), kind="server_error", code="generation_failed")


async def _http(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return envelope(error.status_code, str(error.detail), code=code)


async def _unexpected(_request: Request, error: Exception) -> JSONResponse:
    LOG.error("unexpected error", exc_info=error)
    return envelope(500, "the server failed on this request; its log has the details", kind="server_error", code="internal_error")
