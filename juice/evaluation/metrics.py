"""The numbers of an evaluation, from verdicts and probabilities alone, without a model.

    accuracy            share of right answers, by the paper's rule (juice.data.judging)
    context reliance    M_C = p_context / (p_context + p_parametric) at a prompt's last position
    repetition          share of a text's n-grams that occurred earlier in it

Source of M_C: Goyal et al., "Context-Parametric Inversion" (2024), equation 14.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

N_GRAM = 3


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN without values, which no table shows as a number."""
    return sum(values) / len(values) if values else math.nan


def context_reliance(p_context: float, p_parametric: float) -> float | None:
    """Return M_C of one prompt; None where both probabilities are 0."""
    total = p_context + p_parametric
    return p_context / total if total > 0 else None


def repetition(tokens: Sequence[int]) -> float:
    """Return the share of n-grams that occurred earlier; 0 for a text with fewer than two."""
    grams = list(zip(*(tokens[i:] for i in range(N_GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def overlap(one: Sequence[object], other: Sequence[object]) -> float | None:
    """Return the Jaccard index of two sets, |A and B| / |A or B|; None where both are empty."""
    a, b = set(one), set(other)
    return len(a & b) / len(a | b) if a | b else None
