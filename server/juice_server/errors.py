"""Errors and how they are answered: in OpenAI's envelope, or in Anthropic's on its routes."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.types import Scope

from juice.errors import (
    CancelledError,
    ContextLengthError,
    EngineStoppedError,
    HeadSetError,
    HeadSetMismatchError,
    HeadSetNotFoundError,
    JuiceError,
    NonFiniteError,
    OverloadedError,
    RequestError,
)
from juice_server.fields import Answer
from juice_server.trace import trace_of

LOG = logging.getLogger("juice_server")
CLOSE = {"connection": "close"}  # for answers sent before the body is read
CLIENT_GONE = 499  # as nginx logs it
INVALID = "invalid_request_error"


class NotReadyError(JuiceError):
    """The model is still loading, or the server is shutting down."""


class ClientGoneError(JuiceError):
    """The client left before its answer."""


class TimedOutError(JuiceError):
    """The request took longer than allowed."""


class BusyError(OverloadedError):
    """Too much waits already; `retry_after_s` says when there may be room, if that is known."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimitedError(BusyError):
    """The client's key may not use so much in a minute."""


class NotAllowedError(JuiceError):
    """The client's key may not do this."""


class UnknownModelError(RequestError):
    """The request names a model that is not served."""


# The status and the code of each error; a class that is not listed has those of its nearest base.
ANSWERS: dict[type, tuple[int, str]] = {
    ContextLengthError: (400, "context_length_exceeded"),
    UnknownModelError: (404, "model_not_found"),
    RequestError: (400, "invalid_value"),
    HeadSetMismatchError: (422, "head_set_mismatch"),
    HeadSetNotFoundError: (404, "head_set_not_found"),
    HeadSetError: (400, "invalid_head_set"),
    OverloadedError: (429, "queue_full"),
    RateLimitedError: (429, "rate_limit_exceeded"),
    NotAllowedError: (403, "permission_denied"),
    NotReadyError: (503, "not_ready"),
    EngineStoppedError: (503, "not_ready"),
    ClientGoneError: (CLIENT_GONE, "client_gone"),
    TimedOutError: (503, "timeout"),
    CancelledError: (503, "cancelled"),
    NonFiniteError: (500, "non_finite_logits"),
    JuiceError: (500, "generation_failed"),
    Exception: (500, "internal_error"),
}
TYPES = {**dict.fromkeys((400, 403, 404, 422), INVALID), 429: "overloaded_error"}
# The routes whose clients expect another envelope, and its types by status.
ANTHROPICS = "/v1/messages"
ANTHROPICS_TYPES = {
    400: INVALID,
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: INVALID,
    429: "rate_limit_error",
    503: "overloaded_error",
}
# What OpenAI's and Anthropic's clients would send again by themselves, to run and fail again.
IN_VAIN = frozenset({"timeout", "non_finite_logits"})
RETRY_AFTER_S = {"queue_full": 1.0, "not_ready": 5.0}  # where nothing was measured


class ErrorContent(Answer):
    """What went wrong."""

    message: str
    """What was received, what was expected, and what to do."""
    type: str
    """What clients may act on, such as `invalid_request_error` or `overloaded_error`."""
    param: str | None
    """The field that is wrong; null where none is."""
    code: str | None
    """The name of the error; see the table of errors."""


class ErrorAnswer(Answer):
    """The answer to a request that fails."""

    error: ErrorContent
    """What went wrong, where, and what to do."""


class MessagesErrorContent(Answer):
    """What went wrong, as Anthropic's clients expect it."""

    type: str
    """What clients may act on, such as `invalid_request_error` or `overloaded_error`."""
    message: str
    """What was received, what was expected, and what to do."""


class MessagesErrorAnswer(Answer):
    """The answer to a request that fails, as Anthropic's clients expect it."""

    type: Literal["error"] = "error"
    error: MessagesErrorContent
    """What went wrong, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The content of an error answer."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the envelope, with lone surrogates from the client escaped for UTF-8."""
        error = ErrorContent(
            message=_encodable(self.message),
            type=self.type,
            param=_encodable(self.param) if self.param else None,
            code=self.code,
        )
        return ErrorAnswer(error=error).model_dump()

    def response(self, scope: Scope) -> JSONResponse:
        """Return the answer, and record its code for the log and the metrics."""
        trace_of(scope).code = self.code or ""
        return JSONResponse(self.body_for(scope["path"]), self.status, headers=dict(self.headers))

    def body_for(self, path: str) -> dict[str, Any]:
        """Return the envelope that the clients of a route expect."""
        return in_anthropics_words(self) if path.startswith(ANTHROPICS) else self.body()


