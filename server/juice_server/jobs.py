"""A job: the generations of one HTTP request, in the event loop; the engine's thread feeds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from starlette.requests import Request

from juice.engine import Completion, Engine, GenerationRequest, Update
from juice.errors import CancelledError, JuiceError
from juice_server.errors import ClientGoneError, TimedOutError
from juice_server.metrics import Metrics
from juice_server.trace import Trace


class Job:
    """Generations that run for one HTTP request and end with it.

    Sends the requests to the engine; `only_last` drops all updates but the last. Raises what
    `Engine.submit` raises.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[GenerationRequest],
        trace: Trace,
        metrics: Metrics,
        *,
        timeout_s: float,
        only_last: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._trace = trace
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._deadline = loop.time() + timeout_s
        self._updates: asyncio.Queue[Update] = asyncio.Queue()

        def sink(update: Update) -> None:
            if update.is_last or not only_last:
                loop.call_soon_threadsafe(self._updates.put_nowait, update)

        self._running = engine.submit(requests, sink)
        self._n_open = len(requests)

    def cancel(self) -> None:
        """Cancel what still runs."""
        for running in self._running:
            running.cancel()

    def end(self, reason: JuiceError) -> None:
        """Cancel what still runs and fail at once, whether or not the engine still answers."""
        self.cancel()
        self._updates.put_nowait(Update(index=0, error=reason))

    async def updates(self) -> AsyncIterator[Update]:
        """Yield updates until every generation has ended.

        When one fails or the time is up, ends them all and raises JuiceError.
        """
        try:
            while self._n_open:
                async with asyncio.timeout_at(self._deadline):
                    update = await self._updates.get()
                self._n_open -= update.is_last
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
            for _ in range(self._n_open):
                self._metrics.failed(CancelledError("the request ended early"))
            self._n_open = 0
            self.cancel()

    async def completions(self, request: Request) -> list[Completion]:
        """Wait for all completions and return them in order; a client that leaves cancels them."""
        async with self._while_present(request):
            results = {
                u.index: u.completion async for u in self.updates() if u.completion is not None
            }
        return [results[i] for i in range(len(results))]

    async def first(self, request: Request, updates: AsyncIterator[Update]) -> Update | None:
        """Wait for the first update, which decides the status; a client that leaves cancels."""
        async with self._while_present(request):
            return await anext(updates, None)

    @asynccontextmanager
    async def _while_present(self, request: Request) -> AsyncIterator[None]:
        """Cancel the job if the client leaves while within; raises ClientGoneError in the end."""

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
            if not watcher.cancelled():
                raise ClientGoneError("the client left")
