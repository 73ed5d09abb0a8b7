"""Companions inside vLLM: in the layers of a window every token runs twice, steered and clean.

Before the window's first layer the tokens [1, n, width] become [1, 2n, width]: the tokens of the
batch, then their companions. Behind its last layer the first n go on. Projections, norms and MLPs
see 2n tokens and know nothing. Attention sends the companions through a layer of their own, a
shadow: vLLM allocates a cache for it under the same block tables, so that scheduler, block manager
and sampler know nothing either.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.transformers import vllm_attention_forward

from juice.vllm.table import CLEAN, OWN, Table


class Shadow(nn.Module):
    """Holds the companions' attention layer under the name that vLLM's forward looks for."""

    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn


class Companions:
    """The hooks of one rank's layers of the window.

    `running` is false in a step that steers nothing: nothing is then doubled. `dense`, where it is
    set, attends in place of vLLM's layers.

    Args:
        table: What the rows of the batch add.
        rank: This rank, among those that share the heads.
        may_rest: Whether steps may differ: not where a graph of one is compiled for all.
    """

    def __init__(self, table: Table, rank: int, *, may_rest: bool) -> None:
        self.table = table
        self._rank = rank
        self.running = True
        self._may_rest = may_rest
        self.dense: Any = None
        self.projections: dict[int, Any] = {}
        self._head_widths: dict[int, int] = {}

    def install(self, layers: dict[int, nn.Module], projections: dict[int, Any]) -> None:
        """Hook the decoder layers of the window that this rank holds, and their projections."""
        self.projections = projections
        n_heads = self.table.n_heads
        self._head_widths = {i: own.input_size // n_heads for i, own in projections.items()}
        first, last = min(layers), max(layers)
        for index, layer in layers.items():
            layer.register_forward_pre_hook(
                self._enter if index == first else self._follow, with_kwargs=True
            )
            projections[index].register_forward_pre_hook(self._steer(index))
        layers[last].register_forward_hook(self._leave)

    def run_for(self, steered: Iterable[bool]) -> None:
        """Run in this step if one of its requests is steered; companions of others are not read."""
        self.running = not self._may_rest or any(steered)

    def _enter(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.running:
            return None
        n = (args[0] if args else kwargs["hidden_states"]).shape[1]
        return twice(args, n), twice(kwargs, n)

    def _follow(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Double what goes with the hidden states, which are doubled already."""
        if not self.running:
            return None
        n = (args[0] if args else kwargs["hidden_states"]).shape[1] // 2
        return twice(args, n), twice(kwargs, n)

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if not self.running:
            return None
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = hidden[:, : hidden.shape[1] // 2]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def by_head(self, index: int, z: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """Return a layer's z, [..., heads * width], as [..., heads, width], and which heads it has.

        A rank has its own part of them, or all where its projection splits z itself.
        """
        parts = z.unflatten(-1, (-1, self._head_widths[index]))
        n_here = parts.shape[-2]
        first = 0 if n_here == self.table.n_heads else self._rank * n_here
        return parts, slice(first, first + n_here)

    def _steer(self, index: int) -> Any:
        table, at = self.table, self.table.window.index(index)

        def steer(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not self.running:
                return None
            z = args[0]
            n = z.shape[-2] // 2
            parts, heads = self.by_head(index, z)
            main, clean = parts[..., :n, :, :], parts[..., n:, :, :]
            here = table.coefficients[at][:, table.row_of_token[:n], heads]  # [2, token, head]
            steered = add_scaled(main, clean, here[OWN, ..., None], here[CLEAN, ..., None])
            return (torch.cat([steered.flatten(-2), z[..., n:, :]], dim=-2), *args[1:])

        return steer


def add_scaled(
    z: torch.Tensor, clean: torch.Tensor, own: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Return z + own * z + scale * clean, summed in float32 and rounded once.

    Where a coefficient is zero, what it scales is not read: the companion of an unsteered token may
    hold anything.
    """
    added = torch.where(own == 0, 0, own * z) + torch.where(scale == 0, 0, scale * clean)
    return (z + added).to(z.dtype)


def twice(value: Any, n: int) -> Any:
    """Repeat every tensor [.., n, ..] whose second dimension is the step's tokens."""
    if isinstance(value, torch.Tensor):
        return torch.cat([value, value], 1) if value.dim() > 1 and value.shape[1] == n else value
    if isinstance(value, tuple | list):
        return type(value)(twice(item, n) for item in value)
    if isinstance(value, dict):
        return {key: twice(item, n) for key, item in value.items()}
    return value


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend: tokens through the layer's own cache, companions through its shadow's.

    The function of the attention interface; query, key and value are [1, heads, tokens, d_head],
    what it returns is [1, tokens, heads, d_head].
    """
    companions, shadow, n_heads, n_tokens = module.companions, module.shadow, *query.shape[1:3]
    if companions.dense is not None:
        z = companions.dense(module, query, key, value)
    elif shadow is None or not companions.running:
        z, _ = vllm_attention_forward(module, query, key, value, attention_mask, **kwargs)
    else:
        n = n_tokens // 2
        z = torch.cat(
            [
                vllm_attention_forward(
                    holder, query[:, :, part], key[:, :, part], value[:, :, part], None, **kwargs
                )[0]
                for holder, part in ((module, slice(0, n)), (shadow, slice(n, None)))
            ]
        )
    return z.view(1, n_tokens, n_heads, -1), None  # some models want the heads apart
