"""The steering of a request: its coefficients, resolved against a head set.

A request whose coefficients are all zero takes the unsteered path. Context-aware decoding (`cad`,
`adacad`) uses no heads: its strength is the weight of the contrast between the prompt with and
without its context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from juice.engine.report import GateReport, SteeringReport
from juice.engine.steer import Steer
from juice.errors import RequestError
from juice.head_set import HeadSet
from juice.head_set.coefficients import betas_of, coefficients_of
from juice.methods import CONTRASTS, scales_heads


@dataclass(frozen=True, eq=False, kw_only=True)
class Steering:
    """How the rows of a request are steered, resolved against a head set.

    `coefficients` holds float32 [n_heads] by layer, only for layers where one is not zero. They are
    added from `first_position` on, counted in tokens of the prompt.
    """

    coefficients: Mapping[int, torch.Tensor]
    report: SteeringReport
    first_position: int = 0

    @property
    def window(self) -> range:
        """The layers with a companion; empty where none is needed.

        Below the lowest steered layer the clean and the steered row are the same; above the highest
        nothing reads the companion. With one steered layer the clean z is the steered row's own,
        and the single run (JuNe) never reads a clean row.
        """
        if self.report.method != "juice" or len(self.coefficients) < 2:
            return range(0)
        return range(min(self.coefficients), max(self.coefficients) + 1)

    @property
    def heads(self) -> list[tuple[int, int]]:
        """The steered heads, as (layer, head)."""
        return [
            (layer, head)
            for layer, own in sorted(self.coefficients.items())
            for head in torch.nonzero(own).flatten().tolist()
        ]

    def without(self, layer: int, head: int) -> Steering:
        """Return the same without one head."""
        own = self.coefficients[layer].clone()
        own[head] = 0.0
        others = {at: values for at, values in self.coefficients.items() if at != layer}
        kept = {**others, layer: own} if own.any() else others
        report = replace(self.report, applied=bool(kept), n_heads=max(0, self.report.n_heads - 1))
        return replace(self, coefficients=dict(sorted(kept.items())), report=report)

    def turned_off(self, gate: GateReport) -> Steering:
        """Return the steering that does nothing, because a gate decided so."""
        report = replace(self.report, applied=False, n_heads=0, gate=gate)
        return Steering(coefficients={}, report=report)


def unsteered(steer: Steer | None = None, *, exact: bool = True) -> Steering:
    """Return the steering that does nothing."""
    target, method = (steer.target, steer.method) if steer else ("none", "juice")
    return Steering(
        coefficients={},
        report=SteeringReport(applied=False, target=target, method=method, exact=exact),
    )


def resolve(
    steer: Steer,
    head_set: HeadSet | None,
    *,
    chat_template_sha256: str | None = None,
    first_position: int = 0,
    exact: bool = True,
) -> Steering:
    """Turn what a request asks for into coefficients.

    Args:
        steer: What the request asks for.
        head_set: The head set to use; None for `none`, `cad` and `adacad`, which use none.
        chat_template_sha256: The hash of the chat template of the prompt; None for a plain prompt.
        first_position: The first token that is steered.
        exact: Whether the model is steered exactly; goes into the report.

    Raises:
        RequestError: Neither request nor set has the betas, or the set is for another target.
    """
    if steer.target == "none":
        return unsteered(steer, exact=exact)
    if steer.method in CONTRASTS:
        report = SteeringReport(
            applied=steer.strength > 0,
            target=steer.target,
            strength=steer.strength,
            method=steer.method,
            exact=exact,
        )
        return Steering(coefficients={}, report=report)
    assert head_set is not None and scales_heads(steer.method)  # noqa: PT018 -- one condition
    if head_set.target != steer.target:
        raise RequestError(
            f"head set {head_set.name!r} steers toward {head_set.target}; the request asks for "
            f"{steer.target}: name a set of that target",
            param="steer.head_set",
        )
    betas = betas_of(head_set, steer.method, steer.beta_plus, steer.beta_minus)
    coefficients = coefficients_of(head_set, betas, steer.strength)
    warning = head_set.form_warning(chat_template_sha256) if coefficients else None
    report = SteeringReport(
        applied=bool(coefficients),
        target=steer.target,
        head_set=head_set.name,
        beta_plus=betas.spread("plus"),
        beta_minus=betas.spread("minus"),
        strength=steer.strength,
        method=steer.method,
        n_heads=sum(int(values.count_nonzero()) for values in coefficients.values()),
        positions=steer.positions,
        exact=exact,
        warnings=() if warning is None else (warning,),
    )
    return Steering(coefficients=coefficients, report=report, first_position=first_position)
