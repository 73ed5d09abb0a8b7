"""Components of a layer, knocked out for a while: its attention, its MLP or both add nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from juice.errors import UnsupportedModelError
from juice.model.hooks import hooked
from juice.model.layout import AttentionLayer

Component = Literal["attention", "mlp"]


@contextmanager
def knocked_out(layer: AttentionLayer, components: Collection[Component]) -> Iterator[None]:
    """Zero what these components of a layer add to the residual stream, while within.

    Raises UnsupportedModelError for a layer without an MLP.
    """
    modules = [layer.attention if c == "attention" else mlp_of(layer) for c in components]
    with hooked(module.register_forward_hook(_zero) for module in modules):
        yield


def mlp_of(layer: AttentionLayer) -> nn.Module:
    """Return a layer's MLP: its last child outside the attention with a matrix of its own.

    Raises UnsupportedModelError where there is none.
    """
    attention = set(layer.attention.modules())
    others = [child for child in layer.layer.children() if not attention & set(child.modules())]
    with_matrix = [child for child in others if any(p.dim() > 1 for p in child.parameters())]
    if not with_matrix:
        raise UnsupportedModelError(
            f"layer {layer.index} has no MLP next to its attention; "
            "leave out the analysis knock_outs"
        )
    return with_matrix[-1]


def _zero(_module: nn.Module, args: Any, output: Any) -> Any:
    added, *others = output if isinstance(output, tuple) else (output,)
    # BLOOM and MPT pass the residual stream to the module, which adds it.
    residual = (
        args[1]
        if len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].shape == added.shape
        else added * 0
    )
    return (residual, *others) if isinstance(output, tuple) else residual
