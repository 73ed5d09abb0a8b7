"""Intervals against scipy, and by how often they hold the truth."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest
from scipy.stats import binomtest

from juice.identification.outcomes import Z_LIKELY, difference_interval, share_interval


@pytest.mark.parametrize(("right", "n"), [(0, 1), (1, 1), (3, 20), (20, 20), (177, 300)])
def test_the_interval_of_a_share_is_wilsons(right: int, n: int) -> None:
    expected = binomtest(right, n).proportion_ci(method="wilson")
    values = [1.0] * right + [0.0] * (n - right)
    assert share_interval(values) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_groups_of_one_size_count_as_one_and_a_small_group_widens_the_interval() -> None:
    a, b = [1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]
    for interval in (share_interval, difference_interval):
        assert interval(a, b) == pytest.approx(interval(a + b))
        assert interval() is interval([]) is None
        small, large = interval([1.0, 0.0] * 50, [1.0, 0.0]), interval([1.0, 0.0] * 51)
        assert small[1] - small[0] > 3 * (large[1] - large[0])


@pytest.mark.parametrize(
    ("gains", "low", "high"),
    [
        ([0.0] * 20, -0.3, 0.0),  # no gain is no gain
        ([1.0], -1.0, 0.5),  # one example is no proof
        ([1.0] * 4, -0.1, 0.9),
        ([1.0] * 60, 0.8, 1.0),
        ([0.1, -0.1] * 30, -0.1, 0.0),
    ],
)
def test_the_interval_of_a_gain_does_not_collapse(
    gains: list[float], low: float, high: float
) -> None:
    lower, upper = difference_interval(gains)
    assert upper - lower > 0.04
    assert low <= lower <= fmean(gains) <= upper


@pytest.mark.parametrize("sizes", [(2,) * 6, (10,) * 6, (2, 2, 40, 40)])
@pytest.mark.parametrize("shares", [(0.95, 0.95), (0.5, 0.99), (0.8, 0.3)])
def test_nineteen_of_twenty_intervals_hold_the_truth(
    sizes: tuple[int, ...], shares: tuple[float, float]
) -> None:
    """Domains differ; two answers each are enough. A bootstrap would hold half of them."""
    rng = np.random.default_rng(0)
    rates = [shares[i % 2] for i in range(len(sizes))]
    n_draws, held, held_difference = 1000, 0, 0
    for _ in range(n_draws):
        one, other = (
            [(rng.random(n) < rate).astype(float) for n, rate in zip(sizes, rates, strict=True)]
            for _ in range(2)
        )
        low, high = share_interval(*(values.tolist() for values in one))
        held += low <= fmean(rates) <= high
        pairs = ((a - b).tolist() for a, b in zip(one, other, strict=True))
        low, high = difference_interval(*pairs)
        held_difference += low <= 0 <= high
    assert held / n_draws > 0.92
    assert held_difference / n_draws > 0.92


@pytest.mark.parametrize("n", [12, 48])
def test_what_is_no_better_seems_likely_better_once_in_ten(n: int) -> None:
    """Kills: half the interval, the upper end, the interval of 95 %."""
    rng = np.random.default_rng(0)
    draws = (rng.choice([-1.0, -0.5, 0.0, 0.5, 1.0], n).tolist() for _ in range(2000))
    likely = fmean(difference_interval(gains, z=Z_LIKELY)[0] > 0 for gains in draws)
    assert 0.05 < likely < 0.12
