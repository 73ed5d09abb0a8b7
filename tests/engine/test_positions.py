"""Steering from a position on equals two uncached runs, the second steered from there."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from transformers import PreTrainedModel

from juice.engine.contract import Engine
from juice.engine.steer import FirstGenerated, Steer
from juice.steered_model import SteeredModel
from tests.support import oracle, tiny
from tests.support.mixed import mixed_requests, scale_at
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
    does not hold on, or that takes the factors of another row; prefill in chunks included, and
    keys that are taken from a cache of another end, schedule or prompt.
    """
    rng, requests, expected = Random(9), [], []
    for request, heads, method in mixed_requests(seed=11, n=16):
        ids, n = list(request.prompt_ids), request.options.max_tokens
        first = rng.randrange(len(ids))
        last = rng.choice([None, rng.randrange(first, len(ids) + n)])
        schedule = tuple(rng.choice([0.0, 0.5, 2.0]) for _ in range(rng.choice([0, 1, 3])))

        steering = replace(
            request.steering, first_position=first, last_position=last, schedule=schedule
        )
        requests.append(request.with_steering(steering))
        scale_of = partial(scale_at, steering, n_prompt=len(ids))
        expected.append(oracle.generate(network, ids, heads, n, method=method, scale_of=scale_of))
    for completion, each in zip(engine.generate(requests), expected, strict=True):
        assert_completes(completion, each, TOLERANCE)


NAMES = ("all", "question", "last", "generated", "first 1", "first 3")


def is_steered(name: str, at: int, n: int, question_at: int) -> bool:
    """Return what a name says of a position, of a prompt of n tokens."""
    if name == "question":
        return at >= question_at
    if name == "last":
        return at >= n - 1
    most = int(name[6:]) if name.startswith("first ") else math.inf
    return name == "all" or n <= at < n + most


def test_requests_bring_heads_positions_and_schedules_of_their_own(
    model: SteeredModel, network: PreTrainedModel
) -> None:
    """Kills: positions that are one off, a schedule that begins late or is not the prompt's first,
    heads or signs of another request, and a cache that takes one for another.

    All kinds are drawn, and run together.
    """
    rng, requests, expected = Random(5), [], []
    for i, (drawn, heads, method) in enumerate(mixed_requests(seed=3, n=24)):
        ids, n = drawn.prompt_ids, drawn.options.max_tokens
        name = NAMES[i % len(NAMES)]
        question_at = rng.randrange(len(ids))
        strengths = tuple(rng.choice([0.0, 0.5, 1.0, 2.0]) for _ in range(rng.choice([1, 2, 4])))
        given: dict[str, Any] = {"target": "none"}
        if heads:
            n_first = name.removeprefix("first ")
            positions = {"first_n_generated": int(n_first)} if n_first != name else name
            given = {
                "coefficients": [(*head, beta) for head, beta in heads.items()],
                "method": method,
                "positions": positions,
                "strength": strengths if len(strengths) > 1 else strengths[0],
            }
            if i % 2:  # one beta for each sign
                heads = {head: 2.0 if beta > 0 else -1.0 for head, beta in heads.items()}
                plus, minus = (
                    [head for head, beta in heads.items() if beta == each] for each in (2.0, -1.0)
                )
                del given["coefficients"]
                given |= {"target": "context", "heads": {"plus": plus, "minus": minus}}
                given |= {"beta_plus": 2.0, "beta_minus": -1.0}

        def scale_of(at: int, given: tuple = (name, len(ids), question_at, strengths)) -> float:
            name, n, q, strengths = given
            strength = strengths[min(max(0, at - n + 1), len(strengths) - 1)]
            return strength if is_steered(name, at, n, q) else 0.0

        options = {"question_at": question_at, "max_tokens": n, "ignore_eos": True}
        watch = tuple(range(tiny.VOCAB_SIZE))
        requests.append(model.request(ids, steer=Steer(**given), watch=watch, **options))
        expected.append(
            oracle.generate(network, [*ids], heads, n, method=method, scale_of=scale_of)
        )
    for completion, each in zip(model.engine.generate(requests), expected, strict=True):
        assert_completes(completion, each, TOLERANCE)


def test_the_report_says_what_was_given(model: SteeredModel) -> None:
    """The name of heads in a request is the hash of their coefficients, however they are given."""
    ids = [3, 5, 7]
    by_sign = Steer(
        target="context",
        heads={"plus": [(1, 2)], "minus": [[2, 0]]},
        beta_plus=2,
        beta_minus=-1.0,
        positions={"first_n_generated": 2},
        strength=[1, 0.5],
    )
    alone = Steer(coefficients=[[2, 0, -1], [1, 2, 2.0]], method="june")
    other = Steer(coefficients=[[2, 0, -1], [1, 3, 2.0]])
    reports = [one.steering for one in model.generate([ids] * 3, steer=[by_sign, alone, other])]
    assert reports[0].head_set == reports[1].head_set != reports[2].head_set
    assert reports[0].head_set.startswith("inline:")
    assert [one.target for one in reports] == ["context", None, None]
    assert [one.method for one in reports] == ["juice", "june", "juice"]
    assert [one.n_heads for one in reports] == [2, 2, 2]
    assert reports[0].positions == FirstGenerated(first_n_generated=2)
    assert reports[0].strength == (1, 0.5)
    assert all(one.applied for one in reports)