def in_anthropics_words(failure: Failure) -> dict[str, Any]:
    """Return the envelope that Anthropic's clients expect."""
    error = MessagesErrorContent(
        type=ANTHROPICS_TYPES.get(failure.status, "api_error"),
        message=_encodable(failure.message),
    )
    return MessagesErrorAnswer(error=error).model_dump()


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def install(app: Starlette) -> None:
    """Answer every exception of an app in the envelope."""
    for kind in (RequestValidationError, JuiceError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer)


async def _answer(request: Request, error: Exception) -> JSONResponse:
    return failure_of(error).response(request.scope)


def failure_of(error: Exception) -> Failure:
    """Return the answer to an exception."""
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        return Failure(
            status=error.status_code,
            message=str(error.detail),
            code=HTTPStatus(error.status_code).phrase.lower().replace(" ", "_"),
            headers=error.headers or {},
        )
    message = str(error)
    if not isinstance(error, JuiceError):
        LOG.error("unexpected error", exc_info=error)
        message = "the server failed on this request; its log has the details"
    status, code = next(ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS)
    retry_s = getattr(error, "retry_after_s", None) or RETRY_AFTER_S.get(code)
    headers = {"x-should-retry": "false"} if code in IN_VAIN else {}
    if retry_s:
        headers["retry-after"] = str(math.ceil(retry_s))
    return Failure(
        status=status,
        message=message,
        type=TYPES.get(status, "server_error"),
        param=getattr(error, "param", None),
        code=code,
        headers=headers,
    )


# For errors whose text from pydantic lacks a remedy.
UNKNOWN = "unknown field; /docs lists the fields of each request"
REMEDIES = {
    "extra_forbidden": UNKNOWN,
    "unexpected_keyword_argument": UNKNOWN,
    "model_attributes_type": (
        "expected a JSON object, sent with the header content-type: application/json"
    ),
    "dataclass_type": "expected none, context, parametric or an object with one as its target",
    "model_type": "expected an object",
}


def _invalid(error: RequestValidationError) -> Failure:
    # Of a union's branches, the one that got furthest is what the client meant.
    first = max(error.errors(), key=lambda problem: len(problem["loc"]))
    if first["type"] == "json_invalid":
        message = f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}"
        return Failure(status=400, message=message, code="invalid_json")
    # A union's branches are in pydantic's path, but not in the client's body.
    parts = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    path = [part for part in parts if not _is_branch(part)]
    problem = REMEDIES.get(first["type"], first["msg"])
    if first["type"] == "value_error":
        problem = str(first["ctx"]["error"])
    if first["type"] == "union_tag_invalid":
        path.append(first["ctx"]["discriminator"].strip("'"))
        problem = f"expected {first['ctx']['expected_tags']}, got {first['ctx']['tag']!r}"
    is_not_served = first["type"] == "not_served"
    name = str(first["ctx"]["name"]) if is_not_served else ".".join(path)
    if first["type"] == "model_attributes_type" and name:
        problem = REMEDIES["model_type"]
    message = f"{name or 'body'}: {problem}{_got(first)}"
    code = "unsupported_field" if is_not_served else "invalid_value"
    return Failure(status=400, message=message, param=name or None, code=code)


def _is_branch(part: str) -> bool:
    return "[" in part or part in ("str", "int") or part[:1].isupper()  # a class


def _got(error: dict[str, Any]) -> str:
    value = error.get("input")
    is_short = isinstance(value, str | int | float) and len(repr(value)) < 100
    return f" (got {value!r})" if is_short else ""


STATUSES = {
    400: "Something in the request is wrong; the error names the field.",
    401: "No key, or an unknown one.",
    403: "The key may not do this, or the host is not allowed.",
    404: "No such model or head set.",
    413: "The body is too large.",
    415: "The body is compressed.",
    422: "The head set was made for another model.",
    429: "Too much waits, or the key has used up its minute; see Retry-After.",
    500: "A fault of the server; its log has the details.",
    503: "Loading, shutting down, or out of time.",
}


def documented(model: type[Answer], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what FastAPI takes to document these statuses, or all STATUSES, with this answer."""
    return {
        status: {"model": model, "description": STATUSES[status]} for status in statuses or STATUSES
    }
