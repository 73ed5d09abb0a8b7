"""What betas did on the examples that tuned them, and other metrics of a head set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from juice.head_set.parts import Part
from juice.methods import METHODS


class Validation(Part):
    """What betas did on the examples that tuned them: shares of target answers by conflict type.

    `gain` is the mean change over the conflicts, with its 95 % interval. `side_effects` are the
    shares of right answers to prompts that steering should leave alone, without and with it. Older
    sets have neither.
    """

    n_examples: int = Field(ge=1)
    accuracy: dict[str, float]
    accuracy_unsteered: dict[str, float]
    gain: float | None = None
    gain_interval: tuple[float, float] | None = None
    side_effects: dict[str, tuple[float, float]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _same_types(self) -> Self:
        if self.accuracy.keys() != self.accuracy_unsteered.keys():
            raise ValueError("accuracy and accuracy_unsteered have different conflict types")
        return self

    @property
    def is_weak(self) -> bool:
        """Whether the gain is not certainly above zero."""
        return self.gain_interval is not None and self.gain_interval[0] <= 0


def checked_metrics(value: dict[str, Any]) -> dict[str, Any]:
    """Return a set's metrics; raises ValueError for a wrong validation, or infinite numbers."""
    for method in METHODS:
        if f"validation_{method}" in value:
            Validation.model_validate(value[f"validation_{method}"])
    return _finite(value)  # type: ignore[no-any-return]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"holds {value}; expected finite numbers")
    if isinstance(value, Mapping):
        for item in value.values():
            _finite(item)
    return value
