"""How far log-probabilities are from those of a definition."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the root of the mean square of a difference; where both rule out a token it is 0."""
    return float(torch.where(one == other, 0, one - other).square().mean().sqrt())


def largest(values: Iterable[float]) -> float:
    """Return the largest number; NaN is larger than any."""
    return max(values, key=lambda value: (value != value, value))
