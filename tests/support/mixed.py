"""Requests that differ in length, heads, betas and method, for batches that mix them."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import torch

from juice.engine.request import Request
from juice.engine.steer import Steering, SteeringReport
from tests.support import tiny

# fp32, logits of order 10: differences come from the order of sums in batched matrix products.
TOLERANCE = 1e-5


def steering(heads: Mapping[tuple[int, int], float], method: str = "juice") -> Steering:
    coefficients: dict[int, torch.Tensor] = {}
    for (layer, head), beta in heads.items():
        coefficients.setdefault(layer, torch.zeros(tiny.N_HEADS))[head] = beta
    report = SteeringReport(
        applied=True,
        target="context",
        head_set="test",
        beta_plus=0,
        beta_minus=0,
        strength=1,
        method=method,
        n_heads=len(heads),
    )
    return Steering(coefficients=coefficients, report=report)


def scale_at(steering: Steering, at: int, n_prompt: int) -> float:
    """Return the factor of a steering's coefficients at a token, by what its fields say."""
    first, last, schedule = steering.first_position, steering.last_position, steering.schedule
    if at < first or (last is not None and at >= last):
        return 0.0
    if not schedule:
        return 1.0
    n_generated = max(0, at - n_prompt + 1)  # the prompt takes the first factor
    return schedule[min(n_generated, len(schedule) - 1)]


def mixed_requests(
    seed: int, n: int = 12
) -> list[tuple[Request, dict[tuple[int, int], float], str]]:
    """Return requests, each with its heads {(layer, head): beta} and method; some are unsteered.

    Every token's log-probability is watched.
    """
    rng, made = Random(seed), []
    for i in range(n):
        method = ("juice", "june", "none", "juice")[i % 4]
        n_heads = rng.randint(1, 5) if method != "none" else 0
        heads = {
            (rng.randrange(tiny.N_LAYERS), rng.randrange(tiny.N_HEADS)): rng.choice(
                [-3, -1, 0.5, 2]
            )
            for _ in range(n_heads)
        }
        ids = tuple(rng.randrange(1, tiny.VOCAB_SIZE) for _ in range(rng.choice([1, 2, 5, 13, 27])))
        steered = {} if method == "none" else {"steering": steering(heads, method)}
        request = Request.of(
            prompt_ids=ids,
            max_tokens=rng.choice([1, 4, 12]),
            ignore_eos=True,
            watch=tuple(range(tiny.VOCAB_SIZE)),
            **steered,
        )
        made.append((request, heads, "juice" if method == "none" else method))
    return made
