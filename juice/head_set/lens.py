"""A head set as hooks of TransformerLens: the two runs of method.md, one after the other.

    run 1, clean     bridge.run_with_hooks(tokens, fwd_hooks=hooks.record)
                     keeps z of the steered layers
    run 2, steered   bridge.run_with_hooks(tokens, fwd_hooks=hooks.steer)
                     z_h <- z_h + coefficient[layer][h] * z_h(run 1)

The single run (JuNe) scales its own z instead, and records nothing. z is
`blocks.{layer}.attn.hook_z`, which a bridge gives as [batch, pos, head, d_head] or, for some
architectures, flat as [batch, pos, head * d_head].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from juice.errors import UsageError
from juice.formula import Method, add_scaled

Hook = Callable[..., torch.Tensor | None]
HOOK_NAME = "blocks.{}.attn.hook_z"


@dataclass(frozen=True, kw_only=True)
class LensHooks:
    """Hooks for `fwd_hooks`: `record` for the clean run, then `steer` for the steered run.

    Both runs have the same tokens. One object holds one record, the latest.
    """

    record: list[tuple[str, Hook]]
    steer: list[tuple[str, Hook]]


def lens_hooks(coefficients: Mapping[int, torch.Tensor], method: Method) -> LensHooks:
    """Return the hooks that steer by coefficients.

    Args:
        coefficients: float32 [n_heads] by layer.
        method: `juice` for two runs, `june` for the single run, which records nothing.
    """
    recorded: dict[int, torch.Tensor] = {}

    def record(layer: int, z: torch.Tensor, hook: Any = None) -> None:  # noqa: ARG001 -- by name
        # A copy: hooks that run after this one may change z in place.
        recorded[layer] = z.detach().clone()

    def steer(layer: int, z: torch.Tensor, hook: Any = None) -> torch.Tensor:  # noqa: ARG001
        clean = z if method == "june" else _record_of(recorded.get(layer), z, layer)
        return _steered(z, clean, coefficients[layer], layer)

    names = {layer: HOOK_NAME.format(layer) for layer in coefficients}
    return LensHooks(
        record=[(name, partial(record, layer)) for layer, name in names.items()]
        if method == "juice"
        else [],
        steer=[(name, partial(steer, layer)) for layer, name in names.items()],
    )


def _record_of(clean: torch.Tensor | None, z: torch.Tensor, layer: int) -> torch.Tensor:
    """Return z of the clean run, of the same shape as z, [batch, pos, n_heads, d_head] or flat."""
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


def _steered(
    z: torch.Tensor, clean: torch.Tensor, coefficient: torch.Tensor, layer: int
) -> torch.Tensor:
    """Return z with the clean run's added, both [batch, pos, n_heads, d_head] or flat.

    `coefficient` is float32 [n_heads].
    """
    n_heads = len(coefficient)
    if z.shape[2] % n_heads if z.dim() == 3 else z.shape[2] != n_heads:
        raise UsageError(
            f"layer {layer} has z of shape {list(z.shape)}; "
            f"the head set's model has {n_heads} heads"
        )
    flat = (*z.shape[:2], -1)  # [batch, pos, n_heads * d_head]
    source = clean.to(z.device).reshape(flat)
    return add_scaled(z.reshape(flat), source, coefficient).reshape(z.shape)
