"""Where requests wait: the order in which texts are tokenised and requests start in the engine.

Both wait in fair queues (`juice.engine.queue`). A large text takes seconds, so these have a thread
apart from the small ones. The engine gets only requests for which it has rows and bytes, so that
the order is decided as late as possible; a request that ends makes room in the engine's thread, so
that the next one joins in its next step.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from threading import Lock
from typing import TypeVar

from juice.engine.answer import Sink, Update
from juice.engine.contract import Engine
from juice.engine.queue import FairQueue, Work, part_of, with_room
from juice.engine.request import Request, Running
from juice.errors import CancelledError, RequestError
from juice_server.errors import BusyError, RateLimitedError
from juice_server.keys import Client

T = TypeVar("T")
SMALL_BYTES = 32_768
N_SMALL, N_LARGE = with_room(2), 1
# Bodies of the largest size that may wait.
N_WAITING_BODIES = 16


class Tokenizing:
    """The queues of both sizes, for bodies of up to `max_body` bytes; all in the event loop."""

    def __init__(self, max_body: int) -> None:
        most = N_WAITING_BODIES * max_body
        self._small = FairQueue[Work](n_rows=N_SMALL, max_waiting=most)
        self._large = FairQueue[Work](n_rows=N_LARGE, max_waiting=most)
        self._turns: dict[Work, asyncio.Future[None]] = {}

    @property
    def n_waiting(self) -> int:
        """The number of texts that wait."""
        return len(self._turns)

    async def run(self, client: Hashable, n_bytes: int, work: Callable[[], T]) -> T:
        """Return the result of work on a body of this size, done in a thread in its turn.

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
            # It still waits, or has been called up, or `_call_up` saw it leave.
            if not queue.drop(one) and not self._turns[one].cancelled():
                self._end(queue, one)
            raise
        finally:
            del self._turns[one]
        # A thread that has begun cannot be stopped; until it ends it has its turn.
        thread = asyncio.ensure_future(asyncio.to_thread(work))

        def ended(done: asyncio.Future[T]) -> None:
            _ = done.cancelled() or done.exception()  # else asyncio logs it where the client left
            self._end(queue, one)

        thread.add_done_callback(ended)
        return await asyncio.shield(thread)

    def _call_up(self, queue: FairQueue[Work]) -> None:
        while (one := queue.take()) is not None:
            if self._turns[one].done():
                queue.free(one, n_rows=1, n_bytes=0)  # its client left a moment ago
            else:
                self._turns[one].set_result(None)

    def _end(self, queue: FairQueue[Work], one: Work) -> None:
        queue.free(one, n_rows=1, n_bytes=0)
        self._call_up(queue)


MINUTE_S = 60.0
N_SEEN = 64
# Without any measurement, and at most.
DEFAULT_WAIT_S, MAX_WAIT_S = 1.0, 60.0


class Throughput:
    """The pace at which generations ended lately, and so the time for a place in the queue."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=N_SEEN)

    def note(self) -> None:
        """Note that one has ended."""
        self._ends.append(time.monotonic())

    def wait_s(self, n: int) -> float:
        """Return the seconds until n more generations will have ended."""
        now = time.monotonic()
        while self._ends and self._ends[0] < now - MAX_WAIT_S:
            self._ends.popleft()
        if len(self._ends) < 2:
            return DEFAULT_WAIT_S
        each_s = (now - self._ends[0]) / len(self._ends)
        return min(MAX_WAIT_S, n * each_s)


class _Bucket:
    """A minute's allowance, which refills steadily."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute, self._level, self._at = per_minute, float(per_minute), time.monotonic()

    def wait_s(self, n: int) -> float:
        """Return the seconds until the level reaches n."""
        now = time.monotonic()
        self.add((now - self._at) * self.per_minute / MINUTE_S)
        self._at = now
        return max(0.0, (n - self._level) * MINUTE_S / self.per_minute)

    def add(self, n: float) -> None:
        """Raise the level by n, up to a minute's allowance; a negative n lowers it."""
        self._level = min(float(self.per_minute), self._level + n)


class RateLimits:
    """The rest of each key's allowance; for one thread at a time."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[Hashable, str, int], _Bucket] = {}

    def take_request(self, client: Client) -> None:
        """Take one HTTP request; raises RateLimitedError where this minute's are used up."""
        self._take(client, "requests", client.requests_per_minute, 1)

    def take_tokens(self, client: Client, n: int) -> None:
        """Take tokens of prompts and answers.

        Raises:
            RateLimitedError: The allowance of this minute is used up.
            RequestError: There are more tokens than a minute's allowance.
        """
        most = client.tokens_per_minute
        if most is not None and n > most:
            raise RequestError(
                f"the request may use {n} tokens, prompt and max_tokens; this key has {most} a "
                "minute: ask for less"
            )
        self._take(client, "tokens", most, n)

    def give_back(self, client: Client, n_tokens: int) -> None:
        """Give back tokens that were not used."""
        if (most := client.tokens_per_minute) is not None:
            self._bucket(client, "tokens", most).add(n_tokens)

    def _take(self, client: Client, kind: str, most: int | None, n: int) -> None:
        if most is None:
            return
        bucket = self._bucket(client, kind, most)
        if wait_s := bucket.wait_s(n):
            raise RateLimitedError(
                f"this key may use {most} {kind} a minute; try again later", retry_after_s=wait_s
            )
        bucket.add(-n)

    def _bucket(self, client: Client, kind: str, most: int) -> _Bucket:
        return self._buckets.setdefault((client.name, kind, most), _Bucket(most))


