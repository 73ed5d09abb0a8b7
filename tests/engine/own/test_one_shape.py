"""Without deterministic mode: what neighbours do cannot be seen, only how many and where they are.

In batches of one shape, at one place, a request gets the same bits whatever its neighbours' tokens,
heads, betas and sampling are.
"""

from __future__ import annotations

from random import Random

import pytest
import torch

from juice.engine.request import Request
from juice.steered_model import SteeredModel
from tests.support import tiny
from tests.support.mixed import steering
from tests.support.running import loaded

N_ROWS, N_TOKENS, PLACE = 8, 12, 3


def request(rng: Random, *, is_steered: bool, length: int = 20) -> Request:
    """Return a request whose rows are as many and as long as those of any other."""
    heads = {(layer, rng.randrange(tiny.N_HEADS)): rng.choice([-3, -1, 0.5, 2]) for layer in (1, 2)}
    return Request.of(
        prompt_ids=tuple(rng.randrange(1, 283) for _ in range(length)),
        max_tokens=N_TOKENS,
        ignore_eos=True,
        temperature=rng.choice([0, 1.5]),
        seed=rng.randrange(99),
        **({"steering": steering(heads)} if is_steered else {}),
    )


def among(
    model: SteeredModel, given: Request, seed: int, *, is_steered: bool, place: int = PLACE
) -> tuple[object, ...]:
    """Return the bits that a request gets at a place among random neighbours of its own shape."""
    rng = Random(seed)
    batch = [request(rng, is_steered=is_steered) for _ in range(N_ROWS - 1)]
    batch.insert(place, given)
    completion = model.engine.generate(batch)[place]
    return completion.token_ids, completion.logprobs


@pytest.mark.parametrize("is_steered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_neighbours_of_one_shape_change_no_bit(
    shape: str, dtype: torch.dtype, is_steered: bool
) -> None:
    """Kills: a companion read from another row, and anything else that mixes rows."""
    with loaded(shape, dtype=dtype) as model:
        observed = request(Random(0), is_steered=is_steered)
        first, *others = (
            among(model, observed, seed, is_steered=is_steered) for seed in range(1, 6)
        )
        assert all(bits == first for bits in others)


def test_another_shape_or_place_may_change_them() -> None:
    """The control, and the reason for deterministic mode."""
    with loaded("llama") as model:
        observed = request(Random(0), is_steered=False)
        alone = model.engine.generate([observed])[0]
        places = {
            among(model, observed, 1, is_steered=False, place=place) for place in range(N_ROWS)
        }
        assert len({(alone.token_ids, alone.logprobs), *places}) > 1
