"""What a number is over several seeds: the mean with its interval, and the worst.

    mean +- t * s / sqrt(n)

with the standard deviation s of n values and Student's t, so the interval is that of the mean over
all seeds, given the data: it says what another seed may change, not what other facts would.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any

# Student's t at 97.5 % with 1, 2, ... 30 degrees of freedom; with more, the last is a little wide.
T_VALUES = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


def spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return {n, mean, interval, worst, values} of shares, one a seed; None without any.

    A seed without a value has None, and counts nowhere. One value alone has no interval.
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {
        "n": len(known),
        "mean": fmean(known),
        "interval": _interval(known),
        "worst": min(known),
        "values": list(values),
    }


def _interval(values: Sequence[float]) -> tuple[float, float] | None:
    if len(values) < 2:
        return None
    t = T_VALUES[min(len(values) - 1, len(T_VALUES)) - 1]
    half = t * stdev(values) / sqrt(len(values))
    return max(0.0, fmean(values) - half), min(1.0, fmean(values) + half)
