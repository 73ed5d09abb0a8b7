"""The numbers of an evaluation, from verdicts and probabilities alone, without a model.

    accuracy            share of right answers, by the paper's rule (juice.data.judging)
    context reliance    M_C = p_context / (p_context + p_parametric) at a prompt's last position
    repetition          share of a text's n-grams that occurred earlier in it
    interval            95 % bootstrap interval of the mean (scipy, percentile method, seeded)

Source of M_C: Goyal et al., "Context-Parametric Inversion" (2024), equation 14.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

LEVEL = 0.95
N_RESAMPLES = 1000
N_GRAM = 3


class Interval(NamedTuple):
    """A confidence interval of a mean."""

    low: float
    high: float


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN without values, which no table shows as a number."""
    return sum(values) / len(values) if values else math.nan


def interval(values: Sequence[float], seed: int) -> Interval | None:
    """Return the bootstrap interval of the mean; None for fewer than two values.

    The interval has no width where all values are the same.
    """
    return interval_of_groups([values], seed)


def interval_of_groups(groups: Sequence[Sequence[float]], seed: int) -> Interval | None:
    """Return the bootstrap interval of the mean of the groups' means.

    Each group is resampled within itself. None where every group has at most one value.
    """
    given = [values for values in groups if values]
    if not given or max(map(len, given)) < 2:
        return None
    if all(min(values) == max(values) for values in given):
        middle = sum(values[0] for values in given) / len(given)
        return Interval(middle, middle)
    import numpy as np
    from scipy.stats import bootstrap

    def mean_of_means(*drawn: Any, axis: int) -> Any:
        return sum(values.mean(axis=axis) for values in drawn) / len(drawn)

    # scipy cannot resample a single value, so it is given twice.
    arrays = [
        np.asarray(values if len(values) > 1 else [*values, *values], dtype=float)
        for values in given
    ]
    drawn = bootstrap(
        arrays,
        mean_of_means,
        n_resamples=N_RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(float(drawn.low), float(drawn.high))


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
