"""Work on texts before they are generated from: in threads, few at a time, in fair turns.

Tokenizing a large text takes seconds, so large texts have a thread apart from the small ones, and
the bytes that wait are bounded, those of each client and in all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import TypeVar

from juice_server.errors import BusyError
from juice_server.fair_queue import FairQueue, Work, with_room

T = TypeVar("T")
SMALL_BYTES = 32_768
N_SMALL, N_LARGE = with_room(2), 1
# Bodies of the largest size that may wait.
N_WAITING_BODIES = 16


class Tokenizing:
    """The queues of both sizes; everything in the event loop.

    Args:
        max_body: The size of the largest body, in bytes.
    """

    def __init__(self, max_body: int) -> None:
        most = N_WAITING_BODIES * max_body
        self._small = FairQueue(n_rows=N_SMALL, max_waiting=most)
        self._large = FairQueue(n_rows=N_LARGE, max_waiting=most)
        self._turns: dict[Work, asyncio.Future[None]] = {}

    @property
    def n_waiting(self) -> int:
        """How many texts wait."""
        return len(self._turns)

    async def run(self, client: Hashable, n_bytes: int, work: Callable[[], T]) -> T:
        """Return what work on a body of this size gives, when it is its turn.

        Raises BusyError where too many bytes wait, and what the work raises.
        """
        queue = self._small if n_bytes <= SMALL_BYTES else self._large
        if excess := queue.excess(client, n_bytes):
            raise BusyError(
                f"{queue.n_waiting:,} bytes wait to be tokenized, and {excess:,} of this request "
                "are too many: try again later"
            )
        one = Work(client=client, cost=n_bytes, size=n_bytes)
        self._turns[one] = asyncio.get_running_loop().create_future()
        queue.put([one])
        self._call_up(queue)
        try:
            await self._turns[one]
        except asyncio.CancelledError:
            # Either it still waits, or it has been called up; or `_call_up` saw it leave.
            if not queue.drop(one) and not self._turns[one].cancelled():
                self._end(queue, one)
            raise
        finally:
            del self._turns[one]
        # A thread that has begun cannot be stopped; until it ends it has its turn.
        thread = asyncio.ensure_future(asyncio.to_thread(work))
        thread.add_done_callback(lambda _: self._end(queue, one))
        return await asyncio.shield(thread)

    def _call_up(self, queue: FairQueue) -> None:
        while (one := queue.take()) is not None:
            if self._turns[one].done():
                queue.free(one, n_rows=1, n_bytes=0)  # its client left a moment ago
            else:
                self._turns[one].set_result(None)

    def _end(self, queue: FairQueue, one: Work) -> None:
        queue.free(one, n_rows=1, n_bytes=0)
        self._call_up(queue)
