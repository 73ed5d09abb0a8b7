"""The guards between a connection and a route, in the order in which a request meets them.

- A host is refused where a page of another site could make it up.
- A key is needed where any are set, except for probes and pages.
- A body is received as a whole, within a size and a time, before the app sees any of it.
- No field of a body is given twice: programs differ in which of the two they take.
- Work ends when its client leaves, or when the time of its request is up.

`Observer` is the outermost: every request gets an id, a log line, a span, a count in metrics.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Collection, Coroutine
from dataclasses import asdict
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from juice.errors import EngineStoppedError
from juice.files import without_twins
from juice_server.dispatcher import SMALL_BYTES
from juice_server.errors import (
    CLIENT_GONE,
    CLOSE,
    ClientGoneError,
    Failure,
    NotAllowedError,
    TimedOutError,
    failure_of,
)
from juice_server.keys import Keys, Permission
from juice_server.telemetry.metrics import Metrics
from juice_server.trace import Trace, trace_of

if TYPE_CHECKING:
    from juice_server.telemetry.spans import Spans

T = TypeVar("T")

PROBES = frozenset({"/healthz", "/readyz", "/health", "/ping"})
# Pages, which have nothing to hide: a browser sends no header when it opens one.
OPEN_PATHS = PROBES | {"/", "/docs", "/openapi.json"}
OPEN_FOLDERS = ("/playground/", "/static-offline-docs/")
# What needs more than to read, and what is sent but only reads.
METRICS_PATH = "/metrics"
READING = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})


class KeyCheck:
    """The middleware that requires a key which may do what is asked."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        answer = self._app if refusal is None else refusal.response(scope)
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> Failure | None:
        """Return the reason to refuse a request, None for one that may pass; note its client."""
        client, needed = self._keys.find(_sent_key(scope)), _needed(scope)
        if client is not None:
            trace_of(scope).client = client
        path: str = scope["path"]
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDERS):
            return None
        if client is None:
            message = "the API key is missing or unknown; send the header Authorization: Bearer KEY"
            headers = {"www-authenticate": "Bearer", **CLOSE}
            return Failure(status=401, message=message, code="invalid_api_key", headers=headers)
        if needed in client.scopes:
            return None
        return failure_of(
            NotAllowedError(
                f"the key {client.name} has no scope {needed}, but {', '.join(client.scopes)}: add "
                "it in the keys file, or use another key"
            )
        )


def _needed(scope: Scope) -> Permission:
    """Return the scope that a request needs."""
    if scope["path"] == METRICS_PATH:
        return "metrics"
    return "generate" if scope["method"] == "POST" and scope["path"] not in READING else "read"


def _sent_key(scope: Scope) -> bytes:
    """Return the key of a request, empty if it has none; Anthropic's clients have a header."""
    headers: dict[bytes, bytes] = dict(reversed([*scope["headers"]]))  # the first of each name
    kind, _, key = headers.get(b"authorization", b"").partition(b" ")
    return (headers.get(b"x-api-key") or (key if kind.lower() == b"bearer" else b"")).strip()


