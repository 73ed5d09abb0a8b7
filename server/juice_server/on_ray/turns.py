"""Whose request goes to a model's replicas next: the fair queue of the server, before all of them.

A request waits here until some replica has rows for it, so whose turn it is is decided as late as
possible, and a replica that joins or is lost changes only how many rows there are. Within a replica
the same queue keeps turns again, by the same clients, where its memory is short.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from juice_server.clients import Client
from juice_server.errors import BusyError, NotAllowedError
from juice_server.fair_queue import FairQueue, Work, part_of, with_room
from juice_server.on_ray.asked import Asked
from juice_server.rates import Throughput


@dataclass
class Use:
    """How many tokens a request took; what it was thought to cost until that is known."""

    n_tokens: float


class Turns:
    """The turns of one model.

    Args:
        max_batch: How many generations of one client run at the same time in one replica.
        max_queue: How many of one client may wait.
    """

    def __init__(self, max_batch: int, max_queue: int) -> None:
        self.rows_of_a_replica = with_room(max_batch)
        self.waiting_tokens = 0.0
        self._queue = FairQueue(n_rows=0, max_waiting=with_room(max_queue))
        self._waiting: dict[Work, asyncio.Future[None]] = {}
        self._throughput = Throughput()

    @property
    def n_waiting(self) -> int:
        """How many generations wait."""
        return self._queue.n_waiting

    @property
    def n_running(self) -> int:
        """How many run in the replicas."""
        return self._queue.n_running

    def resize(self, n_replicas: int) -> None:
        """Note how many replicas there are."""
        self._queue.n_rows = n_replicas * self.rows_of_a_replica
        self._call_up()

    def check(self, client: Client, asked: Asked) -> None:
        """Raise BusyError for a request that may not wait, NotAllowedError for its priority."""
        if asked.priority is not None and asked.priority < client.priority:
            raise NotAllowedError(
                f"priority is {asked.priority}; this client may use {client.priority} and later "
                "ones, which are higher"
            )
        excess = self._queue.excess(
            client.name, asked.n_rows, most=client.max_waiting, max_running=client.max_running
        )
        if excess:
            raise BusyError(
                f"{self.n_waiting} generations are waiting, and {excess} of these {asked.n_rows} "
                "are too many: try again later",
                retry_after_s=self._throughput.wait_s(excess),
            )

    @asynccontextmanager
    async def turn(self, client: Client, asked: Asked) -> AsyncIterator[Use]:
        """Wait for a request's turn, and hold its rows for the block, which notes its use."""
        work = Work(
            client=client.name,
            cost=asked.cost,
            n_rows=min(asked.n_rows, part_of(self.rows_of_a_replica)),
            size=asked.n_rows,
            priority=client.priority if asked.priority is None else asked.priority,
            max_running=client.max_running,
        )
        turn = self._waiting[work] = asyncio.get_running_loop().create_future()
        self.waiting_tokens += work.cost
        self._queue.put([work])
        self._call_up()
        use = Use(0.0)
        try:
            await turn
            use.n_tokens = work.cost
            yield use
        finally:
            if self._queue.drop(work):
                self._left(work)
            else:
                self._throughput.note()
                self._queue.free(
                    work, n_rows=work.n_rows, n_bytes=0, unused=work.cost - use.n_tokens
                )
            self._call_up()

    def _call_up(self) -> None:
        while (work := self._queue.take()) is not None:
            turn = self._left(work)
            if not turn.done():
                turn.set_result(None)

    def _left(self, work: Work) -> asyncio.Future[None]:
        self.waiting_tokens -= work.cost
        return self._waiting.pop(work)
