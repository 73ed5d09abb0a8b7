"""What a diagnosis says, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: what was compared, whether it agrees, the largest difference and its bound (both in `unit`).

    One that is not `decisive` is a second opinion, of a library that errs on some architectures
    itself.
    """

    name: str
    passed: bool
    difference: float
    bound: float
    unit: str
    decisive: bool = True


@dataclass(frozen=True, kw_only=True)
class HeadSetCost:
    """A head set that serves: the layers, first and last, that the clean run passes beside the steered one, and their share of all.

    None and 0 where it needs no rows of its own: with one steered layer its z is the steered row's
    own.
    """

    name: str
    target: str
    n_heads: int
    window: tuple[int, int] | None
    extra_rows: float


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Whether a model is steered exactly; `reason` says why it is refused, where it is."""

    model: str
    exact: bool
    reason: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    head_sets: tuple[HeadSetCost, ...] = ()
    unfit_head_sets: dict[str, str] = field(default_factory=dict)
    n_foreign_head_sets: int = 0

    @classmethod
    def refusal(cls, model: str, reason: str) -> Diagnosis:
        """Return the diagnosis of a model that does not load for steering."""
        return cls(model=model, exact=False, reason=reason)

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain data."""
        return asdict(self)
