"""The service between HTTP and the engine: one model, loaded at start, and its state."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from functools import cached_property
from threading import Thread
from typing import Annotated, TypeVar

from fastapi import Depends
from fastapi import Request as HttpRequest

from juice.engine.answer import Completion, Update
from juice.engine.contract import Status
from juice.engine.request import Request
from juice.errors import CancelledError, EngineStoppedError, JuiceError
from juice.head_set.library import HeadSetLibrary
from juice.steered_model import SteeredModel
from juice_server.dispatcher import Dispatcher
from juice_server.errors import NotReadyError
from juice_server.head_sets import HeadSetFolder
from juice_server.http import left_s, timed_out, while_present
from juice_server.requests import Translator
from juice_server.settings import Settings
from juice_server.telemetry.metrics import Metrics
from juice_server.trace import Submission, trace_of

# States from which only another process helps.
LOST = ("engine failed", "engine stuck")
WATCH_S = 1.0
SHUTTING_DOWN = "the server is shutting down"
T = TypeVar("T")


class Service:
    """Owns the model; every route that generates goes through `updates`."""

    def __init__(
        self, load: Callable[[], SteeredModel], settings: Settings, metrics: Metrics
    ) -> None:
        self.settings, self.metrics = settings, metrics
        # First it is only no longer ready, then it takes nothing new.
        self.is_leaving = self.is_draining = False
        self._load = load
        self._translator: Translator | None = None
        self._dispatcher: Dispatcher | None = None
        self._head_sets: HeadSetFolder | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._open: set[asyncio.Queue[Update]] = set()  # where running HTTP requests wait

    async def start(self) -> None:
        """Load the model in a daemon thread, which does not delay the exit; raises JuiceError."""
        loaded: Future[SteeredModel] = Future()
        loaded.set_running_or_notify_cancel()  # it cannot be cancelled half-way

        def work() -> None:
            try:
                loaded.set_result(self._load())
            except BaseException as error:
                loaded.set_exception(error)

        Thread(target=work, name="juice-loading", daemon=True).start()
        model = await asyncio.wrap_future(loaded)
        self._dispatcher = Dispatcher(model.engine, self.settings.max_queue)
        self._translator = Translator(model, self.settings)
        self._head_sets = HeadSetFolder(
            model.head_sets, self.settings, self.metrics, self._serve_head_sets
        )
        self._tasks.append(asyncio.create_task(self._head_sets.follow()))
        self.metrics.watch(
            model.engine, lambda: self.status, lambda: self.translator.tokenizing.n_waiting
        )

    def close(self) -> None:
        """Stop the engine and everything that runs."""
        # An engine that is closed is not one that is lost: nobody watches it any more.
        for task in self._tasks:
            task.cancel()
        if self._translator is not None:
            self.model.close()

    def when_lost(self, tell: Callable[[JuiceError], None]) -> None:
        """Call `tell` in the event loop when the engine has lost a part, failed or got stuck."""
        loop = asyncio.get_running_loop()
        self.model.engine.when_lost(lambda error: loop.call_soon_threadsafe(tell, error))

        async def watch() -> None:
            # Twice: after a pause of the whole process the engine needs a moment for its next step.
            n_seen = 0
            while n_seen < 2:
                await asyncio.sleep(min(WATCH_S, self.settings.engine_timeout / 4))
                state = self.state
                n_seen = n_seen + 1 if state in LOST else 0
            tell(EngineStoppedError(f"{state}; its log has the details"))

        self._tasks.append(loop.create_task(watch()))

    @property
    def translator(self) -> Translator:
        """The translator of bodies; raises NotReadyError while there is no model.

        There is another one when the head sets change: a request that steers several times takes it
        once.
        """
        return _loaded(self._translator)

    @property
    def head_sets(self) -> HeadSetFolder:
        """The folder of head sets; raises NotReadyError while there is no model."""
        return _loaded(self._head_sets)

    def _serve_head_sets(self, library: HeadSetLibrary) -> None:
        self._translator = self.translator.with_head_sets(library)

    @property
    def model(self) -> SteeredModel:
        """The model; raises NotReadyError while there is none."""
        return self.translator.model

    @cached_property
    def system_fingerprint(self) -> str:
        """The name of all that decides an answer's bits beside the request; see the engine's."""
        return self.model.engine.system_fingerprint

    @property
    def status(self) -> Status:
        """The engine's state, with the generations that wait in the server."""
        status = self.model.engine.status
        n_waiting = status.n_waiting + _loaded(self._dispatcher).n_waiting
        return replace(status, n_waiting=n_waiting)

    @property
    def state(self) -> str:
        """The state: `ready` where requests can be answered, else the reason why not."""
        if self._translator is None:
            return "loading"
        status = self.model.engine.status
        if not status.is_alive:
            return "engine failed"
        if status.heartbeat_age_s > self.settings.engine_timeout:
            return "engine stuck"
        return "draining" if self.is_leaving or self.is_draining else "ready"

    def admit(self, request: HttpRequest) -> None:
        """Count a request that generates, before any work on it; raises RateLimitedError."""
        if self._dispatcher is not None:
            self._dispatcher.admit(trace_of(request.scope).client)

    async def updates(
        self, request: HttpRequest, requests: Sequence[Request], *, only_last: bool = False
    ) -> AsyncGenerator[Update]:
        """Generate, and yield updates until every request has ended; leaving it cancels the rest.

        Args:
            request: The HTTP request, whose client they are for, and whose trace records them.
            requests: The requests; updates number them in this order.
            only_last: Whether to drop all updates but the last of each.

        Raises JuiceError where a request cannot be queued, fails, or the time is up; all end then.
        """
        if self.is_draining:
            raise NotReadyError(SHUTTING_DOWN)
        trace, loop = trace_of(request.scope), asyncio.get_running_loop()
        queue: asyncio.Queue[Update] = asyncio.Queue()
        n_new = Counter[int]()

        def sink(update: Update) -> None:
            n_new[update.index] += len(update.tokens)
            if update.is_last or not only_last:
                loop.call_soon_threadsafe(queue.put_nowait, update)

        requests = [replace(one, index=i, client=trace.client) for i, one in enumerate(requests)]
        submission = Submission(requests, trace.n_choices)
        turns = _loaded(self._dispatcher).submit(requests, sink)
        trace.submissions.append(submission)
        self.metrics.read_prompts(submission, trace)
        self._open.add(queue)
        n_open, timeout_s = len(requests), self.settings.request_timeout
        try:
            while n_open:
                async with asyncio.timeout(left_s(trace, timeout_s)):
                    update = await queue.get()
                n_open -= update.is_last
                if update.completion is not None:
                    submission.ended[update.index] = update.completion
                    self.metrics.completed(update.completion, requests[update.index], trace)
                if update.error is not None:
                    self.metrics.failed(update.error)
                    raise update.error
                yield update
        except TimeoutError:
            raise timed_out(timeout_s) from None
        finally:
            self._open.discard(queue)
            for _ in range(n_open):
                self.metrics.failed(CancelledError("the request ended early"))
            abandoned = [i for i in range(len(requests)) if i not in submission.ended]
            submission.n_abandoned_tokens = sum(n_new[i] for i in abandoned)
            self.metrics.generated(submission.n_abandoned_tokens, trace)
            for turn in turns:
                turn.cancel()

    def cut(self) -> None:
        """End everything that runs: the drain limit is reached, or the engine lost."""
        for queue in self._open:
            queue.put_nowait(Update(index=0, error=EngineStoppedError(SHUTTING_DOWN)))

    async def complete(self, request: HttpRequest, requests: Sequence[Request]) -> list[Completion]:
        """Generate and wait for all completions; a client that leaves cancels them."""

        async def ended() -> dict[int, Completion]:
            async with aclosing(self.updates(request, requests, only_last=True)) as updates:
                return {one.index: one.completion async for one in updates if one.completion}

        done = await while_present(request, self.settings.request_timeout, ended())
        return [done[i] for i in range(len(requests))]


def _loaded(part: T | None) -> T:
    if part is None:
        raise NotReadyError("the model is still loading; ask /readyz")
    return part


async def service_of(request: HttpRequest) -> Service:
    """Return the service of a request's app; async, as FastAPI runs plain functions in threads."""
    service: Service = request.app.state.service
    return service


ServiceOf = Annotated[Service, Depends(service_of)]


async def admitting_service(request: HttpRequest, service: ServiceOf) -> Service:
    """Return the service once it has admitted a request that generates."""
    service.admit(request)
    return service


AdmittingService = Annotated[Service, Depends(admitting_service)]
