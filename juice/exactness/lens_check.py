"""z against TransformerLens, which finds it on its own.

The input of the output projection of layer l is its `blocks.{l}.attn.hook_z`.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from juice.errors import UsageError
from juice.model.differences import largest
from juice.model.hooks import hooked
from juice.model.loaded import LoadedModel


def require_lens() -> None:
    """Raise UsageError if the extra `lens` is not installed."""
    if find_spec("transformer_lens") is None:
        raise UsageError(
            "--deep compares with TransformerLens; "
            "install it with: pip install 'juice-steering[lens]'"
        )


@torch.inference_mode()
def z_difference(loaded: LoadedModel, ids: torch.Tensor) -> float | None:
    """Return the largest difference of z over all layers, relative to the size of z.

    `ids` is int64 [1, tokens]. Returns None, with a warning, where TransformerLens cannot run the
    model. Its bridge wraps the model's modules in place, so the model cannot generate afterwards.
    Raises UsageError without the extra `lens`.
    """
    require_lens()
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    ours: dict[int, torch.Tensor] = {}

    index_of = {layer.projection: layer.index for layer in loaded.layout.layers}

    def keep(projection: nn.Module, args: tuple[Any, ...]) -> None:
        ours[index_of[projection]] = args[0].float()

    with loaded.turn, hooked(own.register_forward_pre_hook(keep) for own in index_of):
        loaded.run(input_ids=ids, use_cache=False)
    name = type(loaded.model).__name__
    try:
        bridge = build_bridge_from_module(
            loaded.model, name, hf_config=loaded.model.config, tokenizer=loaded.tokenizer
        )
        _, cache = bridge.run_with_cache(ids)
        theirs = {index: cache[f"blocks.{index}.attn.hook_z"].float() for index in ours}
    except Exception as error:  # it knows fewer architectures than transformers
        warnings.warn(
            f"TransformerLens cannot run {name}, so z is not compared with its own: {error}",
            stacklevel=2,
        )
        return None
    if differing := [index for index, z in ours.items() if theirs[index].numel() != z.numel()]:
        warnings.warn(
            f"z of layer {differing[0]} is not the same size as in TransformerLens",
            stacklevel=2,
        )
        return float("inf")
    return largest(
        float((theirs[index].reshape(z.shape) - z).abs().max() / z.abs().max())
        for index, z in ours.items()
    )
