"""The check at every start: what vLLM serves is what the two runs give, steered and not.

Prompts of different lengths run together: unsteered, one head in each layer of the window, all
these at once, by either method. They begin alike, so that what is cached under a wrong key would be
shared; some are longer than a step, others end early so that rows move, and all are preempted once.
Then every rank runs each whole sequence by the definition, in two runs of the same modules without
a cache (`juice.vllm.reference`). The log-probabilities of the chosen tokens and of the likeliest
ones must agree, to a small part of what steering changes in them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import torch

from juice.engine import Completion, GenerationRequest, Steering, SteeringReport
from juice.engine.request import MAX_TOP_LOGPROBS
from juice.engine.steering import unsteered
from juice.errors import UnsupportedModelError
from juice.methods import SteerMethod
from juice.model.differences import distance, largest
from juice.vllm.arguments import Coefficients

LOG = logging.getLogger("juice.vllm")
# Heads are scaled by more until what every request's steering changes is far above rounding, but
# not so much that a layer sees little else: then a wrong scale or a missing token changes nothing.
COEFFICIENTS = (2.0, 4.0, 8.0)
FAR = 20
# The largest difference between served and defined, as a share of what steering changes. Rounding
# is at most 3 % at twenty times itself; of the mistakes in the tests, the least is 13 %.
SHARE = 0.08
# In nats, by dtype, as for our own engine.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.1}


def requests_for(
    window: range,
    n_heads: int,
    vocabulary_size: int,
    n_most: int,
    n_shared: int,
    coefficient: float,
) -> list[GenerationRequest]:
    """Return the requests of the check.

    Args:
        window: The layers in which heads are steered.
        n_heads: The heads of each.
        vocabulary_size: The tokens to write prompts of.
        n_most: The length of the longest prompt.
        n_shared: How many tokens prompts share at their beginning, where they are longer.
        coefficient: What each head is scaled by.
    """
    heads = {layer: (7 * layer + 3) % n_heads for layer in window}
    steered: list[tuple[dict[int, list[int]], SteerMethod]] = [
        ({layer: [head] for layer, head in heads.items()}, "june"),
        *(({layer: [head]}, "juice") for layer, head in heads.items()),
        ({layer: [head, 0] for layer, head in heads.items()}, "juice"),
    ]
    steerings = [
        unsteered(),
        *(one_steering(own, n_heads, coefficient, method) for own, method in steered if own),
        unsteered(),
    ]
    requests = []
    for i, steering in enumerate(steerings):
        n = min(n_most, n_most if i == 1 else (i % 2) * n_shared + 3 + (11 * i) % 37)
        ids = tuple(
            (7 * j + (13 * i if j >= n_shared else 0) + 5) % vocabulary_size for j in range(n)
        )
        requests.append(
            GenerationRequest(
                prompt_ids=ids,
                max_tokens=2 + 3 * (i % 3),
                ignore_eos=True,
                steering=steering,
                top_logprobs=min(MAX_TOP_LOGPROBS, vocabulary_size),
            )
        )
    return requests


def one_steering(
    heads: dict[int, list[int]], n_heads: int, coefficient: float, method: SteerMethod
) -> Steering:
    """Return a steering of some heads, by layer."""
    coefficients = {layer: torch.zeros(n_heads) for layer in heads}
    for layer, own in heads.items():
        coefficients[layer][own] = coefficient
    report = SteeringReport(
        applied=True, target="context", beta_plus=coefficient, strength=1.0, method=method
    )
    return Steering(coefficients=coefficients, report=report)


async def run_preempted(engine: Any, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """Run requests together and preempt all of them once; return their completions.

    Between pipeline stages steps are in flight, of which vLLM can preempt nothing.
    """
    done: dict[int, Completion] = {}
    was_preempted = engine.facts["n_stages"] > 1
    async for update in engine.astream(requests):
        if update.completion is not None:
            done[update.index] = update.completion
        elif not was_preempted:
            was_preempted = True
            await asyncio.wrap_future(engine.preempt())
    return [done[i] for i in range(len(requests))]


def verify(engine: Any) -> dict[str, float]:
    """Return the largest differences between what is served and the two runs, in nats.

    Raises UnsupportedModelError where they are too large, or where steering changes too little to
    be seen.
    """
    name = engine.description.identity.architecture
    bound = TOLERANCES.get(engine.description.dtype, TOLERANCES["bfloat16"])
    for coefficient in COEFFICIENTS:
        found = measured(engine, coefficient)
        LOG.info("the check at the start: %s", found)
        if found["least_effect"] >= FAR * found["unsteered"]:
            break
    if found["unsteered"] <= bound and found["steered"] <= bound and found["share"] <= SHARE:
        return found
    raise UnsupportedModelError(
        f"{name} is not steered exactly in vLLM: log-probabilities differ from those of two runs "
        f"by {found['steered']:.2g} steered, {found['share']:.0%} of what steering changes, and by "
        f"{found['unsteered']:.2g} unsteered; at most {SHARE:.0%} and {bound:g} are allowed: "
        "load it with --dtype float32, try --vllm-arg enforce_eager=true, or serve it with "
        "--engine own"
    )


def measured(engine: Any, coefficient: float) -> dict[str, float]:
    """Return how far the requests of the check are from the two runs, in nats.

    `steered` and `unsteered` are the largest differences, `least_effect` is the least that steering
    changes in a request; `share` is the largest difference as a share of its own request's effect.
    """
    own, limits, n_shared = engine.description, engine.limits, engine.facts["block_size"]
    n_most = max(limits.max_prefill_tokens + 5, n_shared + 40)
    requests = requests_for(
        engine.window,
        min(own.heads_per_layer),
        own.vocabulary_size,
        max(8, min(n_most, limits.max_model_len - 16)),
        n_shared,
        coefficient,
    )
    completions = asyncio.run(run_preempted(engine, requests))
    unsteered_errors, errors, effects, shares = [0.0], [0.0], [float("inf")], [0.0]
    for request, completion in zip(requests, completions, strict=True):
        tokens = [*request.prompt_ids, *completion.token_ids]
        read = [[own.id, *(i for i, _ in own.top)] for own in completion.tokens]
        served = torch.tensor(
            [[own.logprob, *(logprob for _, logprob in own.top)] for own in completion.tokens]
        )
        coefficients = Coefficients.of(request.steering)
        plain = engine.two_runs(tokens, None, read)
        if coefficients is None:
            unsteered_errors.append(_farthest(served, plain))
            continue
        steered = engine.two_runs(tokens, coefficients, read)
        errors.append(_farthest(served, steered))
        effects.append(_farthest(steered, plain))
        shares.append(errors[-1] / max(1e-9, effects[-1]))
    return {
        "unsteered": largest(unsteered_errors),
        "steered": largest(errors),
        "share": largest(shares),
        "least_effect": min(effects),
        "coefficient": coefficient,
    }


def _farthest(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest distance over the tokens, from log-probabilities [tokens, read]."""
    return largest(distance(a, b) for a, b in zip(one, other, strict=True))
