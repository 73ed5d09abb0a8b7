"""Which heads are chosen by their scores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import juice
from juice.errors import NoConsistentHeadError
from juice.head_set.scores import HeadScores
from juice.identification.find import chosen_heads


def test_the_filter_requires_every_type_above_zero_and_ties_go_to_the_lower_head() -> None:
    plus = torch.tensor([[[0.2, 0.1, 0.0], [0.3, -0.1, 0.1]], [[0.1, 0.2, 0.5], [-0.1, 0.9, 0.2]]])
    minus = torch.zeros(2, 2, 3)
    best, none = juice.select_heads(plus, minus, top_k=2)
    # L0H0, L0H1 and L1H2 all sum to 0.3; L0H2 has a zero, L1H0 and L1H1 a negative score.
    assert best == [(0, 0), (0, 1)]
    assert none == []


@given(st.integers(1, 6), st.integers(0, 2**31))
def test_selection_equals_a_slow_enumeration(top_k: int, seed: int) -> None:
    scores = torch.randint(-2, 4, (3, 3, 4), generator=torch.Generator().manual_seed(seed)).float()
    kept = [
        (h, sum(scores[j, h[0], h[1]].item() for j in range(3)))
        for h in [(a, b) for a in range(3) for b in range(4)]
        if all(scores[j, h[0], h[1]] > 0 for j in range(3))
    ]
    expected = []
    while kept and len(expected) < top_k:
        best = max(kept, key=lambda item: item[1])  # the first of equals
        kept.remove(best)
        expected.append(best[0])
    assert juice.select_heads(scores, -scores, top_k=top_k)[0] == expected


def test_the_error_without_a_head_of_either_sign_suggests_what_to_try() -> None:
    empty = HeadScores(
        target="context",
        conflict_types=("substitution",),
        plus=torch.zeros(1, 2, 2),
        minus=torch.zeros(1, 2, 2),
    )
    with pytest.raises(NoConsistentHeadError, match=r"gentler alphas .* more examples"):
        chosen_heads(empty, 5)
