"""z against TransformerLens, which found it without us: the input of each output projection is its `blocks.{l}.attn.hook_z`."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from juice.errors import UsageError
from juice.model.loaded import LoadedModel


def require_lens() -> None:
    """Raise UsageError without the extra `lens`."""
    if find_spec("transformer_lens") is None:
        raise UsageError(
            "--deep compares with TransformerLens; install it with: pip install"
            " 'juice-steering[lens]'"
        )


@torch.inference_mode()
def z_difference(loaded: LoadedModel, ids: torch.Tensor) -> float | None:
    """Return the largest difference of z, relative to its size, over all layers; ids: int64 [1, tokens].

    None, with a warning, where TransformerLens cannot run the model. The bridge wraps its modules
    in place: it cannot serve any more. Raises UsageError without the extra `lens`.
    """
    require_lens()
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    ours: dict[int, torch.Tensor] = {}

    def keep(index: int) -> Any:
        def record(_module: nn.Module, args: tuple[Any, ...]) -> None:
            ours[index] = args[0].float()

        return record

    with loaded.turn, ExitStack() as stack:
        for layer in loaded.layout.layers:
            stack.callback(layer.projection.register_forward_pre_hook(keep(layer.index)).remove)
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
            f"TransformerLens cannot run {name}, so z is not compared with it: {error}",
            stacklevel=2,
        )
        return None
    if differing := [index for index, z in ours.items() if theirs[index].numel() != z.numel()]:
        warnings.warn(
            f"z of layer {differing[0]} is not of the size that TransformerLens gives it",
            stacklevel=2,
        )
        return float("inf")
    differences = [
        float((theirs[index].reshape(z.shape) - z).abs().max() / z.abs().max())
        for index, z in ours.items()
    ]
    return max(
        differences, key=lambda difference: (difference != difference, difference)
    )  # not a number is the worst
