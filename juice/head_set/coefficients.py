"""What a head set adds, by head: the one place where betas and strength become coefficients of z.

    coefficient[layer][head] = strength * (beta_plus if head in plus)
                             + strength * (beta_minus if head in minus)

where a set may have a beta of its own for each head. A head in both lists gets the sum. A layer
whose coefficients are all zero is left out.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from juice.errors import RequestError
from juice.head_set.betas import MAX_BETA, Betas
from juice.head_set.schema import HeadSetContent
from juice.methods import METHODS, Method

RANGES = {"strength": (0.0, MAX_BETA), "beta_plus": (0.0, MAX_BETA), "beta_minus": (-MAX_BETA, 0.0)}


def check_scale(name: str, value: float | None) -> None:
    """Raise RequestError for a strength or beta out of its range; None is in range."""
    low, high = RANGES[name]
    if value is not None and not (
        isinstance(value, int | float) and math.isfinite(value) and low <= value <= high
    ):
        raise RequestError(
            f"{name} is {value!r}; expected a number from {low:g} to {high:g}",
            param=f"steer.{name}",
        )


def betas_of(
    head_set: HeadSetContent, method: Method, beta_plus: float | None, beta_minus: float | None
) -> Betas:
    """Return the given betas, else the set's own for the method.

    Args:
        head_set: The head set.
        method: `juice` or `june`.
        beta_plus: Scale of the + heads; None: the set's own.
        beta_minus: Scale of the - heads; None: the set's own.

    Raises:
        RequestError: A sign with heads has neither, or the set's heads have betas of their own.
    """
    tuned = head_set.betas(method)
    if tuned is not None and tuned.is_per_head:
        for name, value in (("beta_plus", beta_plus), ("beta_minus", beta_minus)):
            if value is not None:
                raise RequestError(
                    f"{name} is given, but each head of the set {head_set.name!r} has a beta of "
                    "its own; drop it, and scale all of them with strength",
                    param=f"steer.{name}",
                )
        return tuned
    plus: Any = beta_plus if beta_plus is not None else tuned.plus if tuned else None
    minus: Any = beta_minus if beta_minus is not None else tuned.minus if tuned else None
    # A sign without heads needs no beta: it would scale nothing.
    plus = 0.0 if plus is None and not head_set.heads.plus else plus
    minus = 0.0 if minus is None and not head_set.heads.minus else minus
    if plus is None or minus is None:
        raise RequestError(
            f"head set {head_set.name!r} has no betas for method {method!r}; give beta_plus and "
            "beta_minus (--beta-plus, --beta-minus), or set them with `juice tune`",
            param="steer.beta_plus" if plus is None else "steer.beta_minus",
        )
    return Betas(plus=plus, minus=minus)


def coefficients_of(
    head_set: HeadSetContent, betas: Betas, strength: float
) -> dict[int, torch.Tensor]:
    """Return the coefficients of each layer where one is not zero, float32 [n_heads]."""
    coefficients: dict[int, torch.Tensor] = {}
    for heads, own in (
        (head_set.heads.plus, betas.each("plus", len(head_set.heads.plus))),
        (head_set.heads.minus, betas.each("minus", len(head_set.heads.minus))),
    ):
        for head, beta in zip(heads, own, strict=True):
            layer = coefficients.setdefault(head.layer, torch.zeros(head_set.model.n_heads))
            layer[head.index] += strength * beta
    return {layer: values for layer, values in coefficients.items() if values.any()}


def layers_of(head_set: HeadSetContent) -> list[int]:
    """Return the layers that a set steers: with its tuned betas, or all of its heads without."""
    tuned = [betas for method in METHODS if (betas := head_set.betas(method)) is not None]
    if not tuned:
        return sorted({head.layer for head in (*head_set.heads.plus, *head_set.heads.minus)})
    return sorted({layer for betas in tuned for layer in coefficients_of(head_set, betas, 1.0)})
