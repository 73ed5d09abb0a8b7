"""The result of a diagnosis, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check.

    Args:
        name: What was compared.
        passed: Whether it agrees.
        difference: The largest difference, in `unit`.
        bound: The largest difference allowed, in `unit`.
        unit: The unit of both.
        decisive: Whether a failure means that steering is not exact. TransformerLens is not
            decisive, because it errs on some architectures itself; nor is any check where the
            model's activations are quantised.
    """

    name: str
    passed: bool
    difference: float
    bound: float
    unit: str
    decisive: bool = True


@dataclass(frozen=True, kw_only=True)
class HeadSetCost:
    """What a head set that fits costs.

    With one steered layer it needs no companion, because the clean z is the steered row's own.

    Args:
        name: Its name.
        target: What it steers toward.
        n_heads: The number of its heads.
        window: The first and the last layer with a companion; None without one.
        extra_rows: The share of layers with a companion, 0 to 1.
    """

    name: str
    target: str
    n_heads: int
    window: tuple[int, int] | None
    extra_rows: float


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Whether a model is steered exactly.

    Args:
        model: Its id.
        exact: Whether steering is exact.
        reason: Why it is not; None where it is.
        facts: What is known about the model; empty if it was refused at load.
        checks: The checks that were run.
        head_sets: What each head set that fits costs.
        unfit_head_sets: Why head sets of this model's name cannot be used, or files are damaged.
        n_foreign_head_sets: The number of head sets made for models of other names.
    """

    model: str
    exact: bool
    reason: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    head_sets: tuple[HeadSetCost, ...] = ()
    unfit_head_sets: dict[str, str] = field(default_factory=dict)
    n_foreign_head_sets: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain data."""
        return asdict(self)
