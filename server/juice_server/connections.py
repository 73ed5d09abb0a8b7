"""The connections of the server, bounded in number and in time.

In all and of an address there may be so many, with a time for headers and one without reading. Of
too many, the one that has been idle longest makes room, those that never showed a key first; where
none is idle, the new one gets a 503.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import termios
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import h11
from starlette.responses import JSONResponse
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from juice_server.errors import CLOSE, Failure
from juice_server.settings import Settings
from juice_server.telemetry.metrics import Metrics
from juice_server.trace import network_of, trace_of

# Connections beyond the bound that wait for their request, to be told why there is no room.
OVERFLOW = 32
REFUSAL_S = 2.0
WARN_S = 60.0
LOG = logging.getLogger("juice_server")


class GuardedProtocol(H11Protocol):
    """Uvicorn's HTTP/1.1 with bounds, which `guarded` sets.

    One timer runs while headers are awaited, and while the rest of a body that was already answered
    arrives; the other while the client does not read. A connection whose time is up is aborted
    without flushing its buffer, which cancels its work, as when a client leaves.
    """

    header_timeout_s: float
    write_stall_s: float
    max_connections: int
    max_per_address: int
    refused: Refusals

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers_timer = _Timer(self.header_timeout_s, self._abort)
        self._stall_timer = _Timer(self.write_stall_s, self._abort_unless_it_reads)
        self._n_unread = 0
        self._has_key = False
        self._is_leaving = False
        self._refusal: Failure | None = None
        self._idle_since = self.loop.time()
        self._network = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for headers; make room for the connection, or refuse it."""
        super().connection_made(transport)
        self._network = network_of(self.client[0]) if self.client else ""
        self._refusal = self._crowded()
        if self._refusal is None:
            self._headers_timer.start()
            return
        self.refused.add(self._refusal)
        if len(self.connections) > self.max_connections + OVERFLOW:
            transport.abort()
        else:
            # A refusal that is sent before the request would be lost to a client that still sends.
            self.loop.call_later(REFUSAL_S, self._abort)

    def _crowded(self) -> Failure | None:
        """Return the reason to refuse this connection, unless another one makes room for it."""
        others = [
            other
            for other in self.connections
            if isinstance(other, GuardedProtocol) and other is not self and other._takes_room
        ]
        alike = [other for other in others if other._network == self._network]
        if self._network and len(alike) >= self.max_per_address:
            crowd, reason = alike, f"{len(alike)} connections come from this address; close some"
        elif len(others) >= self.max_connections:
            crowd, reason = others, f"{len(others)} connections are open; try again later"
        else:
            return None
        idle = [other for other in crowd if other._is_idle]
        if not idle:
            return _refused(reason)
        oldest = min(idle, key=lambda other: (other._has_key, other._idle_since))
        oldest._is_leaving = True
        oldest.transport.close()
        return None

    @property
    def _takes_room(self) -> bool:
        """Whether the connection counts: it was not refused, and is not being closed."""
        return self._refusal is None and not self._is_leaving

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being received or answered, and the last answer was read."""
        return (
            self.conn.their_state is h11.IDLE
            and not self.transport.get_write_buffer_size()
            and not self.conn.trailing_data[0]
            and (self.cycle is None or self.cycle.response_complete)
        )

    def data_received(self, data: bytes) -> None:
        """Run the timer until the headers of a request are complete."""
        if self._refusal is not None:
            self._send_and_close(self._refusal)
            return
        super().data_received(data)
        if self._drops_a_body:
            return
        if self.conn.their_state is not h11.IDLE:
            self._headers_timer.stop()
        elif not self._headers_timer.is_running:
            self._headers_timer.start()

    def on_response_complete(self) -> None:
        """Wait again if the next request's headers have begun, or an unread body still arrives."""
        super().on_response_complete()
        self._idle_since = self.loop.time()
        self._has_key = self._has_key or trace_of(cast("Scope", self.scope)).client.has_key
        if self._drops_a_body or (self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]):
            self._headers_timer.start()

    @property
    def _drops_a_body(self) -> bool:
        """Whether the answer was complete before the request's body."""
        return (
            self.conn.their_state is h11.SEND_BODY
            and self.cycle is not None
            and self.cycle.response_complete
        )

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, in the envelope of every error."""
        self._send_and_close(Failure(status=400, message=msg, code="invalid_http"))

    def _send_and_close(self, failure: Failure) -> None:
        answer = JSONResponse(failure.body(), failure.status, {**CLOSE, **failure.headers})
        head = h11.Response(status_code=answer.status_code, headers=answer.raw_headers)
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def pause_writing(self) -> None:
        """Start the timer: the client does not read."""
        super().pause_writing()
        self._n_unread = _n_unread(self.transport)
        self._stall_timer.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_timer.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_timer.stop()
        self._stall_timer.stop()
        super().connection_lost(exc)

    def _abort_unless_it_reads(self) -> None:
        n_unread = _n_unread(self.transport)
        if n_unread >= self._n_unread:
            self._abort()
        else:
            self._n_unread = n_unread
            self._stall_timer.start()

    def _abort(self) -> None:
        self.transport.abort()


class Refusals:
    """Counts the connections that are refused, and warns of them once a minute."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._n, self._warned = metrics, 0, -math.inf

    def add(self, failure: Failure) -> None:
        """Count one more."""
        self._metrics.rejected(failure.code or "")
        self._n += 1
        now = time.monotonic()
        if now - self._warned < WARN_S:
            return
        LOG.warning(
            "connections are refused; where they are wanted, raise --max-connections or"
            " --max-connections-per-address",
            extra={"fields": {"refused": self._n, "reason": failure.message}},
        )
        self._n, self._warned = 0, now


class _Timer:
    """Calls an action once, some seconds after the start, unless stopped."""

    def __init__(self, seconds: float, action: Callable[[], None]) -> None:
        self._seconds, self._action = seconds, action
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self) -> None:
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(self._seconds, self._action)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def _n_unread(transport: asyncio.Transport) -> int:
    """Return the written bytes that the client has not read: ours and, if known, the kernel's."""
    in_kernel = array("i", [0])
    with suppress(OSError):
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_kernel)
    return transport.get_write_buffer_size() + in_kernel[0]


def _refused(message: str) -> Failure:
    return Failure(
        status=503,
        message=message,
        type="overloaded_error",
        code="too_many_connections",
        headers={"retry-after": "1"},
    )


def guarded(settings: Settings, max_connections: int, refused: Refusals) -> type[GuardedProtocol]:
    """Return a protocol class with the bounds of the settings, and this one."""
    most = settings.max_connections_per_address or max(1, max_connections * 9 // 10)
    bounds = {
        "header_timeout_s": settings.header_timeout,
        "write_stall_s": settings.write_stall,
        "max_connections": max_connections,
        "max_per_address": most,
        "refused": refused,
    }
    return type("Guarded", (GuardedProtocol,), bounds)
