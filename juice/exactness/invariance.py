"""The check of deterministic mode at load: a request gets the same bits alone and in a batch.

Requests of several lengths, steered and not, run one after another and then all at once, with rows
that join and leave. Tokens and log-probabilities must be equal, not close.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from juice.engine import Completion, Engine, GenerationRequest, Steering, SteeringReport
from juice.engine.steering import unsteered
from juice.errors import UnsupportedModelError

# The tokens of each prompt and of its answer; each second one is steered.
LENGTHS = ((12, 6), (3, 9), (33, 4), (5, 8), (1, 7), (18, 5), (2, 9), (7, 3))


def check_invariance(engine: Engine) -> None:
    """Raise UnsupportedModelError where neighbours change what a request gets.

    It shows that an engine's claim is false, never that it is true: kernels may differ at lengths
    that were not tried.
    """
    requests = _requests(engine)
    alone = [engine.generate([request])[0] for request in requests]
    for one, other in zip(alone, engine.generate(requests), strict=True):
        if bits(one) != bits(other):
            raise UnsupportedModelError(
                f"deterministic: {engine.description.identity.id} gets other numbers in a batch"
                f" than alone on the engine {engine.name!r}; leave deterministic out, or choose the"
                ' engine "own"'
            )


def bits(completion: Completion) -> tuple[Sequence[int], Sequence[float | None]]:
    """Return what must be equal: the tokens, and their log-probabilities."""
    return completion.token_ids, completion.logprobs


def _requests(engine: Engine) -> list[GenerationRequest]:
    own, heads = engine.description, engine.description.heads_per_layer
    window = engine.companion_layers(_steering({0: heads[0], len(heads) - 1: heads[-1]}))
    steered = {layer: heads[layer] for layer in {*window[:1], *window[-1:]}}
    return [
        GenerationRequest(
            prompt_ids=tuple((7 * j + 5 * i + 1) % own.vocabulary_size for j in range(length)),
            max_tokens=n_new,
            ignore_eos=True,
            steering=_steering(steered) if i % 2 and steered else unsteered(),
        )
        for i, (length, n_new) in enumerate(LENGTHS)
    ]


def _steering(n_heads: dict[int, int]) -> Steering:
    coefficients = {layer: torch.linspace(-1, 1, n) for layer, n in sorted(n_heads.items())}
    report = SteeringReport(
        applied=True, target="context", beta_plus=1.0, strength=1.0, n_heads=len(coefficients)
    )
    return Steering(coefficients=coefficients, report=report)
