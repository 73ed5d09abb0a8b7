"""The engine of the contract over vLLM's asynchronous engine, in an event loop of its own.

A request becomes vLLM's `SamplingParams`, and runs as a `VllmSequence`, which turns vLLM's outputs
into the updates of the contract. `OpenRequests` holds those that wait or run, and `Statistics` the
last report of vLLM's scheduler.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import count
from threading import Lock, Thread
from typing import Any, ClassVar

import torch
import vllm
from vllm import SamplingParams, TokensPrompt, envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats

from juice.engine.answer import ScoredToken, Sink
from juice.engine.contract import Capability, Engine, ModelDescription, Status
from juice.engine.load_options import Limits
from juice.engine.request import Request, Running
from juice.engine.steer import Steering
from juice.engine.structure import CANNOT_FOLLOW
from juice.engine.structure_sandbox import WHAT_HELPS
from juice.engine.text import Transcript
from juice.engine.vllm import processes
from juice.engine.vllm.arguments import (
    FIRST,
    KEY,
    STRUCTURE,
    Coefficients,
    Layers,
    accept_from,
)
from juice.engine.vllm.processes import numeric
from juice.engine.vllm.state import to_text
from juice.errors import (
    CancelledError,
    EngineStoppedError,
    GenerationError,
    JuiceError,
    NonFiniteError,
    RequestError,
)
from juice.formula import METHODS, Method


class Statistics(StatLoggerBase):
    """Keeps the newest statistics; vLLM makes one and calls `record` after every step."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.newest = SchedulerStats()
        self.at = time.monotonic()
        self.steps = dict[int, int]()  # by how many requests ran in them

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Keep the report of a step."""
        self.at = time.monotonic()
        if scheduler_stats is not None:
            self.newest = scheduler_stats
        if iteration_stats is not None:
            # Those that the step finished no longer run.
            n = self.newest.num_running_reqs + len(iteration_stats.finished_requests)
            self.steps[n] = self.steps.get(n, 0) + 1

    def log_engine_initialized(self) -> None:
        pass


MAX_SEED = 2**63 - 1
ENDED = "the request failed in vLLM; its log has the reason"
LEAST_NEW_TOKENS = 1  # vLLM samples one where none is asked for


def _first_and_last(layers: range) -> list[int] | None:
    return [layers[0], layers[-1]] if layers else None


def sampling_params(
    request: Request, stop_token_ids: frozenset[int], *, is_first: bool = False
) -> SamplingParams:
    """Return vLLM's parameters of a request, which ends at any of the stop tokens.

    Text and stop strings are not vLLM's business: `juice.engine.text` makes the same text of the
    same tokens in every engine.
    """
    options = request.options
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=max(0, options.top_k),
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=dict(options.logit_bias) or None,
        seed=None if options.seed is None else options.seed & MAX_SEED,
        max_tokens=max(LEAST_NEW_TOKENS, options.max_tokens),
        min_tokens=options.min_tokens,
        stop_token_ids=sorted(stop_token_ids),
        ignore_eos=True,
        logprobs=options.top_logprobs,
        prompt_logprobs=options.top_logprobs if options.prompt_logprobs else None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=_extra_args(request, stop_token_ids, is_first=is_first),
    )


def watching_params(request: Request) -> list[SamplingParams]:
    """Return the parameters that score the tokens that a request watches, after its prompt.

    vLLM scores so many tokens at a time.
    """
    watched, n = list(dict.fromkeys(request.options.watch)), MAX_LOGPROB_TOKEN_IDS
    return [_scoring(request, watched[i : i + n]) for i in range(0, len(watched), n)]


def _scoring(request: Request, tokens: list[int]) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=1,
        ignore_eos=True,
        logprob_token_ids=tokens,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=_steering(request),
    )


def _extra_args(
    request: Request, stop_token_ids: frozenset[int], *, is_first: bool
) -> dict[str, Any] | None:
    extra: dict[str, Any] = {FIRST: True} if is_first else _steering(request) or {}
    if request.options.structure is not None:
        extra[STRUCTURE] = to_text(request.options.structure, stop_token_ids)
    return extra or None


def _steering(request: Request) -> dict[str, Any] | None:
    coefficients = Coefficients.of(request.steering, len(request.prompt_ids))
    return None if coefficients is None else {KEY: coefficients.to_json()}


class VllmSequence:
    """The state of one request; any thread may call `cancel`, the rest is the engine's thread's.

    `is_first` puts it before all that wait.
    """

    def __init__(
        self,
        request: Request,
        transcript: Transcript,
        loop: asyncio.AbstractEventLoop,
        *,
        is_first: bool = False,
    ) -> None:
        self.request = request
        self.is_first = is_first
        self.transcript = transcript
        self.cancelled: JuiceError | None = None
        self.task: asyncio.Task[None] | None = None
        self._loop = loop
        self._has_started = False
        self._watched: dict[int, Any] = {}

    def cancel(self, reason: JuiceError | None = None) -> None:
        """End it soon; its last update is then an error."""
        self.cancelled = reason or CancelledError("the request was cancelled")
        with suppress(RuntimeError):  # the loop is closed: everything has ended
            self._loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        # One that has not begun looks at `cancelled` first.
        if self.task is not None:
            self.task.cancel()

    def take(self, output: Any) -> None:
        """Take one of vLLM's outputs: the tokens since the last one, and their log-probabilities.

        Raises NonFiniteError where these are not numbers, and GenerationError where vLLM has ended
        the request itself.
        """
        _check_answers(output)
        if not self._has_started:
            self._has_started = True
            self.transcript.start()
            self.transcript.n_cached_tokens = output.num_cached_tokens or 0
        if output.prompt_logprobs and len(self.transcript.prompt_tokens) == 1:
            scored = zip(self.request.prompt_ids[1:], output.prompt_logprobs[1:], strict=True)
            self.transcript.prompt_tokens += [self._scored(*pair) for pair in scored]
        if self.request.options.max_tokens == 0:
            self.transcript.finish_reason = "length"
            return
        new = output.outputs[0]
        pairs = zip(new.token_ids, new.logprobs, strict=True)
        self.transcript.add([self._scored(*pair) for pair in pairs])

    def watch(self, output: Any) -> None:
        """Take the scores of some of the tokens that the request watches.

        Raises GenerationError where vLLM has ended the request itself.
        """
        _check_answers(output)
        watched = self.request.options.watch
        self._watched |= output.outputs[0].logprobs[0]
        if self._watched.keys() >= set(watched):
            self.transcript.watched = tuple(self._watched[token].logprob for token in watched)

    def _scored(self, token: int, logprobs: Mapping[int, Any]) -> ScoredToken:
        logprob = logprobs[token].logprob
        if math.isnan(logprob):
            raise NonFiniteError
        n_top = self.request.options.top_logprobs
        top = sorted(logprobs.items(), key=lambda item: item[1].rank)[:n_top]
        return ScoredToken(token, logprob, tuple((other, scored.logprob) for other, scored in top))


def _check_answers(output: Any) -> None:
    """Raise GenerationError for an output that is no part of an answer: vLLM has ended it."""
    if output.outputs[0].finish_reason not in (None, "stop", "length"):
        raise GenerationError(ENDED)


class OpenRequests:
    """The requests that have begun and not ended; any thread may use it.

    `stopped` is the reason why there are no more; None while there may be.
    """

    def __init__(self) -> None:
        self.stopped: EngineStoppedError | None = None
        self._open: set[VllmSequence] = set()
        self._busy_since = time.monotonic()
        self._lock = Lock()

    @property
    def state(self) -> tuple[int, float]:
        """The number of open requests, and the `time.monotonic` since which there was one."""
        with self._lock:
            return len(self._open), self._busy_since

    def add(self, sequence: VllmSequence, begin: Callable[[], object]) -> None:
        """Add a request, and begin it before it can be cancelled.

        Raises EngineStoppedError once the engine has stopped.
        """
        with self._lock:
            if self.stopped is not None:
                raise EngineStoppedError(str(self.stopped))
            if not self._open:
                self._busy_since = time.monotonic()
            self._open.add(sequence)
            begin()

    def remove(self, sequence: VllmSequence) -> None:
        """Remove a request that has ended."""
        with self._lock:
            self._open.discard(sequence)

    def stop(self, reason: EngineStoppedError) -> None:
        """Cancel all, and take no more."""
        with self._lock:
            self.stopped = self.stopped or reason
            left = list(self._open)
        for sequence in left:
            sequence.cancel(EngineStoppedError(str(reason)))


LOG = logging.getLogger("juice.engine.vllm")
CLOSED = "the engine was closed"


class VllmEngine(Engine):
    """Runs a model in vLLM, which steers in the layers that its start prepared.

    vLLM settles the limits that are left open.
    """

    name: ClassVar[str] = "vllm"
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.WATCH})

    def __init__(
        self,
        description: ModelDescription,
        arguments: AsyncEngineArgs,
        layers: Layers,
        limits: Limits,
    ) -> None:
        self._description, self.layers, self._arguments = description, layers, arguments
        self._numbers = count()
        self._open = OpenRequests()
        self._listeners: list[Callable[[EngineStoppedError], object]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="juice-vllm", daemon=True)
        self._thread.start()
        self.statistics: Statistics | None = None
        self._is_invariant = bool(envs.VLLM_BATCH_INVARIANT)  # now, as its processes read it
        accept_from("the engine")
        self._llm: AsyncLLM = self._call(self._start(arguments))
        self._stop = weakref.finalize(self, processes.stop, self._llm, self._loop, self._thread)
        watching = processes.watch(self._llm, weakref.WeakMethod(self._lose))
        asyncio.run_coroutine_threadsafe(watching, self._loop)
        self.checked: dict[str, float] = {}
        self.facts = self._call(self._llm.collective_rpc("juice_facts"))[0]
        self._description = replace(
            description, dtype=self.facts.pop("dtype"), device=self.facts.pop("device")
        )
        config = self._llm.vllm_config
        self.limits = replace(
            limits,
            max_batch=config.scheduler_config.max_num_seqs,
            max_model_len=config.model_config.max_model_len,
            kv_memory_bytes=self.facts["n_kv_bytes"],
            max_prefill_tokens=config.scheduler_config.max_num_batched_tokens,
        )

    @property
    def description(self) -> ModelDescription:
        return self._description

    @property
    def status(self) -> Status:
        n_open, busy_since = self._open.state
        newest = self.statistics.newest if self.statistics else None
        at = max(busy_since, self.statistics.at if self.statistics else 0)
        n_running = min(n_open, newest.num_running_reqs if newest else 0)
        n_bytes = self.limits.kv_memory_bytes or 0
        # Reports come with steps, and what is cancelled last has none.
        used = newest.kv_cache_usage if newest and n_open else 0.0
        return Status(
            is_alive=self._open.stopped is None and not self._llm.errored,
            heartbeat_age_s=time.monotonic() - at if n_open else 0.0,
            n_running=n_running,
            n_waiting=n_open - n_running,
            n_kv_bytes=round(used * n_bytes),
            max_kv_bytes=n_bytes,
            steps=dict(self.statistics.steps) if self.statistics else {},
        )

    @property
    def n_kv_bytes_per_token(self) -> int:
        """The bytes that the keys and values of one unsteered token take, over all layers.

        Companions' included: the cache has memory for them whether a request has any or not.
        """
        return int(self.facts["n_kv_bytes_per_token"])

    def n_kv_bytes(self, request: Request) -> int:
        """Return the bytes of a prompt: later tokens are preempted where memory is short."""
        return len(request.prompt_ids) * self.n_kv_bytes_per_token

    @property
    def details(self) -> dict[str, Any]:
        return {
            "version": vllm.__version__,
            "window": _first_and_last(self.layers.window),
            "steered_layers": _first_and_last(self.layers.steered),
            "deterministic": self._is_invariant,
            **self.facts,
            "check": self.checked,
        }

    @property
    def max_scored_tokens(self) -> int | None:
        limit = self.limits.max_model_len
        return None if limit is None else limit - LEAST_NEW_TOKENS

    @property
    def steerable_layers(self) -> dict[Method, range]:
        return {method: self.layers.for_method(method) for method in METHODS}

    @property
    def numerics(self) -> dict[str, Any]:
        return {
            "version": vllm.__version__,
            "window": list(self.layers.window),
            "batch_invariant": self._is_invariant,
            "attention": self.facts["attention"],
            "arguments": numeric(self._arguments),
        }

    def companion_layers(self, steering: Steering) -> range:
        return self.layers.window if steering.window else range(0)

    def check(self, request: Request) -> None:
        super().check(request)
        n_new = max(LEAST_NEW_TOKENS, request.options.max_tokens)
        request.with_options(max_tokens=n_new).check_length(self.limits.max_model_len)
        self.layers.check(request.steering)

    @property
    def why_stopped(self) -> str:
        return str(self._open.stopped or CLOSED)

    def start(
        self, request: Request, sink: Sink, *, instead_of: Running | None = None
    ) -> VllmSequence:
        # vLLM's queue knows only its front and its end.
        transcript, is_first = self._transcript(request, sink), instead_of is not None
        sequence = VllmSequence(request, transcript, self._loop, is_first=is_first)
        self._open.add(
            sequence, lambda: asyncio.run_coroutine_threadsafe(self._run(sequence), self._loop)
        )
        return sequence

    def close(self) -> None:
        self._open.stop(EngineStoppedError(CLOSED))
        self._stop()
        self._end_sandbox()
        vars(self).pop("_llm", None)  # its finalizer cannot run while the interpreter ends

    def when_lost(self, listener: Callable[[EngineStoppedError], object]) -> None:
        self._listeners.append(listener)

    def preempt(self) -> Future[bool]:
        """Preempt everything that runs: it is computed anew from its tokens."""
        return asyncio.run_coroutine_threadsafe(
            self._llm.reset_prefix_cache(reset_running_requests=True), self._loop
        )

    def two_runs(
        self,
        tokens: list[int],
        coefficients: Coefficients | None,
        read: list[list[int]],
        n_padding: int,
    ) -> torch.Tensor:
        """Return log-probabilities at the last n tokens by the definition, float32 [n, m].

        `read` has the m tokens whose to return, for each of the last tokens; `n_padding` follow.
        """
        plain = None if coefficients is None else coefficients.to_json()
        args = tokens, plain, read, n_padding
        answers = self._call(self._llm.collective_rpc("juice_two_runs", args=args))
        return torch.tensor(next(answer for answer in answers if answer is not None))

    def prepare_structures(self) -> None:
        super().prepare_structures()
        stops = sorted(self.description.stop_token_ids)
        self._call(self._llm.collective_rpc("juice_prepare_structures", args=(stops,)))

    async def _start(self, arguments: AsyncEngineArgs) -> AsyncLLM:
        def statistics(config: Any, index: int) -> Statistics:
            self.statistics = Statistics(config, index)
            return self.statistics

        return processes.start(arguments, statistics)

    async def _run(self, sequence: VllmSequence) -> None:
        """Run one request to its end, and send its last update."""
        error, sequence.task = sequence.cancelled, asyncio.current_task()
        try:
            if error is None:
                await self._generate(sequence)
        except asyncio.CancelledError:
            error = sequence.cancelled or self._open.stopped or EngineStoppedError(CLOSED)
        except JuiceError as failure:
            error = failure
        except EngineDeadError as dead:
            error = EngineStoppedError(f"vLLM failed: {dead}")
        except Exception as other:
            LOG.warning("a request failed in vLLM", exc_info=other)
            error = GenerationError(f"the request failed in vLLM: {other}")
        self._open.remove(sequence)
        with suppress(Exception):
            if error is None:
                sequence.transcript.complete()
            else:
                sequence.transcript.fail(error)

    async def _generate(self, sequence: VllmSequence) -> None:
        prompt = TokensPrompt(prompt_token_ids=list(sequence.request.prompt_ids))
        number = next(self._numbers)
        for i, params in enumerate(watching_params(sequence.request)):
            async for output in self._llm.generate(prompt, params, f"{number}-watch-{i}"):
                sequence.watch(output)
        stops = sequence.transcript.stop_token_ids
        params = sampling_params(sequence.request, stops, is_first=sequence.is_first)
        async with aclosing(self._llm.generate(prompt, params, str(number))) as outputs:
            async for output in outputs:
                sequence.take(output)
                if sequence.transcript.finish_reason is not None:
                    break
        if sequence.transcript.finish_reason is None:
            raise GenerationError(ENDED)
        self._check_form(sequence)

    def _check_form(self, sequence: VllmSequence) -> None:
        """Raise RequestError for an answer that only stopped because no token could follow."""
        structure, ended = sequence.request.options.structure, sequence.transcript
        if structure is None or ended.finish_reason != "stop":
            return
        if not self.structures.are_whole(structure, [token.id for token in ended.tokens]):
            raise RequestError(f"{CANNOT_FOLLOW}; {WHAT_HELPS}", param="structure")

    def _lose(self) -> None:
        """End everything, and tell who listens: a process of vLLM is gone."""
        reason = EngineStoppedError("vLLM lost a process; its log has the reason")
        self._open.stop(reason)
        for listener in self._listeners:
            Thread(target=listener, args=(reason,), daemon=True).start()

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
