"""In deterministic mode a request gets the same bits whatever runs beside it.

Equal means equal: tokens, log-probabilities, alternatives and what is watched.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from juice.checks.two_runs import check_invariance
from juice.engine.answer import Completion
from juice.engine.load_options import Limits
from juice.engine.own import scheduler as scheduling
from juice.engine.own.batch import Mode
from juice.engine.own.thread import BatchingEngine
from juice.engine.request import Request
from juice.errors import UnsupportedModelError
from tests.support import oracle, tiny
from tests.support.mixed import TOLERANCE, mixed_requests
from tests.support.running import assert_completes, loaded, random_request

N_NEIGHBOURS = 8
LONG = 70  # tokens of prompts that take several chunks below
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Each shape and each dtype once in `make test`, and all pairs in `make test-long`.
SHAPES_AND_DTYPES = [
    pytest.param(shape, dtype, marks=() if i == j else pytest.mark.long, id=f"{shape}-{dtype}")
    for i, shape in enumerate(tiny.SHAPES)
    for j, dtype in enumerate(DTYPES)
]


def everything(completion: Completion) -> tuple[object, ...]:
    """Return all numbers of a completion."""
    return (
        completion.token_ids,
        completion.logprobs,
        [token.top for token in completion.tokens],
        completion.watched,
        [(token.id, token.logprob) for token in completion.prompt_tokens],
    )


def watched(request: Request, rng: Random) -> Request:
    """Return a request that is looked at as closely as possible."""
    looked_at = request.with_options(
        prompt_logprobs=request.contrast is None, top_logprobs=5, watch=(1, 2, 3)
    )
    prompt_ids = tuple(rng.randrange(1, 283) for _ in range(rng.choice([1, 9, LONG])))
    return replace(looked_at, prompt_ids=prompt_ids)


def n_changed(engine: BatchingEngine, n_requests: int, seed: int) -> int:
    """Return how many requests get other numbers among random neighbours than alone."""
    rng, n = Random(seed), 0
    for _ in range(n_requests):
        request = watched(random_request(rng), rng)
        alone = engine.generate([request])[0]
        neighbours = [random_request(rng) for _ in range(N_NEIGHBOURS)]
        place = rng.randrange(N_NEIGHBOURS)
        among = engine.generate([*neighbours[:place], request, *neighbours[place:]])[place]
        n += everything(alone) != everything(among)
    return n


# Fewer rows than neighbours, so that some join as others leave; prompts in several chunks.
LIMITS = Limits(max_batch=5, max_prefill_tokens=40)


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "FIXED_CHUNK", 16)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(("shape", "dtype"), SHAPES_AND_DTYPES)
def test_a_request_gets_the_same_bits_alone_and_among_random_neighbours(
    shape: str, dtype: torch.dtype
) -> None:
    """Kills: two requests in one forward, chunks that shrink when others prefill.

    Keys and values are read as copies, for their strides; reading them in place passes, too, on the
    processors where this was tried.
    """
    model = loaded(shape, dtype=dtype).loaded
    engine = BatchingEngine(model, LIMITS, deterministic=True)
    assert n_changed(engine, n_requests=6, seed=1) == 0


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("mode", [Mode(full_rows=True), Mode(own_masks=True)], ids=str)
def test_it_holds_in_the_other_modes(mode: Mode) -> None:
    engine = BatchingEngine(loaded("gpt2").loaded, LIMITS, mode, deterministic=True)
    assert n_changed(engine, n_requests=6, seed=2) == 0


def test_without_it_neighbours_do_change_bits() -> None:
    """The control: the tests above would see a difference."""
    engine = BatchingEngine(loaded("llama").loaded, LIMITS)
    assert n_changed(engine, n_requests=6, seed=1) > 3


def test_a_chunk_that_depends_on_neighbours_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control for prefill alone: every request still has forwards of its own."""

    def shared(_self: object, prefilling: list, _budget: float) -> list:
        return [
            (each, min(each.n_to_prefill, max(1, 30 // len(prefilling)))) for each in prefilling
        ]

    monkeypatch.setattr(scheduling.Scheduler, "fixed_chunks", shared)
    engine = BatchingEngine(loaded("llama").loaded, LIMITS, deterministic=True)
    assert n_changed(engine, n_requests=6, seed=1) > 0


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_it_is_as_exact_as_ever(shape: str) -> None:
    network = tiny.tiny_model(shape)
    mixed = mixed_requests(seed=1)
    expected = [
        oracle.generate(
            network, list(each.prompt_ids), heads, each.options.max_tokens, method=method
        )
        for each, heads, method in mixed
    ]
    engine = BatchingEngine(loaded(shape).loaded, LIMITS, deterministic=True)
    for completion, item in zip(
        engine.generate([each for each, _, _ in mixed]), expected, strict=True
    ):
        assert_completes(completion, item, TOLERANCE)


def test_the_check_at_load_refuses_an_engine_that_is_not_what_it_claims() -> None:
    model = loaded("llama").loaded
    check_invariance(BatchingEngine(model, deterministic=True))
    with pytest.raises(UnsupportedModelError, match="gets other numbers in a batch than alone"):
        check_invariance(BatchingEngine(model))
