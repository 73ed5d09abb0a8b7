"""What a request asks (`steer=context`, strength 0.5), and what its rows get for it.

A request whose coefficients are all zero takes the unsteered path. Context-aware decoding (`cad`) uses no heads: its strength is
the weight of the contrast between the prompt with and without its context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from juice.errors import RequestError
from juice.head_set import HeadSet
from juice.head_set.coefficients import RANGES, betas_of, check_scale, coefficients_of
from juice.head_set.schema import METHODS

SteerMethod = Literal["juice", "june", "cad"]
SteerTarget = Literal["context", "parametric", "none"]
TARGETS: tuple[SteerTarget, ...] = ("context", "parametric", "none")


@dataclass(frozen=True, kw_only=True)
class Steer:
    """What a request asks: everything but the target has a default; `head_set` None is the set named like the target."""

    target: SteerTarget = "none"
    strength: float = 1.0
    head_set: str | None = None
    beta_plus: float | None = None
    beta_minus: float | None = None
    method: SteerMethod = "juice"

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise RequestError(f"steer is {self.target!r}; expected one of {', '.join(TARGETS)}", param="steer")
        ignored = [name for name in ("head_set", "beta_plus", "beta_minus") if getattr(self, name) is not None]
        if self.target == "none" and ignored:
            raise RequestError(f"{ignored[0]} is given, but steer is none; name a target: context or parametric", param="steer.target")
        if self.method not in (*METHODS, "cad"):
            raise RequestError(f"method is {self.method!r}; expected juice, june or cad", param="steer.method")
        if self.method == "cad":
            if self.target != "context":
                raise RequestError(
                    f"method cad steers toward the context only, steer is {self.target}; say steer=context, or choose juice or june",
                    param="steer.method",
                )
            if ignored:
                raise RequestError(f"{ignored[0]} is given, but method cad uses no heads; drop it", param=f"steer.{ignored[0]}")
        for name in RANGES:
            check_scale(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class SteeringReport:
    """What was applied to a request, and what may make it less than it seems; part of every answer.

    `exact` is false where the model's activations are quantised.
    """

    applied: bool
    target: SteerTarget
    head_set: str | None
    beta_plus: float
    beta_minus: float
    strength: float
    method: SteerMethod
    n_heads: int
    exact: bool = True
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return asdict(self)


@dataclass(frozen=True, eq=False, kw_only=True)
class Steering:
    """What a request's rows get: `coefficients` by layer, float32 [n_heads], only layers where one is not zero."""

    coefficients: Mapping[int, torch.Tensor]
    report: SteeringReport

    @property
    def window(self) -> range:
        """The layers that a companion, the clean run, must pass beside the steered row; empty where it needs none.

        Below the lowest steered layer both runs are the same, above the highest nothing reads the clean one. With one steered
        layer its z is the steered row's own, and the single run (JuNe) never reads it.
        """
        if self.report.method != "juice" or len(self.coefficients) < 2:
            return range(0)
        return range(min(self.coefficients), max(self.coefficients) + 1)


def unsteered(steer: Steer | None = None) -> Steering:
    """Return the steering that does nothing."""
    target, method = (steer.target, steer.method) if steer else ("none", "juice")
    report = SteeringReport(
        applied=False, target=target, head_set=None, beta_plus=0.0, beta_minus=0.0, strength=0.0, method=method, n_heads=0
    )
    return Steering(coefficients={}, report=report)


def contrasting(steer: Steer) -> Steering:
    """Return the steering of context-aware decoding: no coefficients; the contrast is the request's."""
    report = SteeringReport(
        applied=steer.strength > 0, target=steer.target, head_set=None, beta_plus=0.0, beta_minus=0.0, strength=steer.strength,
        method="cad", n_heads=0,
    )  # fmt: skip
    return Steering(coefficients={}, report=report)


def steering_of(steer: Steer, head_set: HeadSet, chat_template_sha256: str | None = None) -> Steering:
    """Return the coefficients of a request whose prompt went through a chat template, or (None) did not.

    Raises RequestError when neither the request nor the set gives the betas.
    """
    assert steer.method != "cad", "context-aware decoding has no coefficients"
    betas = betas_of(head_set, steer.method, steer.beta_plus, steer.beta_minus)
    coefficients = coefficients_of(head_set, betas, steer.strength)
    warning = head_set.form_warning(chat_template_sha256) if coefficients else None
    report = SteeringReport(
        applied=bool(coefficients),
        target=steer.target,
        head_set=head_set.name,
        beta_plus=betas.plus,
        beta_minus=betas.minus,
        strength=steer.strength,
        method=steer.method,
        n_heads=sum(int(values.count_nonzero()) for values in coefficients.values()),
        warnings=() if warning is None else (warning,),
    )
    return Steering(coefficients=coefficients, report=report)
