"""Generations wait here for their turn, and start in the engine when they can run at once.

The engine gets only what there are rows and bytes for, so its own queue stays short, and whose turn
it is (`juice_server.fair_queue`) is decided as late as possible. A generation that ends makes room
in the engine's thread, so that the next one joins in its next step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock

from juice.engine import Completion, Engine, GenerationRequest, Running, Sink, Update
from juice.errors import CancelledError, GenerationError, JuiceError
from juice_server.clients import Client
from juice_server.errors import BusyError
from juice_server.fair_queue import FairQueue, Work, part_of, with_room
from juice_server.rates import RateLimits, Throughput


class Dispatcher:
    """The generations of all clients; any thread may cancel.

    Args:
        engine: Where they run.
        max_waiting: How many of one client may wait.
    """

    def __init__(self, engine: Engine, max_waiting: int) -> None:
        self.engine = engine
        self._queue = FairQueue(
            n_rows=engine.limits.max_batch,
            max_bytes=engine.status.max_kv_bytes,
            max_waiting=with_room(max_waiting),
        )
        self._groups: dict[Work, Group] = {}
        self._limits, self._throughput = RateLimits(), Throughput()
        self._lock = Lock()

    @property
    def n_waiting(self) -> int:
        """How many generations wait for their turn."""
        return self._queue.n_waiting

    def submit(
        self, client: Client, requests: Sequence[GenerationRequest], sink: Sink, *, priority: int
    ) -> list[Running]:
        """Queue all requests or none.

        Args:
            client: Whose they are.
            requests: What to generate.
            sink: Takes their updates, numbered as here, in the engine's thread.
            priority: Lower ones go first.

        Raises:
            RequestError: One of them cannot run.
            RateLimitedError: The client's key may not use so much in a minute.
            BusyError: Too many wait.
        """
        for request in requests:
            self.engine.check(request)
        groups = [
            Group(self, client, [(i, requests[i]) for i in own], sink, priority)
            for own in _together(requests)
        ]
        with self._lock:
            excess = self._queue.excess(
                client.name,
                len(requests),
                most=client.max_waiting,
                max_running=client.max_running,
            )
            if excess:
                raise BusyError(
                    f"{self._queue.n_waiting} generations are waiting, and {excess} of these "
                    f"{len(requests)} are too many: try again later",
                    retry_after_s=self._throughput.wait_s(excess),
                )
            self._limits.take(client, sum(_n_tokens(request) for request in requests))
            self._groups |= {group.work: group for group in groups}
            self._queue.put([group.work for group in groups])
        self.call_up()
        turns = {i: turn for group in groups for i, turn in group.turns.items()}
        return [turns[i] for i in range(len(requests))]

    def call_up(self) -> None:
        """Start all whose turn it is."""
        while True:
            with self._lock:
                work = self._queue.take()
                group = None if work is None else self._groups.pop(work)
            if group is None:
                return
            group.start()

    def drop(self, group: Group) -> bool:
        """Take a group out that still waits; return whether it did."""
        with self._lock:
            self._groups.pop(group.work, None)
            if is_dropped := self._queue.drop(group.work):
                self._limits.give_back(group.client, int(group.work.cost))
        if is_dropped:
            self.call_up()  # what waited behind it may fit
        return is_dropped

    def free(self, group: Group, *, n_rows: int, n_bytes: int, n_unused: int) -> None:
        """Note that one of a group has ended, and what it leaves: rows, bytes, tokens."""
        with self._lock:
            self._throughput.note()
            self._limits.give_back(group.client, n_unused)
            self._queue.free(group.work, n_rows=n_rows, n_bytes=n_bytes, unused=n_unused)


class Group:
    """Generations that start together: those of one prompt where one gate decides for all."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        client: Client,
        requests: Sequence[tuple[int, GenerationRequest]],
        sink: Sink,
        priority: int,
    ) -> None:
        engine, n = dispatcher.engine, len(requests)
        self.client = client
        # No more than one client may hold: what is beyond that waits in the engine.
        n_bytes = n * max(engine.n_kv_bytes(own) for _, own in requests)
        self.work = Work(
            client=client.name,
            cost=sum(_n_tokens(own) for _, own in requests),
            n_rows=min(n, part_of(engine.limits.max_batch)),
            n_bytes=min(n_bytes, part_of(engine.status.max_kv_bytes)) if n > 1 else n_bytes,
            size=n,
            priority=priority,
            max_running=client.max_running,
        )
        self.turns = {i: Turn(self, k) for k, (i, _) in enumerate(requests)}
        self._dispatcher, self._requests, self._sink = dispatcher, requests, sink
        self._arrived, self._waited_s = time.monotonic(), 0.0
        self._lock = Lock()
        self._running: Sequence[Running] | None = None
        self._cancelled: dict[int, JuiceError] = {}
        self._n_open = n
        self._n_new = [0] * n  # tokens so far, of each

    def start(self) -> None:
        """Start in the engine; what fails there ends with its error."""
        self._waited_s = time.monotonic() - self._arrived
        try:
            running = self._dispatcher.engine.submit([own for _, own in self._requests], self._take)
        except Exception as error:
            own = error if isinstance(error, JuiceError) else GenerationError(repr(error))
            for k in range(len(self._requests)):
                self._pass_on(Update(index=k, error=own), has_run=False)
            return
        with self._lock:
            self._running, cancelled = running, dict(self._cancelled)
        for k, reason in cancelled.items():
            running[k].cancel(reason)

    def cancel(self, k: int, reason: JuiceError | None) -> None:
        """End one of them soon, whether it waits or runs."""
        with self._lock:
            self._cancelled[k] = reason or CancelledError("the request was cancelled")
            running, is_all = self._running, len(self._cancelled) == len(self._requests)
        if running is not None:
            running[k].cancel(reason)
        elif is_all and self._dispatcher.drop(self):
            for other, error in self._cancelled.items():
                self._sink(Update(index=self._requests[other][0], error=error))

    def _take(self, update: Update) -> None:
        """Pass on an update of the engine, and make room at the last one."""
        try:
            self._pass_on(update, has_run=True)
        finally:
            if update.is_last:
                self._dispatcher.call_up()

    def _pass_on(self, update: Update, *, has_run: bool) -> None:
        i, request = self._requests[update.index]
        self._n_new[update.index] += len(update.tokens)
        if update.is_last:
            self._free(request.max_tokens - self._n_new[update.index], request, has_run=has_run)
        completion = update.completion and self._since_arrival(update.completion)
        self._sink(replace(update, index=i, completion=completion))

    def _free(self, n_not_generated: int, request: GenerationRequest, *, has_run: bool) -> None:
        """Free what one of them held; those that are left keep what they need of it."""
        own, left = self.work, self._n_open - 1
        n = len(self._requests)
        self._dispatcher.free(
            self,
            n_rows=min(own.n_rows, self._n_open) - min(own.n_rows, left),
            n_bytes=own.n_bytes * self._n_open // n - own.n_bytes * left // n,
            n_unused=n_not_generated if has_run else _n_tokens(request),
        )
        self._n_open = left

    def _since_arrival(self, completion: Completion) -> Completion:
        return replace(completion, timing=completion.timing.later(self._waited_s))


class Turn:
    """One generation that waits or runs."""

    def __init__(self, group: Group, k: int) -> None:
        self._group, self._k = group, k

    def cancel(self, reason: JuiceError | None = None) -> None:
        """End it soon; its last update is then an error."""
        self._group.cancel(self._k, reason)


def _together(requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """Return which requests start together: each alone, those of one gate together."""
    groups: dict[int, list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(-i - 1 if request.gate is None else id(request.gate), []).append(i)
    return list(groups.values())


def _n_tokens(request: GenerationRequest) -> int:
    return len(request.prompt_ids) + request.max_tokens
