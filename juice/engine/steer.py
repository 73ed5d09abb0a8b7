"""From what a request asks (`steer=context`, strength 0.5) to the coefficients that its rows get.

    coefficient[layer][head] = strength * (beta_plus if head in plus) + strength * (beta_minus if head in minus)

A head in both lists gets the sum. A request whose coefficients are all zero takes the unsteered path. Context-aware decoding
(`cad`) uses no heads: its strength is the weight of the contrast between the prompt with and without its context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from juice.errors import RequestError
from juice.head_set import Betas, HeadSet
from juice.head_set.schema import MAX_BETA, METHODS

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
        for name, low, high in (("strength", 0.0, MAX_BETA), ("beta_plus", 0.0, MAX_BETA), ("beta_minus", -MAX_BETA, 0.0)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and low <= value <= high):
                raise RequestError(f"{name} is {value!r}; expected a number from {low:g} to {high:g}", param=f"steer.{name}")


@dataclass(frozen=True, kw_only=True)
class SteeringReport:
    """What was applied to a request; part of every answer."""

    applied: bool
    target: SteerTarget
    head_set: str | None
    beta_plus: float
    beta_minus: float
    strength: float
    method: SteerMethod
    n_heads: int

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


def steering_of(steer: Steer, head_set: HeadSet) -> Steering:
    """Return the coefficients of a request; raises RequestError when neither the request nor the set gives the betas."""
    betas = _betas(steer, head_set)
    coefficients: dict[int, torch.Tensor] = {}
    for heads, beta in ((head_set.heads.plus, betas.plus), (head_set.heads.minus, betas.minus)):
        for head in heads:
            layer = coefficients.setdefault(head.layer, torch.zeros(head_set.model.n_heads))
            layer[head.index] += steer.strength * beta
    coefficients = {layer: values for layer, values in coefficients.items() if values.any()}
    report = SteeringReport(
        applied=bool(coefficients),
        target=steer.target,
        head_set=head_set.name,
        beta_plus=betas.plus,
        beta_minus=betas.minus,
        strength=steer.strength,
        method=steer.method,
        n_heads=sum(int(values.count_nonzero()) for values in coefficients.values()),
    )
    return Steering(coefficients=coefficients, report=report)


def _betas(steer: Steer, head_set: HeadSet) -> Betas:
    tuned = None if steer.method == "cad" else head_set.betas(steer.method)
    plus = steer.beta_plus if steer.beta_plus is not None else tuned.plus if tuned else None
    minus = steer.beta_minus if steer.beta_minus is not None else tuned.minus if tuned else None
    # A sign without heads needs no beta: whatever it is, nothing is scaled by it.
    plus = 0.0 if plus is None and not head_set.heads.plus else plus
    minus = 0.0 if minus is None and not head_set.heads.minus else minus
    if plus is None or minus is None:
        raise RequestError(
            f"head set {head_set.name!r} has no betas for method {steer.method!r}; give beta_plus and beta_minus "
            "(--beta-plus, --beta-minus), or set them with `juice tune`",
            param="steer.beta_plus" if plus is None else "steer.beta_minus",
        )
    return Betas(plus=plus, minus=minus)
