"""Patches of vLLM 0.32 and 0.33, for steering beside its caches, sampler and CPU worker.

The scheduler: cached keys and values depend on how their request is steered, so the salt of a
request's blocks holds its coefficients. It is set where requests join, whoever sent them; unsteered
requests keep theirs, and share with each other. A request whose gate said no goes before all that
wait: it has waited already.

Requests: coefficients of heads that the workers do not have would end them, or be left out. Such a
request ends alone, with an error, before it is queued.

Alternatives beside watched tokens: vLLM's V1 sampler scores either the tokens that a request names
or the likeliest ones, for the whole step; where one request names some, the others get none but the
sampled token. Here each gets what it asked for.

Seeded requests on CPUs: a part of a prompt that is not its last samples a token that nobody wants.
vLLM takes back what the request's generator drew by its offset, and generators on CPUs have none,
which ends the worker. Here such a draw is taken back by the generator's state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.request import Request
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from juice.engine.request import MAX_TOP_LOGPROBS
from juice.engine.vllm.arguments import FIRST, Coefficients, Layers

_gather = Sampler.gather_specific_token_logprobs


def score_both() -> None:
    """Change the sampler of this process."""
    Sampler.gather_specific_token_logprobs = _gather_both


def _gather_both(
    self: Sampler,
    logprobs: torch.Tensor,
    logprob_token_ids: dict[int, list[int]],
    sampled: torch.Tensor,
) -> LogprobsTensors | None:
    """Return the scores of each row's named tokens, or of its likeliest.

    logprobs: float32 [rows, vocabulary]; sampled: int64 [rows]. The result has the sampled token in
    its first column.
    """
    named = _gather(self, logprobs, logprob_token_ids, sampled)
    others = [row for row in range(len(logprobs)) if row not in logprob_token_ids]
    if named is None or not others:
        return named
    n_best = min(MAX_TOP_LOGPROBS, logprobs.shape[1])
    missing = max(0, 1 + n_best - named.logprobs.shape[1])
    ids = pad(named.logprob_token_ids, (0, missing))
    scores = pad(named.logprobs, (0, missing), value=float("-inf"))
    best, tokens = logprobs[others].topk(n_best)
    ids[others, 1 : 1 + n_best] = tokens.to(ids.dtype)
    scores[others, 1 : 1 + n_best] = best
    return named._replace(logprob_token_ids=ids, logprobs=scores)


_sample, _bookkeeping_sync = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync


def take_back_by_state() -> None:
    """Change the model runner of this process, which must be on a CPU."""
    GPUModelRunner._sample = _sample_and_take_back
    GPUModelRunner._bookkeeping_sync = _bookkeeping_sync_of_others


def _sample_and_take_back(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    states = {generator: generator.get_state() for generator in _discarded(self).values()}
    try:
        return _sample(self, *args, **kwargs)
    finally:
        for generator, state in states.items():
            generator.set_state(state)


def _bookkeeping_sync_of_others(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    generators, discarded = self.input_batch.generators, _discarded(self)
    for row in discarded:
        del generators[row]
    try:
        return _bookkeeping_sync(self, *args, **kwargs)
    finally:
        generators |= discarded


def _discarded(runner: GPUModelRunner) -> dict[int, torch.Generator]:
    """Return the generators of the rows whose sampled token is not wanted."""
    is_discarded = runner.discard_request_mask.np
    return {
        row: generator
        for row, generator in runner.input_batch.generators.items()
        if is_discarded[row]
    }


class SaltingScheduler(Scheduler):
    """vLLM's scheduler, with salts."""

    def add_request(self, request: Request) -> None:
        """Salt the request's blocks with its coefficients, and queue it."""
        params = request.sampling_params
        coefficients = Coefficients.read(params.extra_args) if params else None
        if coefficients is not None:
            request.cache_salt = f"{request.cache_salt or ''}:{coefficients.cache_key()}"
            request.block_hashes.clear()
            request.update_block_hashes()
        super().add_request(request)
        if params and (params.extra_args or {}).get(FIRST):
            self.waiting.remove_request(request)
            self.waiting.prepend_request(request)


class SaltingAsyncScheduler(SaltingScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler, with salts."""


_preprocess_add_request = EngineCore.preprocess_add_request


def refuse_unknown_heads() -> None:
    """Change the requests of this process, which must be the scheduler's."""
    EngineCore.preprocess_add_request = _check_and_preprocess


def _check_and_preprocess(self: EngineCore, request: EngineCoreRequest) -> tuple[Request, int]:
    """Raise what vLLM turns into the error of this request alone."""
    params = request.sampling_params
    coefficients = Coefficients.read(params.extra_args) if params else None
    if coefficients is not None:
        layers = Layers.of(self.vllm_config) or Layers()
        layers.check_coefficients(coefficients, most_heads(self.vllm_config))
    return _preprocess_add_request(self, request)


def most_heads(vllm_config: VllmConfig) -> int:
    """Return the heads of a layer, of the one with the most where a configuration lists them."""
    n_heads: int | list[int] = vllm_config.model_config.hf_text_config.num_attention_heads
    return max(n_heads) if isinstance(n_heads, list) else n_heads


def salting_scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> SaltingScheduler:
    """Return the scheduler that vLLM would take itself, with salts."""
    refuse_unknown_heads()
    is_async = vllm_config.scheduler_config.async_scheduling
    return (SaltingAsyncScheduler if is_async else SaltingScheduler)(vllm_config, *args, **kwargs)
