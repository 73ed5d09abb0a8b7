"""A job: the generations of one HTTP request, in the event loop; the engine's thread feeds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from starlette.requests import Request

from juice.engine import Completion, Engine, GenerationRequest, Running, Update
from juice.errors import CancelledError, JuiceError
from juice_server.errors import ClientGoneError, TimedOutError
from juice_server.metrics import Metrics
from juice_server.trace import Trace


class Job:
    """Generations that run for one HTTP request and end with it."""

    def __init__(self, trace: Trace, metrics: Metrics, timeout_s: float) -> None:
        self._trace = trace
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        self._running: list[Running] = []
        self.n_open = 0

    def start(
        self, engine: Engine, requests: Sequence[GenerationRequest], *, only_last: bool
    ) -> None:
        """Send the requests to the engine; `only_last` drops all updates but the last.

        Raises what `Engine.submit` raises.
        """
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + self._timeout_s

        def sink(update: Update) -> None:
            if update.is_last or not only_last:
                loop.call_soon_threadsafe(self._updates.put_nowait, update)

        self._running = list(engine.submit(requests, sink))
        self.n_open = len(requests)

    def cancel(self, reason: JuiceError | None = None) -> None:
        """Cancel what still runs."""
        for running in self._running:
            running.cancel(reason)

    async def updates(self) -> AsyncIterator[Update]:
        """Yield updates until every generation has ended.

        When one fails or the time is up, ends them all and raises JuiceError.
        """
        try:
            while self.n_open:
                async with asyncio.timeout_at(self._deadline):
                    update = await self._updates.get()
                self.n_open -= update.is_last
                if update.completion is not None:
                    self._metrics.completed(update.completion)
                    self._trace.note(update.completion)
                if update.error is not None:
                    self._metrics.failed(update.error)
                    raise update.error
                yield update
        except TimeoutError:
            raise TimedOutError(
                f"the request took more than {self._timeout_s:g} s; ask for fewer tokens"
            ) from None
        finally:
            self._abandon()

    async def completions(self, request: Request) -> list[Completion]:
        """Wait for all completions and return them in order; a client that leaves cancels them."""
        async with _Presence(request, self):
            results = {
                u.index: u.completion async for u in self.updates() if u.completion is not None
            }
        return [results[i] for i in range(len(results))]

    async def first(self, request: Request, updates: AsyncIterator[Update]) -> Update | None:
        """Wait for the first update, which decides the status; a client that leaves cancels."""
        async with _Presence(request, self):
            return await anext(updates, None)

    def _abandon(self) -> None:
        for _ in range(self.n_open):
            self._metrics.failed(CancelledError("the request ended early"))
        self.n_open = 0
        self.cancel()


class _Presence:
    """Inside the context, a client that leaves cancels the job."""

    def __init__(self, request: Request, job: Job) -> None:
        self._request, self._job = request, job
        self._is_gone = False

    async def __aenter__(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(self, *_exception: object) -> None:
        self._watcher.cancel()
        with suppress(asyncio.CancelledError):
            await self._watcher
        if self._is_gone:
            raise ClientGoneError("the client left")

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self._job.cancel()
