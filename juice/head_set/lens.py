"""A head set as hooks of TransformerLens: the two runs of method.md, one after the other.

    run 1, clean     bridge.run_with_hooks(tokens, fwd_hooks=hooks.record)
                     keeps z of the steered layers
    run 2, steered   bridge.run_with_hooks(tokens, fwd_hooks=hooks.steer)
                     z_h <- z_h + coefficient[layer][h] * z_h(run 1)

The single run (JuNe) scales its own z instead, and records nothing. z is
`blocks.{layer}.attn.hook_z`, which a bridge gives as [batch, pos, head, d_head] or, for some
architectures, flat as [batch, pos, head * d_head]. Only torch is needed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from juice.errors import RequestError, UsageError
from juice.head_set.coefficients import betas_of, check_scale, coefficients_of
from juice.head_set.schema import HeadSetContent
from juice.methods import METHODS, Method

Hook = Callable[..., torch.Tensor | None]
HOOK_NAME = "blocks.{}.attn.hook_z"


@dataclass(frozen=True, kw_only=True)
class LensHooks:
    """Hooks for `fwd_hooks`: `record` for the clean run, then `steer` for the steered run.

    Both runs have the same tokens. One object holds one record, the latest. Both lists are empty
    where nothing is scaled.
    """

    record: list[tuple[str, Hook]]
    steer: list[tuple[str, Hook]]


class LensHeadSet(HeadSetContent):
    """A head set that steers in TransformerLens."""

    def to_lens_hooks(
        self,
        *,
        beta_plus: float | None = None,
        beta_minus: float | None = None,
        strength: float = 1.0,
        method: Method = "juice",
    ) -> LensHooks:
        """Return TransformerLens hooks: `record` for the clean run, `steer` for the steered run.

        Args:
            beta_plus: Scale of the + heads; None: the tuned one.
            beta_minus: Scale of the - heads; None: the tuned one.
            strength: Multiplies both betas.
            method: `juice`, or `june` for the single run, which records nothing.

        Raises:
            RequestError: There are no betas, or a value is out of range.
            UsageError: Raised by a steered run without a clean run of the same shape.
        """
        if method not in METHODS:
            raise RequestError(
                f"method is {method!r}; expected juice or june", param="steer.method"
            )
        check_scale("strength", strength)
        check_scale("beta_plus", beta_plus)
        check_scale("beta_minus", beta_minus)
        coefficients = coefficients_of(
            self, betas_of(self, method, beta_plus, beta_minus), strength
        )
        recorded: dict[int, torch.Tensor] = {}

        def recording(layer: int) -> Hook:
            def record(z: torch.Tensor, hook: Any = None) -> None:  # noqa: ARG001 -- passed by name
                # A copy: hooks that run after this one may change z in place.
                recorded[layer] = z.detach().clone()

            return record

        def steering(layer: int, coefficient: torch.Tensor) -> Hook:
            def steer(z: torch.Tensor, hook: Any = None) -> torch.Tensor:  # noqa: ARG001
                clean = z if method == "june" else _record_of(recorded.get(layer), z, layer)
                return _add_scaled(z, clean, coefficient, layer)

            return steer

        return LensHooks(
            record=(
                [(HOOK_NAME.format(layer), recording(layer)) for layer in coefficients]
                if method == "juice"
                else []
            ),
            steer=[
                (HOOK_NAME.format(layer), steering(layer, values))
                for layer, values in coefficients.items()
            ],
        )


def _record_of(clean: torch.Tensor | None, z: torch.Tensor, layer: int) -> torch.Tensor:
    if clean is None:
        raise UsageError(
            f"the steered run has no clean run at layer {layer}; "
            "run the same tokens with fwd_hooks=hooks.record first"
        )
    if clean.shape != z.shape:
        raise UsageError(
            f"the steered run has z of shape {list(z.shape)} at layer {layer}, the recorded clean "
            f"run {list(clean.shape)}; record the same tokens first, whole and without a cache"
        )
    return clean


def _add_scaled(
    z: torch.Tensor, clean: torch.Tensor, coefficient: torch.Tensor, layer: int
) -> torch.Tensor:
    n_heads = len(coefficient)
    if z.shape[2] % n_heads if z.dim() == 3 else z.shape[2] != n_heads:
        raise UsageError(
            f"layer {layer} has z of shape {list(z.shape)}; "
            f"the head set's model has {n_heads} heads"
        )
    by_head = (*z.shape[:2], n_heads, -1)  # [batch, pos, head, d_head]
    scaled = coefficient.to(z)[:, None] * clean.to(z.device).reshape(by_head)
    return (z.reshape(by_head) + scaled).reshape(z.shape)
