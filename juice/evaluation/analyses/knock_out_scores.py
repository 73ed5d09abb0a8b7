"""What removing one head (z_h <- 0) does to p of both answers, on any number of examples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from juice.data.example import ConflictExample
from juice.identification.probing import score_heads
from juice.methods import TARGETS, ConflictType, Target
from juice.progress import Progress
from juice.steered_model import SteeredModel

N_AT_ONCE = 8


def knock_out_scores(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    conflict_types: tuple[ConflictType, ...],
    progress: Progress,
) -> dict[Target, torch.Tensor]:
    """Return the mean change of p_y when a head is removed, for both answers y.

    Args:
        model: The model.
        examples: The examples, which all have these conflict types.
        conflict_types: Which prompts to score.
        progress: Reports how many probes are done, anew for every few examples.

    Returns:
        By the target whose answer is y, float32 [conflict types, layers, heads].
    """
    total: dict[Target, torch.Tensor] = {}
    for start in range(0, len(examples), N_AT_ONCE):
        chunk = examples[start : start + N_AT_ONCE]
        scores = score_heads(
            model,
            chunk,
            targets=dict.fromkeys(TARGETS, conflict_types),
            alphas_plus=(),
            alphas_minus=(-1.0,),
            progress=progress,
        )
        for target in TARGETS:
            total[target] = total.get(target, 0) + scores[target].minus * (
                len(chunk) / len(examples)
            )
    return total
