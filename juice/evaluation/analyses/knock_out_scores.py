"""What removing one head (z_h <- 0) does to p of both answers, on many examples, a few at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from juice.examples import ConflictExample, ConflictType, Target
from juice.identification.scores import score_heads
from juice.model.loading import LoadedModel
from juice.progress import Progress, silent

N_AT_ONCE = 8
BOTH: tuple[Target, ...] = ("context", "parametric")


def knock_out_scores(
    loaded: LoadedModel, examples: Sequence[ConflictExample], conflict_types: tuple[ConflictType, ...], progress: Progress = silent
) -> dict[Target, torch.Tensor]:
    """Return the mean change of p_y when a head is removed, by the answer y, float32 [conflict types, layers, heads]."""
    total: dict[Target, torch.Tensor] = {}
    for start in range(0, len(examples), N_AT_ONCE):
        chunk = examples[start : start + N_AT_ONCE]
        scores = score_heads(
            loaded, chunk, targets=dict.fromkeys(BOTH, conflict_types), alphas_plus=(1.0,), alphas_minus=(-1.0,), progress=progress
        )
        for target in BOTH:
            total[target] = total.get(target, 0) + scores[target].minus * (len(chunk) / len(examples))
    return total
