"""The pattern search over betas finds the top of a hill, and looks at few points."""

from __future__ import annotations

import math

import pytest

from juice.identification.tune import COARSE, FINE, Pair, climb


def hill(top: Pair, slant: float = 0.0):
    """Return values that fall with the distance from a top, on a log scale, and a list of calls."""
    looked: list[Pair] = []

    def height(pair: Pair) -> float:
        a, b = (
            math.log2(abs(x) + 0.1) - math.log2(abs(y) + 0.1)
            for x, y in zip(pair, top, strict=True)
        )
        return -(a * a + b * b + slant * a * b)

    def values(pairs):
        looked.extend(pairs)
        return [height(pair) for pair in pairs]

    return values, height, looked


TOPS = [(plus, -minus) for plus in FINE for minus in FINE]


@pytest.mark.parametrize("slant", [0.0, 1.2, -1.2])
def test_the_top_of_a_hill_is_found_wherever_it_is(slant: float) -> None:
    starts = [(1.0, -1.0), (1.0, -0.5)]
    for top in TOPS:
        values, height, looked = hill(top, slant)
        found = climb(values, dict(zip(starts, map(height, starts), strict=True)))
        assert found[0] == top
        assert len(set(looked)) == len(looked), "a pair was tried twice"
        assert not set(starts) & set(looked)
        assert sorted(found, key=height, reverse=True) == found
        assert all(plus in FINE and -minus in FINE for plus, minus in looked)


def test_few_points_are_looked_at() -> None:
    n_tried = []
    for top in TOPS:
        values, _, looked = hill(top)
        climb(values, {(1.0, -1.0): values([(1.0, -1.0)])[0]})
        n_tried.append(len(looked))
    assert max(n_tried) < len(FINE) ** 2 / 4
    assert set(COARSE) < set(FINE)


def test_a_sign_without_heads_is_not_varied_and_ties_go_to_the_gentler() -> None:
    values, height, looked = hill((0.0, -2.0))
    found = climb(values, {(0.0, -1.0): height((0.0, -1.0))})
    assert found[0] == (0.0, -2.0)
    assert all(plus == 0 for plus, _ in looked)
    flat = climb(lambda pairs: [1.0] * len(pairs), {(1.0, -1.0): 1.0})
    assert flat[0] == (0.0, 0.0)
