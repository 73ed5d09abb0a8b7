"""Bounds on connections: their number, the time for headers, and the time without reading.

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
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from juice_server.errors import Failure


class GuardedProtocol(H11Protocol):
    """A connection with bounds; `guarded` makes a class with other bounds."""

    header_timeout_s = 10.0
    write_stall_s = 30.0
    max_connections = 1000

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers_timer = _Timer(self.loop, self.header_timeout_s, self._abort)
        self._stall_timer = _Timer(self.loop, self.write_stall_s, self._abort_unless_it_reads)
        self._n_unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for headers; close the connection if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
        else:
            self._headers_timer.start()

    def data_received(self, data: bytes) -> None:
        """Run the timer until the headers of a request are complete."""
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
        body = json.dumps(Failure(status=400, message=msg, code="invalid_http").body()).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        events: list[h11.Event] = [
            h11.Response(status_code=400, headers=headers),
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


def guarded(
    *, header_timeout_s: float, write_stall_s: float, max_connections: int
) -> type[GuardedProtocol]:
    """Return a protocol class with these bounds; times are in seconds."""
    bounds = {
        "header_timeout_s": header_timeout_s,
        "write_stall_s": write_stall_s,
        "max_connections": max_connections,
    }
    return type("Guarded", (GuardedProtocol,), bounds)
