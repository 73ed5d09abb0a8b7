"""The engine of the contract over vLLM's asynchronous engine, in an event loop of its own."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import count
from threading import Thread
from typing import Any, ClassVar

import torch
import vllm
from vllm import TokensPrompt, envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from juice.engine import (
    Capability,
    Engine,
    GenerationRequest,
    Limits,
    ModelDescription,
    Running,
    Sink,
    Status,
    Steering,
)
from juice.engine.grammar import WHAT_HELPS
from juice.engine.structure import CANNOT_FOLLOW
from juice.engine.text import TextStream
from juice.engine.transcript import Transcript
from juice.errors import (
    EngineStoppedError,
    GenerationError,
    JuiceError,
    RequestError,
)
from juice.vllm import processes
from juice.vllm.arguments import Coefficients, accept_from
from juice.vllm.generation import Generation
from juice.vllm.numerics import numeric
from juice.vllm.open_requests import OpenRequests
from juice.vllm.sampling import sampling_params, watching_params
from juice.vllm.statistics import Statistics
from juice.vllm.window import check_layers

LOG = logging.getLogger("juice.vllm")
CLOSED = "the engine was closed"


class VllmEngine(Engine):
    """Runs a model in vLLM; the window is the layers in which requests can be steered.

    Args:
        description: The model.
        arguments: vLLM's own arguments, `juice.vllm.start` makes them.
        window: The layers that have companions.
        limits: The bounds as asked for; vLLM settles what is left open.
    """

    name: ClassVar[str] = "vllm"
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.WATCH})

    def __init__(
        self,
        description: ModelDescription,
        arguments: AsyncEngineArgs,
        window: range,
        limits: Limits,
    ) -> None:
        self._description, self.window, self._arguments = description, window, arguments
        self._special_ids = frozenset(description.tokenizer.all_special_ids)
        self._numbers = count()
        self._open = OpenRequests()
        self._listeners: list[Callable[[EngineStoppedError], object]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="juice-vllm", daemon=True)
        self._thread.start()
        self._statistics: Statistics | None = None
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
        """The model."""
        return self._description

    @property
    def status(self) -> Status:
        """The engine's present state."""
        n_open, busy_since = self._open.state
        newest = self._statistics.newest if self._statistics else None
        at = max(busy_since, self._statistics.at if self._statistics else 0)
        n_running = min(n_open, newest.num_running_reqs if newest else 0)
        n_bytes = self.limits.kv_memory_bytes or 0
        return Status(
            is_alive=self._open.stopped is None and not self._llm.errored,
            heartbeat_age_s=time.monotonic() - at if n_open else 0.0,
            n_running=n_running,
            n_waiting=n_open - n_running,
            n_kv_bytes=round((newest.kv_cache_usage if newest else 0.0) * n_bytes),
            max_kv_bytes=n_bytes,
            steps=dict(self._statistics.steps) if self._statistics else {},
        )

    @property
    def n_kv_bytes_per_token(self) -> int:
        """The bytes that the keys and values of one unsteered token take, over all layers.

        Companions' included: the cache holds room for them whether a request has any or not.
        """
        return int(self.facts["n_kv_bytes_per_token"])

    def n_kv_bytes(self, request: GenerationRequest) -> int:
        """Return the bytes of a prompt: what comes after it is preempted where there is no room."""
        return len(request.prompt_ids) * self.n_kv_bytes_per_token

    @property
    def details(self) -> dict[str, Any]:
        """Which vLLM runs, how, and in which layers requests can be steered."""
        first_and_last = [self.window[0], self.window[-1]] if self.window else None
        return {
            "version": vllm.__version__,
            "window": first_and_last,
            "deterministic": bool(envs.VLLM_BATCH_INVARIANT),
            **self.facts,
            "check": self.checked,
        }

    @property
    def steerable_layers(self) -> range:
        """The layers in which requests can be steered."""
        return self.window

    @property
    def numerics(self) -> dict[str, Any]:
        """VLLM's version, the window, and how it was told to run."""
        return {
            "version": vllm.__version__,
            "window": list(self.window),
            "batch_invariant": envs.VLLM_BATCH_INVARIANT,
            "attention": self.facts["attention"],
            "arguments": numeric(self._arguments),
        }

    def companion_layers(self, steering: Steering) -> range:
        """Return the layers in which a request with this steering has a companion."""
        return self.window if steering.window else range(0)

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError for a request that cannot run; see `Engine.check`."""
        super().check(request)
        check_layers(request.steering, self.window)

    def start(
        self, requests: Sequence[GenerationRequest], sink: Sink, *, wait: bool = False
    ) -> list[Generation]:
        """Start requests, all or none; see `Engine.submit`."""
        for request in requests:
            self.check(request)
        generations = [self._generation(i, request, sink) for i, request in enumerate(requests)]
        self._open.add(generations, self._begin, self.limits, wait=wait)
        return generations

    def resume(
        self,
        request: GenerationRequest,
        sink: Sink,
        *,
        instead_of: Running | None,
    ) -> Generation:
        """Start a request before all that wait: vLLM's queue knows no place but the first."""
        generation = self._generation(0, request, sink, is_first=True)
        self._open.add([generation], self._begin, limits=None)
        return generation

    def close(self) -> None:
        """End everything that runs or waits, and vLLM's processes."""
        self._open.stop(EngineStoppedError(CLOSED))
        self._stop()
        vars(self).pop("_llm", None)  # its finalizer cannot run while the interpreter ends

    def when_lost(self, listener: Callable[[EngineStoppedError], object]) -> None:
        """Call the listener, in a thread of its own, when a process of vLLM is lost."""
        self._listeners.append(listener)

    def preempt(self) -> Future[bool]:
        """Preempt everything that runs: it is computed anew from its tokens."""
        return asyncio.run_coroutine_threadsafe(
            self._llm.reset_prefix_cache(reset_running_requests=True), self._loop
        )

    def two_runs(
        self, tokens: list[int], coefficients: Coefficients | None, read: list[list[int]]
    ) -> torch.Tensor:
        """Return log-probabilities at the last n tokens by the definition, float32 [n, m].

        `read` has the m tokens whose to return, for each of the last tokens.
        """
        plain = None if coefficients is None else coefficients.to_json()
        answers = self._call(self._llm.collective_rpc("juice_two_runs", args=(tokens, plain, read)))
        return torch.tensor(next(answer for answer in answers if answer is not None))

    def _begin(self, one: Generation) -> None:
        asyncio.run_coroutine_threadsafe(self._run(one), self._loop)

    def _generation(
        self, index: int, request: GenerationRequest, sink: Sink, *, is_first: bool = False
    ) -> Generation:
        own = self.description
        text = TextStream(
            own.tokenizer,
            request.prompt_ids,
            request.stop,
            self._special_ids,
            skip_special_tokens=request.skip_special_tokens,
        )
        transcript = Transcript(index, request, text, own.stop_token_ids, sink)
        return Generation(request, transcript, self._loop, is_first=is_first)

    async def _start(self, arguments: AsyncEngineArgs) -> AsyncLLM:
        def statistics(config: Any, index: int) -> Statistics:
            self._statistics = Statistics(config, index)
            return self._statistics

        return processes.start(arguments, statistics)

    async def _run(self, one: Generation) -> None:
        """Run one request to its end, and send its last update."""
        error, one.task = one.cancelled, asyncio.current_task()
        try:
            if error is None:
                await self._generate(one)
        except asyncio.CancelledError:
            error = one.cancelled or self._open.stopped or EngineStoppedError(CLOSED)
        except JuiceError as own:
            error = own
        except EngineDeadError as dead:
            error = EngineStoppedError(f"vLLM failed: {dead}")
        except Exception as other:
            LOG.warning("a request failed in vLLM", exc_info=other)
            error = GenerationError(f"the request failed in vLLM: {other}")
        self._open.remove(one)
        with suppress(Exception):
            if error is None:
                one.transcript.complete()
            else:
                one.transcript.fail(error)

    async def _generate(self, one: Generation) -> None:
        prompt = TokensPrompt(prompt_token_ids=list(one.request.prompt_ids))
        number = next(self._numbers)
        for i, params in enumerate(watching_params(one.request)):
            async for output in self._llm.generate(prompt, params, f"{number}-watch-{i}"):
                one.watch(output)
        stops = one.transcript.stop_token_ids
        params = sampling_params(one.request, stops, is_first=one.is_first)
        async with aclosing(self._llm.generate(prompt, params, str(number))) as outputs:
            async for output in outputs:
                one.take(output)
                if one.is_done:
                    break
        self._check_form(one)

    def _check_form(self, one: Generation) -> None:
        """Raise RequestError for an answer that only stopped because no token could follow."""
        structure, ended = one.request.structure, one.transcript
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
