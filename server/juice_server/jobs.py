"""A job: the generations of one HTTP request, in the event loop; the engine's thread feeds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request

from juice.engine import Completion, GenerationRequest, Update
from juice.errors import CancelledError, JuiceError
from juice_server.dispatcher import Dispatcher
from juice_server.presence import left_s, timed_out, while_present
from juice_server.telemetry.metrics import Metrics
from juice_server.trace import Trace


class Job:
    """Generations that run for one HTTP request and end with it; `run` is the record of them.

    Queues the requests; `only_last` drops all updates but the last. Raises what
    `Dispatcher.submit` raises.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
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
        self._updates: asyncio.Queue[Update] = asyncio.Queue()

        def sink(update: Update) -> None:
            if update.is_last or not only_last:
                loop.call_soon_threadsafe(self._updates.put_nowait, update)

        self.run = trace.submit(requests)
        self._running = dispatcher.submit(trace.client, requests, sink, priority=trace.priority)
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
                async with asyncio.timeout(left_s(self._trace, self._timeout_s)):
                    update = await self._updates.get()
                self._n_open -= update.is_last
                if update.completion is not None:
                    self.run.ended[update.index] = update.completion
                    self._metrics.completed(update.completion, self._trace, self.run)
                if update.error is not None:
                    self._metrics.failed(update.error)
                    raise update.error
                yield update
        except TimeoutError:
            raise timed_out(self._timeout_s) from None
        finally:
            for _ in range(self._n_open):
                self._metrics.failed(CancelledError("the request ended early"))
            self._n_open = 0
            self.cancel()

    async def completions(self, request: Request) -> list[Completion]:
        """Wait for all completions and return them in order; a client that leaves cancels them."""

        async def ended() -> list[Completion]:
            async for _ in self.updates():
                pass
            return self.run.completions

        return await while_present(request, self._timeout_s, ended())

    async def first(self, request: Request, updates: AsyncIterator[Update]) -> Update | None:
        """Wait for the first update, which decides the status; a client that leaves cancels."""

        async def first() -> Update | None:
            return await anext(updates, None)

        return await while_present(request, self._timeout_s, first())
