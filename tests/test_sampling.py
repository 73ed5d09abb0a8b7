"""Sampling against an obvious count of what each filter leaves."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from juice.engine.sampling import Sampling, choose
from juice.errors import RequestError

LOGITS = torch.tensor([2.0, -1.0, 3.0, 0.5, 2.5])


def drawn(n: int = 4000, **options: float) -> Counter[int]:
    sampling = Sampling(seed=0, **options)
    generator = sampling.new_generator()
    return Counter(choose(LOGITS, sampling, generator) for _ in range(n))


def test_temperature_zero_takes_the_likeliest() -> None:
    assert choose(LOGITS, Sampling(), Sampling().new_generator()) == 2


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_probabilities(temperature: float) -> None:
    """4,000 draws: a standard error below 0.008, so 0.04 is five of them."""
    counts = drawn(temperature=temperature)
    expected = (LOGITS.double() / temperature).softmax(-1)
    for token, probability in enumerate(expected.tolist()):
        assert abs(counts[token] / 4000 - probability) < 0.04


def test_top_k_and_top_p_leave_only_the_likeliest() -> None:
    assert set(drawn(temperature=1.0, top_k=2)) == {2, 4}
    probabilities = LOGITS.softmax(-1)
    assert probabilities[2] < 0.6 < probabilities[2] + probabilities[4]
    assert set(drawn(temperature=1.0, top_p=0.6)) == {2, 4}
    assert set(drawn(temperature=1.0, top_p=1e-9)) == {2}


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1), ("seed", 2**64)],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        Sampling(**{field: value})
    assert caught.value.param == field