class HostCheck:
    """The middleware that refuses requests for a host which is neither loopback nor listed.

    A web page can lead a host of its own to 127.0.0.1, and then read what a server there answers
    to anybody (DNS rebinding). Probes reveal nothing, so they pass.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, frozenset(host.casefold() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and scope["path"] not in PROBES:
            host = Headers(scope=scope).get("host", "localhost")  # HTTP/1.0 need not have one
            name = _without_port(host)
            if name not in self._hosts and not _is_loopback(name):
                answer = _of_another_host(host).response(scope)
        await answer(scope, receive, send)


def _without_port(host: str) -> str:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.rstrip(".").casefold()


def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _of_another_host(host: str) -> Failure:
    reason = (
        f"the request is for the host {host[:100]!r}, but this server has no keys and answers for "
        "localhost; allow the host (--allowed-hosts), or set --api-key"
    )
    return Failure(status=403, message=reason, code="host_not_allowed")


class PlainPath:
    """The middleware that reads a path without a proxy's prefix, and without a slash at its end.

    So keys are checked for the route that answers. It does not redirect: that would repeat whatever
    host the client sent.
    """

    def __init__(self, app: ASGIApp, prefix: str = "") -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if self._prefix and f"{path}/".startswith(f"{self._prefix}/"):
                path = path.removeprefix(self._prefix)
            scope["path"] = path.rstrip("/") or "/"
        await self._app(scope, receive, send)


class BodyIntake:
    """The middleware that receives bodies: 413 if too large, 400 if too slow, 415 if compressed."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app, self._max_bytes, self._timeout_s = app, max_bytes, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif isinstance(body := await self._body(scope, receive), Failure):
            await body.response(scope)(scope, receive, send)
        else:
            trace_of(scope).n_body_bytes = len(body)
            await self._app(scope, replaying(body, receive), send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | Failure:
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            reason = "the request has a content-length and is chunked, too; send one of them"
            return Failure(status=400, message=reason, code="invalid_http", headers=CLOSE)
        if (coding := headers.get("content-encoding", "identity").strip().lower()) != "identity":
            reason = f"the body is compressed (content-encoding: {coding}); send it as it is"
            return Failure(status=415, message=reason, code="unsupported_encoding", headers=CLOSE)
        if scope["path"] in OPEN_PATHS:
            return b""  # nothing is received for whoever needs no key
        if int(headers.get("content-length", "0")) > self._max_bytes:
            return self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                async for part in Request(scope, receive).stream():
                    body += part
                    if len(body) > self._max_bytes:
                        return self._too_large()
        except ClientDisconnect:
            return failure_of(ClientGoneError("the client left while sending its body"))
        except TimeoutError:
            reason = f"the body did not arrive within {self._timeout_s:g} s; send it without pauses"
            return Failure(status=400, message=reason, code="body_timeout", headers=CLOSE)
        return bytes(body)

    def _too_large(self) -> Failure:
        reason = (
            f"the body has more than {self._max_bytes} bytes; "
            "send less, or raise the server's max_body"
        )
        # The connection stays open: where it is closed before the client has sent all of its body,
        # the answer is lost.
        return Failure(status=413, message=reason, code="body_too_large")


def replaying(body: bytes, receive: Receive) -> Receive:
    """Return a channel that gives a received body, and then whatever else comes."""
    received: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return received.pop() if received else await receive()

    return replay


MAX_DEPTH = 100
TOO_DEEP = f"lists and objects are nested more than {MAX_DEPTH} levels deep; send a flatter one"
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class StrictRequest(Request):
    """A request whose JSON is text that can be sent on, nested no deeper than what reads it goes.

    It has every field once, and no number that cannot be read.
    """

    async def json(self) -> Any:
        """Return the body; raises HTTPException for what no field can be."""
        body = await self.body()
        if len(body) <= SMALL_BYTES:
            return _parsed(body)
        # A body of many small objects takes a second, in which nobody else would be served.
        return await asyncio.to_thread(_parsed, body)


def _parsed(body: bytes) -> Any:
    """Return the JSON of a body; raises HTTPException."""
    try:
        text = body.decode("utf-8-sig")
        content = json.loads(text, object_pairs_hook=without_twins, parse_int=_whole)
        _check_text(text, content)
        _check_depth(text, content)
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        reason = f"the body is not UTF-8: {error.reason} at byte {error.start}; send UTF-8"
        raise HTTPException(400, reason) from error
    except RecursionError as error:
        raise HTTPException(400, f"in the body {TOO_DEEP}") from error
    except ValueError as error:
        raise HTTPException(400, f"in the body {error}") from error
    return content


def _check_text(text: str, content: Any) -> None:
    """Raise ValueError for half of a pair of surrogates, which is no character."""
    if SURROGATE.search(text) is None:
        return  # what is UTF-8 has none, unless escaped
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise ValueError(f"{half} is half of a character; send both halves, or neither") from None


def _check_depth(text: str, content: Any) -> None:
    """Raise ValueError for JSON that is nested too deeply."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    level = [content]
    for _ in range(MAX_DEPTH):
        held = [one.values() if isinstance(one, dict) else one for one in level]
        level = [inner for one in held for inner in one if isinstance(inner, dict | list)]
        if not level:
            return
    raise ValueError(TOO_DEEP)


def _whole(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ValueError(
            f"is a number of {len(digits)} digits; no field takes one so large"
        ) from None


class StrictRoute(APIRoute):
    """A route whose requests are StrictRequests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


def left_s(trace: Trace, timeout_s: float) -> float:
    """Return the seconds that are left of a request's time, which began with its headers."""
    return timeout_s - trace.age_s


def timed_out(timeout_s: float) -> TimedOutError:
    """Return the error of a request whose time is up."""
    return TimedOutError(f"the request took more than {timeout_s:g} s; ask for fewer tokens")


async def while_present(request: Request, timeout_s: float, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work, which is cancelled when the client leaves or the time is up.

    Raises ClientGoneError, TimedOutError, and what the work raises.
    """
    task, leaving = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        done, _ = await asyncio.wait(
            (task, leaving),
            timeout=max(0.0, left_s(trace_of(request.scope), timeout_s)),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if task in done:
            return task.result()
        if leaving in done:
            raise ClientGoneError("the client left")
        raise timed_out(timeout_s)
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


ACCESS = logging.getLogger("juice_server.access")


class Observer:
    """The middleware that records every request; one without `spans` sends no traces."""

    def __init__(self, app: ASGIApp, metrics: Metrics, spans: Spans | None = None) -> None:
        self._app = app
        self._metrics, self._spans = metrics, spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request and record the outcome; an uncaught exception becomes a 500."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace, status = trace_of(scope), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = trace.id
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except (asyncio.CancelledError, Exception) as error:
            if status:
                raise
            if isinstance(error, asyncio.CancelledError):  # the process ends before the request
                error = EngineStoppedError("the server is shutting down")
            await failure_of(error).response(scope)(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            self._record(scope, trace, route, status or CLIENT_GONE)

    def _record(self, scope: Scope, trace: Trace, route: str, status: int) -> None:
        self._metrics.answered(route, status, trace)
        if trace.is_dull:
            return
        gates = [one.steering.gate for one in trace.completions]
        trace_id = self._spans.record(scope, trace, route, status) if self._spans else None
        fields = {
            "id": trace.id,
            "trace_id": trace_id,
            "key": trace.client.name if trace.client.has_key else None,
            "method": scope["method"],
            "route": route,
            "status": status,
            "code": trace.code or None,
            "duration_s": round(trace.age_s, 4),
            "steer": trace.steer or None,
            "stream": trace.is_stream or None,
            "prompt_tokens": trace.n_prompt_tokens or None,
            "generated_tokens": trace.n_generated_tokens or None,
            "finish_reasons": [one.finish_reason for one in trace.completions] or None,
            "gates": [asdict(gate) for gate in gates if gate is not None] or None,
            "prompts": list(trace.prompts) or None,
        }
        known = {name: value for name, value in fields.items() if value is not None}
        ACCESS.info("request", extra={"fields": known})
