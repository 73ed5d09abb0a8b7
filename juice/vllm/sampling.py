"""A request of ours in vLLM's terms."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, RequestOutputKind

from juice.engine import GenerationRequest
from juice.vllm.arguments import FIRST, KEY, STRUCTURE, Coefficients
from juice.vllm.structures import to_text

MAX_SEED = 2**63 - 1


def sampling_params(
    request: GenerationRequest, stop_token_ids: frozenset[int], *, is_first: bool = False
) -> SamplingParams:
    """Return what vLLM needs to know of a request.

    Text and stop strings are not vLLM's business: `juice.engine.text` makes the same text of the
    same tokens in every engine.

    Args:
        request: The request.
        stop_token_ids: All tokens that end it, the model's own among them unless it ignores these.
        is_first: Whether it goes before all that wait.
    """
    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(0, sampling.top_k),
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        seed=None if sampling.seed is None else sampling.seed & MAX_SEED,
        max_tokens=max(1, request.max_tokens),  # none at all is not possible in vLLM
        min_tokens=request.min_tokens,
        stop_token_ids=sorted(stop_token_ids),
        ignore_eos=True,
        logprobs=request.top_logprobs,
        prompt_logprobs=request.top_logprobs if request.prompt_logprobs else None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=_extra_args(request, stop_token_ids, is_first=is_first),
    )


def watching_params(request: GenerationRequest) -> list[SamplingParams]:
    """Return what scores the tokens that a request watches, after its prompt.

    vLLM scores so many tokens at a time.
    """
    watched, n = list(dict.fromkeys(request.watch)), MAX_LOGPROB_TOKEN_IDS
    return [_scoring(request, watched[i : i + n]) for i in range(0, len(watched), n)]


def _scoring(request: GenerationRequest, tokens: list[int]) -> SamplingParams:
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
    request: GenerationRequest, stop_token_ids: frozenset[int], *, is_first: bool
) -> dict[str, Any] | None:
    own: dict[str, Any] = {FIRST: True} if is_first else _steering(request) or {}
    if request.structure is not None:
        own[STRUCTURE] = to_text(request.structure, stop_token_ids)
    return own or None


def _steering(request: GenerationRequest) -> dict[str, Any] | None:
    coefficients = Coefficients.of(request.steering)
    return None if coefficients is None else {KEY: coefficients.to_json()}
