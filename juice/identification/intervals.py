"""95 % intervals of means that stay honest where there are few values, or all are alike.

Values come in groups that count alike, such as domains: the mean is that of the groups' means. n is
then Kish's effective number, 1 / sum of w^2, where w is the weight of each value; what the groups
differ by counts as chance, so intervals are rather too wide.

Sources: Wilson (1927); Agresti and Min (2005); Kish, "Survey Sampling" (1965).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

Z = 1.959964


class Interval(NamedTuple):
    """A confidence interval of a mean."""

    low: float
    high: float


def share_interval(*groups: Sequence[float]) -> Interval | None:
    """Return Wilson's interval of a mean of values from 0 to 1; None without values."""
    given = [values for values in groups if values]
    if not given:
        return None
    n, p = _effective_n(given), fmean(map(fmean, given))
    middle = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def difference_interval(*groups: Sequence[float]) -> Interval | None:
    """Return the interval of a mean of paired differences, each from -1 to 1; None without values.

    Two more values, one that gains and one that loses everything, keep it from collapsing.
    """
    given = [values for values in groups if values]
    if not given:
        return None
    n = _effective_n(given)

    def padded(term: Sequence[float], of_one: float, of_minus_one: float) -> float:
        return (n * fmean(term) + of_one + of_minus_one) / (n + 2)

    middle = padded([fmean(values) for values in given], 1, -1)
    squares = [fmean((v - middle) ** 2 for v in values) for values in given]
    variance = padded(squares, (1 - middle) ** 2, (1 + middle) ** 2)
    half = Z * math.sqrt(variance / (n + 2))
    return Interval(max(-1.0, middle - half), min(1.0, middle + half))


def _effective_n(groups: Sequence[Sequence[float]]) -> float:
    return len(groups) ** 2 / sum(1 / len(values) for values in groups)
