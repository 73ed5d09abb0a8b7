"""API keys: where any are set, all routes but probes and pages need `Authorization: Bearer KEY`."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from juice_server.clients import Permission
from juice_server.errors import CLOSE, Failure, NotAllowedError, failure_of
from juice_server.keys import Keys
from juice_server.trace import trace_of

PROBES = frozenset({"/healthz", "/readyz", "/health", "/ping"})
# Pages, which have nothing to hide: a browser sends no header when it opens one.
OPEN_PATHS = PROBES | {"/", "/docs", "/openapi.json"}
OPEN_FOLDERS = ("/playground/", "/static-offline-docs/")
# What needs more than to read, and what is sent but only reads.
METRICS_PATH = "/metrics"
HEAD_SETS = "/v1/head_sets/"
READING = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})


class KeyCheck:
    """The middleware that requires a key which may do what is asked."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401 or 403."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client, needed = self._keys.find(_sent_key(scope)), _needed(scope)
        if client is not None:
            trace_of(scope).client = client
        elif not _is_open(scope):
            failure = Failure(
                status=401,
                message=(
                    "the API key is missing or unknown; send the header Authorization: Bearer KEY"
                ),
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer", **CLOSE},
            )
            await failure.response(scope)(scope, receive, send)
            return
        if client is not None and not _is_open(scope) and needed not in client.scopes:
            error = NotAllowedError(
                f"the key {client.name} has no scope {needed}, but {', '.join(client.scopes)}: add "
                "it in the keys file, or use another key"
            )
            await failure_of(error).response(scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    """Return whether a path needs no key."""
    path: str = scope["path"]
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)


def _needed(scope: Scope) -> Permission:
    """Return the scope that a request needs."""
    if scope["path"] == METRICS_PATH:
        return "metrics"
    if scope["path"].startswith(HEAD_SETS) and scope["method"] in ("PUT", "DELETE"):
        return "admin"
    return "generate" if scope["method"] == "POST" and scope["path"] not in READING else "read"


def _sent_key(scope: Scope) -> bytes:
    """Return the key of a request; Anthropic's clients send it in a header of its own."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if key := next((value for name, value in headers if name == b"x-api-key"), b""):
        return key.strip()
    value = next((value for name, value in headers if name == b"authorization"), b"")
    kind, _, key = value.partition(b" ")
    return key.strip() if kind.lower() == b"bearer" else b""
