"""Bounds on connections: their number, the time for headers, and the time without reading.

Where there are too many, the one that has been idle longest makes room, those that never showed a
key first; where none is idle, the new one gets a 503. No address may have nearly all of them.

Uvicorn's HTTP/1.1 protocol with two timers. One runs while headers are awaited, and while the rest
of a body that was already answered arrives; the other while the client does not read. Either aborts
the connection without flushing its buffer, which cancels what runs for it, as when a client leaves.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import termios
from array import array
from collections.abc import Callable
from typing import Any, cast

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from juice_server.clients import network_of
from juice_server.errors import Failure
from juice_server.trace import trace_of

# Connections beyond the bound that wait for their request, to be told why there is no room.
OVERFLOW = 32
REFUSAL_S = 2.0


class GuardedProtocol(H11Protocol):
    """A connection with bounds; `guarded` makes a class with other bounds."""

    header_timeout_s = 10.0
    write_stall_s = 30.0
    max_connections = 1000
    max_per_address = 900

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers_timer = _Timer(self.loop, self.header_timeout_s, self._abort)
        self._stall_timer = _Timer(self.loop, self.write_stall_s, self._abort_unless_it_reads)
        self._n_unread = 0
        self._has_key = False
        self._is_leaving = False
        self._refusal: Failure | None = None
        self._idle_since = self.loop.time()
        self._network = ""  # where it comes from

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for headers; make room for the connection, or refuse it."""
        super().connection_made(transport)
        self._network = network_of(self.client[0]) if self.client else ""
        self._refusal = self._crowded()
        if self._refusal is None:
            self._headers_timer.start()
        elif len(self.connections) > self.max_connections + OVERFLOW:
            transport.abort()
        else:
            # A refusal that is sent before the request would be lost to a client that still sends.
            _Timer(self.loop, REFUSAL_S, self._abort).start()

    def _crowded(self) -> Failure | None:
        """Return why there is no room for this connection, unless another one makes room."""
        others = [
            own
            for own in self.connections
            if isinstance(own, GuardedProtocol) and own is not self and own._counts
        ]
        n_own = sum(own._network == self._network for own in others)
        if self._network and n_own >= self.max_per_address:
            return _refused(f"{n_own} connections come from this address; close some")
        if len(others) < self.max_connections:
            return None
        idle = [own for own in others if own._is_idle]
        if not idle:
            return _refused(f"{len(others)} connections are open; try again later")
        first = min(idle, key=lambda own: (own._has_key, own._idle_since))
        first._is_leaving = True
        first.transport.close()
        return None

    @property
    def _counts(self) -> bool:
        """Whether the connection takes room: it was not refused, and is not being closed."""
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
        body = json.dumps(failure.body()).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            *failure.headers.items(),
        ]
        events: list[h11.Event] = [
            h11.Response(status_code=failure.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def pause_writing(self) -> None:
        """Start the timer: the client does not read."""
        super().pause_writing()
        self._n_unread = _n_unread(self.transport)
        self._stall_timer.start()

    def resume_writing(self) -> None:
        """Stop the timer."""
        super().resume_writing()
        self._stall_timer.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop both timers."""
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


class _Timer:
    """Calls an action once, some seconds after the start, unless stopped."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, action: Callable[[], None]
    ) -> None:
        self._loop, self._seconds, self._action = loop, seconds, action
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self) -> None:
        self.stop()
        self._handle = self._loop.call_later(self._seconds, self._action)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def _n_unread(transport: asyncio.Transport) -> int:
    """Return the written bytes that the client has not read: ours and, if known, the kernel's."""
    n_ours = transport.get_write_buffer_size()
    queued = array("i", [0])
    try:
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
    except OSError:
        return n_ours
    return n_ours + queued[0]


def _refused(message: str) -> Failure:
    return Failure(
        status=503,
        message=message,
        type="overloaded_error",
        code="too_many_connections",
        headers={"retry-after": "1"},
    )


def guarded(
    *,
    header_timeout_s: float,
    write_stall_s: float,
    max_connections: int,
    max_per_address: int | None = None,
) -> type[GuardedProtocol]:
    """Return a protocol class with these bounds; times are in seconds.

    Without a bound per address, one may have nine tenths of the connections.
    """
    bounds = {
        "header_timeout_s": header_timeout_s,
        "write_stall_s": write_stall_s,
        "max_connections": max_connections,
        "max_per_address": max_per_address or max(1, max_connections * 9 // 10),
    }
    return type("Guarded", (GuardedProtocol,), bounds)
