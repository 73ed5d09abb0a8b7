"""The requests that wait or run in vLLM, and how many may wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Condition

from juice.engine import Limits
from juice.errors import EngineStoppedError, OverloadedError
from juice.vllm.generation import Generation


class OpenRequests:
    """The requests that have begun and not ended; any thread may use it.

    Attributes:
        stopped: Why there are no more; None while there may be.
    """

    def __init__(self) -> None:
        self.stopped: EngineStoppedError | None = None
        self._open: set[Generation] = set()
        self._busy_since = time.monotonic()
        self._changed = Condition()

    @property
    def state(self) -> tuple[int, float]:
        """How many are open, and since when (`time.monotonic`) there has always been one."""
        with self._changed:
            return len(self._open), self._busy_since

    def add(
        self,
        new: Sequence[Generation],
        begin: Callable[[Generation], object],
        limits: Limits | None,
        *,
        wait: bool = False,
    ) -> None:
        """Add requests, all or none, and begin each before any of them can be cancelled.

        Args:
            new: The requests.
            begin: Begins one.
            limits: How many may run and wait; None: they are added without regard to that.
            wait: Whether to wait for room.

        Raises:
            OverloadedError: There is no room now, and this is not to wait.
            EngineStoppedError: The engine has stopped, or it does meanwhile.
        """
        with self._changed:
            while limits and self.stopped is None:
                n_waiting = max(0, len(self._open) - limits.max_batch)
                if not n_waiting or n_waiting + len(new) <= limits.max_waiting:
                    break
                if not wait:
                    raise OverloadedError(
                        f"{n_waiting} requests are waiting; at most {limits.max_waiting} may: "
                        "try again later"
                    )
                self._changed.wait()
            if self.stopped is not None:
                raise EngineStoppedError(str(self.stopped))
            if not self._open:
                self._busy_since = time.monotonic()
            self._open.update(new)
            for one in new:
                begin(one)

    def remove(self, one: Generation) -> None:
        """Remove a request that has ended."""
        with self._changed:
            self._open.discard(one)
            self._changed.notify_all()

    def stop(self, reason: EngineStoppedError) -> None:
        """Cancel all, and take no more."""
        with self._changed:
            self.stopped = self.stopped or reason
            left = list(self._open)
            self._changed.notify_all()
        for one in left:
            one.cancel(EngineStoppedError(str(reason)))
