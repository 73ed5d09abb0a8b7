"""API keys: where any are set, all routes but the probes need `Authorization: Bearer KEY`.

Only digests are kept, and all are compared, in constant time.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from juice_server.errors import CLOSE, Failure

KNOWN = "juice_server.has_key"  # in a scope: whether the request has a key that is known
OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class KeyCheck:
    """The middleware that requires a key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[KNOWN] = self._is_known(_sent_key(scope))
        if not scope[KNOWN] and scope["path"] not in OPEN_PATHS:
            message = "the API key is missing or unknown; send the header Authorization: Bearer KEY"
            failure = Failure(
                status=401,
                message=message,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer", **CLOSE},
            )
            await failure.response(scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_known(self, key: bytes) -> bool:
        if not key:
            return False
        sent = sha256(key).digest()
        # A list, not a generator: all digests are compared, whichever matches.
        return any([hmac.compare_digest(sent, digest) for digest in self._digests])  # noqa: C419


def _sent_key(scope: Scope) -> bytes:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    value = next((value for name, value in headers if name == b"authorization"), b"")
    kind, _, key = value.partition(b" ")
    return key.strip() if kind.lower() == b"bearer" else b""
