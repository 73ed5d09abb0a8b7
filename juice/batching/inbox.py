"""Where requests wait for the engine's thread: bounded, in the order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from threading import Condition, Lock

from juice.batching.generation import Generation
from juice.errors import EngineStoppedError, JuiceError, OverloadedError


class Inbox:
    """A bounded queue of generations; any thread may use it."""

    def __init__(self, max_waiting: int) -> None:
        self.closed: JuiceError | None = None
        self._max_waiting = max_waiting
        self._waiting: deque[Generation] = deque()
        self._changed = Condition()
        self._turn = Lock()
        self._is_awaited = False  # whether somebody waits for room

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, generations: Sequence[Generation], *, wait: bool) -> None:
        """Queue all generations or none; where there is no room, wait or raise OverloadedError.

        An empty inbox takes any number. Whoever waits for room is not overtaken: until then nobody
        else gets any. Raises EngineStoppedError once closed.
        """
        # Callers that wait for room keep their order: the first holds the turn.
        with self._turn if wait else nullcontext(), self._changed:
            if wait:
                self._wait_for_room(len(generations))
            elif self.closed is None and (self._is_awaited or not self._has_room(len(generations))):
                raise OverloadedError(
                    f"{len(self._waiting)} requests are waiting; at most {self._max_waiting} may: "
                    "try again later"
                )
            if self.closed is not None:
                raise EngineStoppedError(str(self.closed))
            self._waiting.extend(generations)
            self._changed.notify_all()

    def _wait_for_room(self, n: int) -> None:
        try:
            while self.closed is None and not self._has_room(n):
                self._is_awaited = True
                self._changed.wait()
        finally:
            self._is_awaited = False  # Ctrl-C ends the wait, too

    def _has_room(self, n: int) -> bool:
        return not self._waiting or len(self._waiting) + n <= self._max_waiting

    def put_first(self, generation: Generation) -> None:
        """Queue a generation before the others, whether or not there is room.

        Raises EngineStoppedError once closed.
        """
        with self._changed:
            if self.closed is not None:
                raise EngineStoppedError(str(self.closed))
            self._waiting.appendleft(generation)

    @property
    def waiting(self) -> list[Generation]:
        """The generations that wait, the one that has waited longest first."""
        with self._changed:
            return list(self._waiting)

    def take(self, generation: Generation) -> None:
        """Take a generation that waits."""
        with self._changed:
            self._waiting.remove(generation)
            self._changed.notify_all()

    def take_cancelled(self) -> list[Generation]:
        """Take the generations that were cancelled while they waited."""
        with self._changed:
            cancelled = [s for s in self._waiting if s.cancelled is not None]
            if cancelled:
                self._waiting = deque(s for s in self._waiting if s.cancelled is None)
                self._changed.notify_all()
            return cancelled

    def wait(self, timeout_s: float) -> bool:
        """Return whether a generation waits or the inbox is closed, as soon as that is so."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._waiting or self.closed, timeout_s))

    def close(self, reason: JuiceError) -> None:
        """Refuse everything from now on; the first reason is kept."""
        with self._changed:
            self.closed = self.closed or reason
            self._changed.notify_all()

    def take_all(self) -> list[Generation]:
        """Take everything that still waits."""
        with self._changed:
            left = list(self._waiting)
            self._waiting.clear()
            return left