class Dispatcher:
    """The requests of all clients, `max_waiting` of each at most; any thread may cancel."""

    def __init__(self, engine: Engine, max_waiting: int) -> None:
        self.engine = engine
        self._queue = FairQueue[Turn](
            n_rows=engine.limits.max_batch,
            max_bytes=engine.status.max_kv_bytes,
            max_waiting=with_room(max_waiting),
        )
        self._limits, self._throughput = RateLimits(), Throughput()
        self._lock = Lock()

    @property
    def n_waiting(self) -> int:
        """The number of requests that wait for their turn."""
        return self._queue.n_waiting

    @property
    def n_running(self) -> int:
        """The rows that are held by requests that have their turn."""
        return self._queue.n_running

    def admit(self, client: Client) -> None:
        """Count an HTTP request, however many it submits.

        Raises RateLimitedError where the client's key may send no more in this minute.
        """
        with self._lock:
            self._limits.take_request(client)

    def submit(self, requests: Sequence[Request], sink: Sink) -> list[Turn]:
        """Queue all requests of one `Client` or none; return their turns.

        Args:
            requests: At least one, each with an `index`; those of one gate follow each other.
            sink: Takes their updates, in the engine's thread.

        Raises:
            RequestError: One of them cannot run.
            RateLimitedError: The client's key may not use so many tokens in a minute.
            BusyError: Too many wait.
        """
        for request in requests:
            self.engine.check(request)
        alike = groupby(requests, lambda request: id(request.gate or request))
        turns = [Turn(self, list(together), sink) for _, together in alike]
        client, n = turns[0].whose, len(requests)
        with self._lock:
            excess = self._queue.excess(
                client.name, n, most=client.max_waiting, max_running=client.max_running
            )
            if excess:
                raise BusyError(
                    f"the queue has room for {max(0, n - excess)} more answers, and "
                    f"this request needs {n}: try again later",
                    retry_after_s=self._throughput.wait_s(excess),
                )
            self._limits.take_tokens(client, sum(request.n_tokens for request in requests))
            self._queue.put(turns)
        self.call_up()
        return turns

    def call_up(self) -> None:
        """Start every turn for which there is room."""
        while True:
            with self._lock:
                turn = self._queue.take()
            if turn is None:
                return
            turn.start()

    def drop(self, turn: Turn) -> bool:
        """Take out a turn; return whether it still waited."""
        with self._lock:
            if is_dropped := self._queue.drop(turn):
                self._limits.give_back(turn.whose, int(turn.cost))
        if is_dropped:
            self.call_up()  # what waited behind it may fit
        return is_dropped

    def free(self, turn: Turn, *, n_rows: int, n_bytes: int, n_unused: int) -> None:
        """Take back the rows, bytes and tokens of a turn's request that has ended."""
        with self._lock:
            self._throughput.note()
            self._limits.give_back(turn.whose, n_unused)
            self._queue.free(turn, n_rows=n_rows, n_bytes=n_bytes, unused=n_unused)


class Turn(Work):
    """Requests that start together: those of one prompt where one gate decides for all."""

    def __init__(self, dispatcher: Dispatcher, requests: Sequence[Request], sink: Sink) -> None:
        engine, n, whose = dispatcher.engine, len(requests), requests[0].client
        assert isinstance(whose, Client), "the service says whose requests they are"
        # No more than one client may hold: what is beyond that waits in the engine.
        n_bytes = n * max(engine.n_kv_bytes(request) for request in requests)
        super().__init__(
            client=whose.name,
            cost=sum(request.n_tokens for request in requests),
            n_rows=min(n, part_of(engine.limits.max_batch)),
            n_bytes=min(n_bytes, part_of(engine.status.max_kv_bytes)) if n > 1 else n_bytes,
            size=n,
            priority=max(requests[0].priority, whose.priority),
            max_running=whose.max_running,
        )
        self.whose = whose
        self._dispatcher, self._requests, self._sink = dispatcher, requests, sink
        self._unused = {request.index: request.options.max_tokens for request in requests}
        self._cancelling = Lock()
        self._running: Sequence[Running] | None = None
        self._is_cancelled = False
        self._n_open = n

    def start(self) -> None:
        """Start the requests in the engine."""
        running = self._dispatcher.engine.begin(self._requests, self._take)
        with self._cancelling:
            self._running, is_cancelled = running, self._is_cancelled
        if is_cancelled:
            self.cancel()

    def cancel(self) -> None:
        """End the requests soon, whether they wait or run; their last updates are then errors."""
        with self._cancelling:
            self._is_cancelled, running = True, self._running
        for one in running or ():
            one.cancel()
        if running is None and self._dispatcher.drop(self):
            error = CancelledError("the request was cancelled")
            for request in self._requests:
                self._sink(Update(index=request.index, error=error))

    def _take(self, update: Update) -> None:
        """Pass on an update of the engine; the last one of a request makes room."""
        self._unused[update.index] -= len(update.tokens)
        if not update.is_last:
            self._sink(update)
            return
        n, n_open = self.size, self._n_open
        self._n_open -= 1
        # Those that are left keep what they need.
        self._dispatcher.free(
            self,
            n_rows=min(self.n_rows, n_open) - min(self.n_rows, n_open - 1),
            n_bytes=self.n_bytes * n_open // n - self.n_bytes * (n_open - 1) // n,
            n_unused=self._unused[update.index],
        )
        try:
            self._sink(update)
        finally:
            with self._cancelling:
                is_starting = self._running is None
            if not is_starting:  # else whoever starts it calls up others next
                self._dispatcher.call_up()
