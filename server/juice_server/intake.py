"""Receiving a whole body before the app sees any of it, within a size and a time."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from juice_server.errors import CLOSE, ClientGoneError, Failure, failure_of
from juice_server.security import OPEN_PATHS
from juice_server.trace import trace_of


def replaying(body: bytes, receive: Receive) -> Receive:
    """Return what gives a body that was received, and then whatever else comes."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


class BodyIntake:
    """The middleware that receives bodies: 413 if too large, 400 if too slow."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its whole body, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            message = "the request has a content-length and is chunked, too; send one of them"
            failure = Failure(status=400, message=message, code="invalid_http", headers=CLOSE)
            await failure.response(scope)(scope, receive, send)
            return
        if scope["path"] in OPEN_PATHS:
            # Nothing is received for whoever needs no key.
            await self._app(scope, replaying(b"", receive), send)
            return
        declared = int(headers.get("content-length", "0"))
        body = await self._body(receive) if declared <= self._max_bytes else self._too_large()
        if isinstance(body, Failure):
            await body.response(scope)(scope, receive, send)
            return
        trace_of(scope).n_body_bytes = len(body)
        await self._app(scope, replaying(body, receive), send)

    async def _body(self, receive: Receive) -> bytes | Failure:
        """Return the body, or why it is refused."""
        body, is_whole = bytearray(), False
        try:
            async with asyncio.timeout(self._timeout_s):
                while not is_whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return failure_of(ClientGoneError("the client left while sending its body"))
                    body += message.get("body", b"")
                    if len(body) > self._max_bytes:
                        return self._too_large()
                    is_whole = not message.get("more_body", False)
        except TimeoutError:
            reason = f"the body did not arrive within {self._timeout_s:g} s; send it without pauses"
            return Failure(status=400, message=reason, code="body_timeout", headers=CLOSE)
        return bytes(body)

    def _too_large(self) -> Failure:
        message = (
            f"the body has more than {self._max_bytes} bytes; "
            "send less, or raise the server's max_body"
        )
        return Failure(status=413, message=message, code="body_too_large", headers=CLOSE)
