"""Receiving a whole body before the app sees any of it, within a size and a time."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from juice_server.errors import CLOSE, ClientGoneError, Failure, failure_of


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
        try:
            declared = Headers(scope=scope).get("content-length", "0")
            body = (
                None
                if int(declared) > self._max_bytes
                else await asyncio.wait_for(self._read(receive), self._timeout_s)
            )
        except TimeoutError:
            message = (
                f"the body did not arrive within {self._timeout_s:g} s; send it without pauses"
            )
            failure = Failure(status=400, message=message, code="body_timeout", headers=CLOSE)
            await failure.response(scope)(scope, receive, send)
            return
        except ClientGoneError as error:
            await failure_of(error).response(scope)(scope, receive, send)
            return
        if body is None:
            message = (
                f"the body has more than {self._max_bytes} bytes; "
                "send less, or raise the server's max_body"
            )
            failure = Failure(status=413, message=message, code="body_too_large", headers=CLOSE)
            await failure.response(scope)(scope, receive, send)
            return
        is_read = False

        async def replay() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the body; None if it is too large."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError("the client left while sending its body")
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                return None
            if not message.get("more_body", False):
                return bytes(body)
