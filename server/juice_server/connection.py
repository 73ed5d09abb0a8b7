"""What a connection may do: its headers must arrive in time, and it must read what it is sent.

Uvicorn's HTTP/1.1 protocol with two timers: one while headers are awaited, one while the client does not read. Either ends
the connection, at once and without waiting for its buffer, and whatever runs for it is cancelled as for any that leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class GuardedProtocol(H11Protocol):
    """A connection with bounds; `guarded` makes the class for a pair of them."""

    header_timeout_s = 10.0
    write_stall_s = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers_timer = _Timer(self.loop, self.header_timeout_s, self._abort)
        self._stall_timer = _Timer(self.loop, self.write_stall_s, self._abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers."""
        super().connection_made(transport)
        self._headers_timer.start()

    def data_received(self, data: bytes) -> None:
        """Wait on while a request has begun and its headers are not complete."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._headers_timer.stop()
        elif not self._headers_timer.is_running:
            self._headers_timer.start()

    def on_response_complete(self) -> None:
        """Wait again where the next request's headers have begun."""
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._headers_timer.start()

    def pause_writing(self) -> None:
        """Begin to count: the client does not read."""
        super().pause_writing()
        self._stall_timer.start()

    def resume_writing(self) -> None:
        """Stop counting."""
        super().resume_writing()
        self._stall_timer.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the timers."""
        self._headers_timer.stop()
        self._stall_timer.stop()
        super().connection_lost(exc)

    def _abort(self) -> None:
        self.transport.abort()


class _Timer:
    """Calls something once, some seconds after it was started, unless it is stopped."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, action: Callable[[], None]) -> None:
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


def guarded(*, header_timeout_s: float, write_stall_s: float) -> type[GuardedProtocol]:
    """Return the protocol with these bounds, in seconds."""
    return type("Guarded", (GuardedProtocol,), {"header_timeout_s": header_timeout_s, "write_stall_s": write_stall_s})
