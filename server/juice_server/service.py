"""The service between HTTP and the engine: one model, loaded at start, and the bounds of what may be asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from threading import Thread
from typing import TypeVar

from starlette.requests import Request

from juice.engine import Completion, GenerationRequest, Steer
from juice.engine.steer import SteerTarget
from juice.errors import EngineStoppedError, RequestError, UsageError
from juice.steered_model import SteeredModel
from juice_server.errors import NotReadyError, UnknownModelError
from juice_server.jobs import Job
from juice_server.metrics import Metrics
from juice_server.schemas.generation import GenerationFields
from juice_server.settings import Settings
from juice_server.tokens import TokenTexts
from juice_server.trace import Trace, trace_of

T = TypeVar("T")
# A step of a large prompt on a slow machine may take seconds; an engine that does not begin one in this time is stuck.
MAX_HEARTBEAT_AGE_S = 60.0
# Large texts are tokenized so many at a time: they share the interpreter with everything else.
N_TOKENIZING = 2
STEERING_TARGETS: tuple[SteerTarget, ...] = ("context", "parametric")


class Service:
    """Owns the model; every route that generates goes through `submit`."""

    def __init__(self, load: Callable[[], SteeredModel], settings: Settings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.is_draining = False
        self._load = load
        self._model: SteeredModel | None = None
        self.texts: TokenTexts
        self._jobs: set[Job] = set()
        self._tokenizing = asyncio.Semaphore(N_TOKENIZING)

    async def start(self) -> None:
        """Load the model and its head sets, in a thread that does not hold up the end of the process; raises JuiceError."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[SteeredModel] = loop.create_future()

        def finish(model: SteeredModel | None, error: BaseException | None) -> None:
            if loaded.cancelled():
                return
            if error is not None:
                loaded.set_exception(error)
            elif model is not None:
                loaded.set_result(model)

        def work() -> None:
            try:
                result: tuple[SteeredModel | None, BaseException | None] = self._prepared(), None
            except BaseException as error:
                result = None, error
            loop.call_soon_threadsafe(finish, *result)

        Thread(target=work, name="juice-loading", daemon=True).start()
        self._model = await loaded
        self.texts = TokenTexts(self._model.loaded.tokenizer)
        self.metrics.watch(lambda: self.model.engine.status)

    def _prepared(self) -> SteeredModel:
        model = self._load()
        default = self.settings.default_steer
        if default != "none" and default not in model.head_sets.by_name:
            raise UsageError(f"default_steer is {default}, but no head set of that name in {model.head_sets.folder} fits {model.id}")
        return model

    def close(self) -> None:
        """End the engine and everything that runs."""
        if self._model is not None:
            self._model.engine.close()

    @property
    def model(self) -> SteeredModel:
        """The model; raises NotReadyError while there is none."""
        if self._model is None:
            raise NotReadyError("the model is still loading; ask /readyz")
        return self._model

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.settings.served_model_name or self.model.id

    @property
    def state(self) -> str:
        """Tell whether requests can be answered (`ready`), and if not, why."""
        if self._model is None:
            return "loading"
        status = self._model.engine.status
        if not status.is_alive:
            return "engine failed"
        if status.heartbeat_age_s > MAX_HEARTBEAT_AGE_S:
            return "engine stuck"
        return "draining" if self.is_draining else "ready"

    @property
    def max_model_len(self) -> int | None:
        """Tokens of a request, prompt and new ones."""
        return self.model.engine.limits.max_model_len

    def submit(self, requests: Sequence[GenerationRequest], trace: Trace, *, only_last: bool) -> Job:
        """Start generating; raises RequestError, OverloadedError, NotReadyError and EngineStoppedError."""
        if self.is_draining:
            raise NotReadyError("the server is shutting down")
        job = Job(trace, self.metrics, self.settings.request_timeout)
        job.start(self.model.engine, requests, only_last=only_last)
        self.metrics.read_prompt(trace.n_prompt_tokens)
        self._jobs.add(job)
        return job

    def forget(self, job: Job) -> None:
        """Let go of a job that is over."""
        self._jobs.discard(job)
        job.cancel()

    def cut(self) -> None:
        """End everything that runs: the drain limit is reached."""
        for job in list(self._jobs):
            job.cancel(EngineStoppedError("the server is shutting down"))

    async def complete(self, request: Request, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Generate and wait for all completions; raises what `submit` raises, and JuiceError when one fails."""
        job = self.submit(requests, trace_of(request.scope), only_last=True)
        try:
            return await job.completions(request)
        finally:
            self.forget(job)

    async def requests(
        self,
        prompts: Sequence[str | Sequence[int]],
        fields: GenerationFields,
        trace: Trace,
        *,
        alias: str | None = None,
        add_special_tokens: bool = True,
        **options: object,
    ) -> list[GenerationRequest]:
        """Turn prompts and the fields of a body into requests, n of them a prompt, off the event loop."""
        steer = self.steer(fields, alias)
        trace.steer = steer.target
        if self.settings.log_prompts:
            trace.prompts = [prompt if isinstance(prompt, str) else str(prompt) for prompt in prompts]
        requests = await self.off_loop(lambda: self._requests(prompts, fields, steer, add_special_tokens, options))
        trace.n_prompt_tokens = sum(len(own.prompt_ids) for own in requests[:: fields.n])
        return requests

    def steer(self, fields: GenerationFields, model_name: str | None) -> Steer:
        """Return how to steer: as the body says, else as the model's alias, else by default; raises where they differ."""
        alias = self._alias(model_name)
        if fields.steer is None:
            return Steer(target=alias or self.settings.default_steer)
        if alias is not None and alias != fields.steer.target:
            raise RequestError(f"the model {model_name!r} steers toward {alias}, steer says {fields.steer.target}; drop one", param="steer")
        return fields.steer.to_steer()

    def _alias(self, name: str | None) -> SteerTarget | None:
        """Return the target that a model name such as `mini:context` carries; raises UnknownModelError."""
        if name is None or name == self.model_name:
            return None
        known: dict[str, SteerTarget] = {f"{self.model_name}:{target}": target for target in STEERING_TARGETS}
        if name not in known:
            raise UnknownModelError(f"the model {name!r} is not served; {self.model_name} is, see /v1/models", param="model")
        return known[name]

    def _requests(
        self,
        prompts: Sequence[str | Sequence[int]],
        fields: GenerationFields,
        steer: Steer,
        add_special_tokens: bool,
        options: dict[str, object],
    ) -> list[GenerationRequest]:
        settings = self.settings
        if len(prompts) > settings.max_prompts:
            raise RequestError(f"there are {len(prompts)} prompts; at most {settings.max_prompts} go into one request", param="prompt")
        if fields.n > settings.max_n:
            raise RequestError(f"n is {fields.n}; expected at most {settings.max_n}", param="n")
        made = []
        for prompt in prompts:
            ids = self.tokens(prompt, add_special_tokens=add_special_tokens)
            own = {**fields.options(), **options}
            own["max_tokens"] = self._max_tokens(fields, ids)
            for i in range(fields.n):
                seed = None if fields.seed is None else fields.seed + i
                made.append(self.model.request(ids, steer=steer, **{**own, "seed": seed}))
        return made

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Do what takes long for large inputs in a thread, a few at a time."""
        async with self._tokenizing:
            return await asyncio.to_thread(work)

    def tokens(self, prompt: str | Sequence[int], *, add_special_tokens: bool = True, param: str = "prompt") -> tuple[int, ...]:
        """Return a prompt's tokens; raises RequestError for one that is longer than it may be."""
        settings = self.settings
        if isinstance(prompt, str):
            if len(prompt) > settings.max_prompt_characters:
                raise RequestError(
                    f"the {param} has {len(prompt)} characters; expected at most {settings.max_prompt_characters}", param=param
                )
            try:
                ids = self.model.tokenize(prompt, add_special_tokens=add_special_tokens)
            except RequestError as error:
                error.param = param
                raise
        else:
            ids = tuple(prompt)
        if settings.max_prompt_tokens is not None and len(ids) > settings.max_prompt_tokens:
            raise RequestError(f"the {param} has {len(ids)} tokens; expected at most {settings.max_prompt_tokens}", param=param)
        return ids

    def _max_tokens(self, fields: GenerationFields, ids: Sequence[int]) -> int:
        """Return how many tokens may come: what was asked, or the default within the room that the prompt leaves."""
        if fields.max_tokens is not None:
            self.check_max_tokens(fields.max_tokens)
            return fields.max_tokens
        bound = self.settings.max_tokens
        left = max(1, (self.max_model_len or len(ids) + fields.default_max_tokens) - len(ids))
        return min(fields.default_max_tokens, left, bound or left)

    def check_max_tokens(self, max_tokens: int) -> None:
        """Raise RequestError for more new tokens than the settings allow."""
        bound = self.settings.max_tokens
        if bound is not None and max_tokens > bound:
            raise RequestError(f"max_tokens is {max_tokens}; expected at most {bound}", param="max_tokens")


async def service_of(request: Request) -> Service:
    """Return the service of the app that a request came to; a coroutine, for FastAPI runs plain functions in threads."""
    service: Service = request.app.state.service
    return service
