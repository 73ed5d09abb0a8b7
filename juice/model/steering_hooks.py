"""Permanent steering hooks: z <- z + coefficient * z[source row], with both chosen row by row.

At layer l and head h, row r of the batch gets

    z[l][r, t, h] <- z[l][r, t, h] + coefficient[l][r, h] * z[l][source[r], t, h]

at all its positions t, or at those that the plan names, with z as it was before the hook. A steered
row names its clean row as source: that is the dual run. A row may be its own source: that is how a
single run scales itself (JuNe, and the probes of identification). A row with zero coefficients is
unchanged, and a layer without a non-zero coefficient is not touched at all.

From loading on, the hooks are in front of the attention output projections and read the plan of the
current forward in their thread; without a plan the model is unmodified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import Any

import torch
from torch import nn

from juice.model.layout import AttentionLayer, Layout


@dataclass(frozen=True, eq=False)
class SteeringPlan:
    """What one forward adds, by layer, for the layers that steer.

    `sources` are int64 [rows], `coefficients` float32 [rows, n_heads]. `tokens` says which tokens
    of the first rows are steered, bool [rows of the call, pos]; None: all.
    """

    sources: Mapping[int, torch.Tensor]
    coefficients: Mapping[int, torch.Tensor]
    tokens: torch.Tensor | None = None


class _Here(local):
    """What steers the calls of one thread."""

    plan: SteeringPlan | None = None
    fired: frozenset[int] = frozenset()


class SteeringHooks:
    """The hooks of one model; `apply` sets the plan for the forwards within it."""

    def __init__(self, layout: Layout) -> None:
        self._here = _Here()
        self.handles = [
            layer.projection.register_forward_pre_hook(self._hook(layer)) for layer in layout.layers
        ]

    @contextmanager
    def apply(self, plan: SteeringPlan) -> Iterator[None]:
        """Steer this thread's forwards within.

        Raises RuntimeError for a layer whose hook does not fire.
        """
        here = self._here
        here.plan, here.fired = plan, frozenset()
        try:
            yield
            missed = plan.coefficients.keys() - here.fired
            if missed:
                raise RuntimeError(
                    f"steering did not reach layers {sorted(missed)}: "
                    "their output projections were bypassed"
                )
        finally:
            here.plan = None

    def _hook(self, layer: AttentionLayer) -> Any:
        def steer(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            plan = self._here.plan
            if plan is None or layer.index not in plan.coefficients:
                return None
            self._here.fired |= {layer.index}
            z = args[0]
            own = plan.coefficients[layer.index]
            added = add_scaled(z, plan.sources[layer.index], own, own.shape[1], plan.tokens)
            return (added, *args[1:])

        return steer


def add_scaled(
    z: torch.Tensor,
    source: torch.Tensor,
    coefficient: torch.Tensor,
    n_heads: int,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return z + coefficient * z[source], at some tokens or all.

    In half precision the sum is computed in float32 and rounded once, so that a coefficient such as
    1.3 is not rounded first.

    Args:
        z: [rows, pos, n_heads * d_head].
        source: The row that each row adds, int64 [rows].
        coefficient: float32 [rows, n_heads].
        n_heads: The number of heads that z holds.
        tokens: Which tokens of the first rows are changed, bool [rows, pos]; None: all. Rows after
            these have no coefficients.
    """
    by_head = z.view(*z.shape[:-1], n_heads, -1)  # [rows, pos, head, d_head]
    scaled = coefficient.to(z.device)[:, None, :, None] * by_head[source.to(z.device)]
    if tokens is not None:
        scaled[: len(tokens)] *= tokens.to(z.device)[:, :, None, None]
    return (by_head + scaled).to(z.dtype).flatten(-2)
