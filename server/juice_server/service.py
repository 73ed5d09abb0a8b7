"""The service between HTTP and the engine: one model, loaded at start, its jobs and its state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from threading import Thread
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from juice import SteeredModel
from juice.engine import Completion, GenerationRequest, Status
from juice.errors import EngineStoppedError, JuiceError
from juice.head_set import HeadSetLibrary
from juice_server.dispatcher import Dispatcher
from juice_server.errors import NotReadyError
from juice_server.head_sets import HeadSetFolder, check_start
from juice_server.jobs import Job
from juice_server.settings import Settings
from juice_server.telemetry.metrics import Metrics
from juice_server.trace import Trace, trace_of
from juice_server.translation import Translator

# States from which only another process helps.
LOST = ("engine failed", "engine stuck")
WATCH_S = 1.0
LOADING = "the model is still loading; ask /readyz"


class Service:
    """Owns the model; every route that generates goes through `submit`."""

    def __init__(
        self, load: Callable[[], SteeredModel], settings: Settings, metrics: Metrics
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        # First it is only no longer ready, then it takes nothing new.
        self.is_leaving = False
        self.is_draining = False
        self._watch: asyncio.Task[None] | None = None
        self._load = load
        self._translator: Translator | None = None
        self._dispatcher: Dispatcher | None = None
        self._head_sets: HeadSetFolder | None = None
        self._following: asyncio.Task[None] | None = None
        self._fingerprint: str | None = None
        self._jobs: set[Job] = set()

    async def start(self) -> None:
        """Load the model and its head sets in a daemon thread, which does not delay the exit.

        Raises JuiceError when they cannot be loaded.
        """
        loaded: Future[SteeredModel] = Future()
        loaded.set_running_or_notify_cancel()  # it cannot be cancelled half-way

        def work() -> None:
            try:
                loaded.set_result(self._prepared())
            except BaseException as error:
                loaded.set_exception(error)

        Thread(target=work, name="juice-loading", daemon=True).start()
        model = await asyncio.wrap_future(loaded)
        self._dispatcher = Dispatcher(model.engine, self.settings.max_queue)
        self._translator = Translator(model, self.settings)
        self._head_sets = HeadSetFolder(
            model.head_sets, self.settings, self.metrics, self._serve_head_sets
        )
        self._following = asyncio.create_task(self._head_sets.follow())
        self.metrics.watch(
            model.engine, lambda: self.status, lambda: self.translator.tokenizing.n_waiting
        )

    def _prepared(self) -> SteeredModel:
        model = self._load()
        try:
            # Read the sets now: a wrong folder fails at the start, not at the first request.
            check_start(model.head_sets, self.settings)
        except BaseException:
            model.close()
            raise
        return model

    def close(self) -> None:
        """Stop the engine and everything that runs."""
        if self._watch is not None:
            self._watch.cancel()  # an engine that is closed is not one that is lost
        if self._following is not None:
            self._following.cancel()
        if self._translator is not None:
            self.model.close()

    def when_lost(self, tell: Callable[[JuiceError], None]) -> None:
        """Call `tell` in the event loop when the engine cannot serve any more.

        It has lost a part, has failed, or has been without a step for too long.
        """
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

        self._watch = loop.create_task(watch())

    @property
    def translator(self) -> Translator:
        """The translator of bodies into requests.

        There is another one when the head sets change, so a request that steers several times takes
        it once. Raises NotReadyError while there is no model.
        """
        if self._translator is None:
            raise NotReadyError(LOADING)
        return self._translator

    @property
    def head_sets(self) -> HeadSetFolder:
        """The folder of head sets; raises NotReadyError while there is no model."""
        if self._head_sets is None:
            raise NotReadyError(LOADING)
        return self._head_sets

    def _serve_head_sets(self, library: HeadSetLibrary) -> None:
        self._translator = self.translator.with_head_sets(library)

    @property
    def dispatcher(self) -> Dispatcher:
        """Where generations wait for their turn; raises NotReadyError while there is no model."""
        if self._dispatcher is None:
            raise NotReadyError(LOADING)
        return self._dispatcher

    @property
    def model(self) -> SteeredModel:
        """The model; raises NotReadyError while there is none."""
        return self.translator.model

    @property
    def system_fingerprint(self) -> str:
        """A name for all that decides an answer's bits beside the request; see the engine's."""
        if self._fingerprint is None:
            self._fingerprint = self.model.engine.system_fingerprint
        return self._fingerprint

    @property
    def status(self) -> Status:
        """The engine's state; what waits for its turn in the server waits, too."""
        own = self.model.engine.status
        return replace(own, n_waiting=own.n_waiting + self.dispatcher.n_waiting)

    @property
    def state(self) -> str:
        """Whether requests can be answered (`ready`), and if not, why."""
        if self._translator is None:
            return "loading"
        status = self.model.engine.status
        if not status.is_alive:
            return "engine failed"
        if status.heartbeat_age_s > self.settings.engine_timeout:
            return "engine stuck"
        return "draining" if self.is_leaving or self.is_draining else "ready"

    def submit(
        self, requests: Sequence[GenerationRequest], trace: Trace, *, only_last: bool
    ) -> Job:
        """Start generating and return the job; `only_last` drops all updates but the last.

        Raises RequestError, BusyError, NotReadyError and EngineStoppedError.
        """
        if self.is_draining:
            raise NotReadyError("the server is shutting down")
        job = Job(
            self.dispatcher,
            requests,
            trace,
            self.metrics,
            timeout_s=self.settings.request_timeout,
            only_last=only_last,
        )
        self.metrics.read_prompts(job.run, trace)
        self._jobs.add(job)
        return job

    def forget(self, job: Job) -> None:
        """Cancel what is left of a job, and forget it."""
        self._jobs.discard(job)
        job.cancel()

    def cut(self) -> None:
        """End everything that runs: the drain limit is reached, or the engine lost."""
        for job in list(self._jobs):
            job.end(EngineStoppedError("the server is shutting down"))

    async def complete(
        self, request: Request, requests: Sequence[GenerationRequest]
    ) -> list[Completion]:
        """Generate and wait for all completions.

        Raises what `submit` raises, and JuiceError when one fails.
        """
        job = self.submit(requests, trace_of(request.scope), only_last=True)
        try:
            return await job.completions(request)
        finally:
            self.forget(job)


async def service_of(request: Request) -> Service:
    """Return the service of a request's app; async, as FastAPI runs plain functions in threads."""
    service: Service = request.app.state.service
    return service


ServiceOf = Annotated[Service, Depends(service_of)]
