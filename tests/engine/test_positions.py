"""Steering from a position on equals two uncached runs, the second steered from there."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from transformers import PreTrainedModel

from juice.engine.contract import Capability, Engine
from juice.errors import MissingCapabilityError
from tests.support import oracle
from tests.support.mixed import mixed_requests
from tests.support.running import assert_completes

TOLERANCE = 1e-4


def test_requests_are_steered_from_their_own_positions_on(
    engine: Engine, network: PreTrainedModel
) -> None:
    """Kills: a mask of another row, chunk or position, one that also hides new tokens, and keys
    that are taken from a cache of another first position.

    Every prompt comes with several first positions: the first token, some in the middle, the last.
    """
    rng, requests, expected = Random(8), [], []
    for request, heads, method in mixed_requests(seed=7, n=16):
        ids = list(request.prompt_ids)
        firsts = {0, len(ids) - 1, *(rng.randrange(len(ids)) for _ in range(2))}
        for first in sorted(firsts):
            steering = replace(request.steering, first_position=first)
            requests.append(request.with_steering(steering))
            expected.append(
                oracle.generate(
                    network, ids, heads, request.options.max_tokens, method=method, first=first
                )
            )
    differing = {each[1][0].sum().item() for each in expected}
    assert len(differing) > 30, "first positions must change what comes out"
    order = rng.sample(range(len(requests)), len(requests))
    done = engine.generate([requests[i] for i in order])
    for completion, i in zip(done, order, strict=True):
        assert_completes(completion, expected[i], TOLERANCE)


def test_requests_are_steered_to_a_position_and_by_a_schedule(
    engine: Engine, network: PreTrainedModel
) -> None:
    """Kills: an end that is one off, a schedule that counts from the prompt, whose last factor
    does not hold on, or that takes the factors of another row; prefill in chunks included.
    """
    rng, requests, expected = Random(9), [], []
    for request, heads, method in mixed_requests(seed=11, n=16):
        ids, n = list(request.prompt_ids), request.options.max_tokens
        first = rng.randrange(len(ids))
        last = rng.choice([None, rng.randrange(first, len(ids) + n)])
        schedule = tuple(rng.choice([0.0, 0.5, 2.0]) for _ in range(rng.choice([0, 1, 3])))

        def scale_of(at: int, given: tuple = (first, last, schedule, len(ids))) -> float:
            first, last, schedule, n_prompt = given
            if at < first or (last is not None and at >= last):
                return 0.0
            if not schedule or at < n_prompt:
                return 1.0
            return schedule[min(at - n_prompt, len(schedule) - 1)]

        steering = replace(
            request.steering, first_position=first, last_position=last, schedule=schedule
        )
        if Capability.ACTIVATIONS not in engine.capabilities:  # vLLM has no such table yet
            if (last is not None or schedule) and heads:
                with pytest.raises(MissingCapabilityError, match="schedule"):
                    engine.check(request.with_steering(steering))
            continue
        requests.append(request.with_steering(steering))
        expected.append(oracle.generate(network, ids, heads, n, method=method, scale_of=scale_of))
    for completion, each in zip(engine.generate(requests), expected, strict=True):
        assert_completes(completion, each, TOLERANCE)
