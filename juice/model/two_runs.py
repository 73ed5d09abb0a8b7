"""The definition of steering, slow and obvious: two runs, no cache, no batch, no permanent hooks.

Run 1, the clean run, is the unmodified model and keeps z of the steered layers. Run 2, the steered
run, adds to z of each steered head its coefficient times the clean run's z. Everything faster is
checked against this.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import nn

from juice.model.hooks import hooked
from juice.model.layout import AttentionLayer
from juice.model.loaded import LoadedModel


@torch.inference_mode()
def two_runs(
    loaded: LoadedModel,
    ids: torch.Tensor,
    coefficients: Mapping[int, torch.Tensor],
    n_kept: int,
    first_position: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the last tokens in the clean run and in the steered run.

    Both are float32 [n_kept, vocabulary].

    Args:
        loaded: The model.
        ids: The tokens, int64 [tokens].
        coefficients: By layer, float32 [n_heads].
        n_kept: The number of last tokens.
        first_position: The first token that is steered.
    """
    clean: dict[int, torch.Tensor] = {}

    def keep(layer: AttentionLayer) -> Any:
        def record(_module: nn.Module, args: tuple[Any, ...]) -> None:
            clean[layer.index] = args[0]

        return record

    def add(layer: AttentionLayer) -> Any:
        def change(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            z = args[0].clone()  # [1, tokens, heads * d_head]
            for head, coefficient in enumerate(coefficients[layer.index].tolist()):
                if coefficient:
                    columns = slice(head * layer.d_head, (head + 1) * layer.d_head)
                    own = z[:, first_position:, columns]
                    own.copy_(
                        own.float()
                        + coefficient * clean[layer.index][:, first_position:, columns].float()
                    )
            return (z, *args[1:])

        return change

    # Many models can compute the logits of the last tokens only; those of a whole prompt would take
    # gigabytes.
    kept = (
        {"logits_to_keep": n_kept}
        if "logits_to_keep" in signature(loaded.model.forward).parameters
        else {}
    )
    steered, runs = [loaded.layout.layers[index] for index in coefficients], list[torch.Tensor]()
    with loaded.turn:
        for hook in (keep, add) if steered else (keep,):
            with hooked(s.projection.register_forward_pre_hook(hook(s)) for s in steered):
                run = loaded.run(input_ids=ids[None], use_cache=False, **kept)
            runs.append(run.logits[0, -n_kept:].float())
    return runs[0], runs[-1]
