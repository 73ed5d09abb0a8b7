"""Head scores (method.md, stage 1, step 1).

    S[sign][j][l, h] = mean over examples and the sign's alphas of
                       p_y(z_h <- z_h + alpha * z_h at every position) - p_y(unmodified)

for every conflict type j, layer l and head h; p_y is the probability of the first token of the
target's answer at the prompt's last position. One pass of probes serves both targets: they differ
only in which probability is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from juice.data.example import ConflictExample
from juice.head_set import HeadScores
from juice.identification.probe import CleanRun, Prober
from juice.identification.scored_prompt import scored_prompt
from juice.identification.unfinished import Unfinished
from juice.methods import CONFLICT_TYPES, ConflictType, Target
from juice.model.layout import AttentionLayer
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

PROBE_TOKENS = 8192


@torch.inference_mode()
def score_heads(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    *,
    targets: dict[Target, tuple[ConflictType, ...]],
    alphas_plus: Sequence[float],
    alphas_minus: Sequence[float],
    progress: Progress = silent,
    unfinished: Unfinished | None = None,
) -> dict[Target, HeadScores]:
    """Return the scores of every head for each target over its conflict types.

    Args:
        model: The model.
        examples: The examples to score on, which all have these conflict types.
        targets: The targets, each with the conflict types that it is scored on.
        alphas_plus: Probing scales of the + scores, above 0; without any these scores are NaN.
        alphas_minus: Probing scales of the - scores, below 0; likewise.
        progress: Reports how many probes are done.
        unfinished: Keeps the changes by conflict type and layer, and does not compute them again.
    """
    loaded, unfinished = model.loaded, unfinished or Unfinished()
    alphas = torch.tensor([*alphas_plus, *alphas_minus], device=loaded.device)
    conflict_types = sorted(
        {t for types in targets.values() for t in types}, key=CONFLICT_TYPES.index
    )
    n_probes = sum(layer.n_heads for layer in loaded.layout.layers) * len(alphas)
    changes: dict[ConflictType, torch.Tensor] = {}
    with loaded.turn, progress("scoring heads", n_probes * len(conflict_types)) as advance:
        for conflict_type in conflict_types:
            prompts = [scored_prompt(model, example, conflict_type) for example in examples]
            prober = Prober(loaded, clean := CleanRun(loaded, [prompt.ids for prompt in prompts]))
            tokens = torch.tensor(
                [[p.answer_tokens[t] for t in targets] for p in prompts], device=loaded.device
            )  # [n, target]
            rows = []
            for layer in loaded.layout.layers:
                factors = _factors(layer, alphas)
                key, probed = f"probes {conflict_type} {layer.index}", list[torch.Tensor]()
                if (kept := unfinished.get(key)) is not None:
                    probed.append(torch.tensor(kept))
                    advance(len(factors))
                else:
                    for chunk in torch.split(
                        factors, max(1, PROBE_TOKENS // (clean.n * clean.n_positions))
                    ):
                        # An unscaled row beside them: half precision rounds by a forward's shape.
                        own = torch.cat([torch.ones_like(chunk[:1]), chunk])
                        p = prober.logits(layer.index, own).softmax(-1)  # [1 + m, n, vocabulary]
                        p = p.gather(2, tokens.expand(len(own), -1, -1))
                        probed.append((p[1:] - p[:1]).mean(1))  # [m, target]
                        advance(len(chunk))
                    unfinished.put(key, torch.cat(probed).tolist())
                rows.append(torch.cat(probed).cpu().view(layer.n_heads, len(alphas), len(targets)))
            changes[conflict_type] = _stack_layers(rows, loaded.layout.n_heads)
    return {
        target: _head_scores(target, types, changes, i, len(alphas_plus))
        for i, (target, types) in enumerate(targets.items())
    }


def _factors(layer: AttentionLayer, alphas: torch.Tensor) -> torch.Tensor:
    """Return factors [n_heads * n_alphas, n_heads], each row scaling one head by 1 + alpha.

    Heads vary slowest.
    """
    one_hot = torch.eye(layer.n_heads, device=alphas.device)[:, None, :]  # [head probed, 1, head]
    return (1 + alphas[None, :, None] * one_hot).flatten(0, 1)


def _stack_layers(rows: list[torch.Tensor], n_heads: int) -> torch.Tensor:
    """Stack [heads of the layer, alpha, target] to [layer, n_heads, alpha, target].

    Heads that a layer does not have change nothing.
    """
    padded = [torch.nn.functional.pad(row, (0, 0, 0, 0, 0, n_heads - len(row))) for row in rows]
    return torch.stack(padded)


def _head_scores(
    target: Target,
    types: tuple[ConflictType, ...],
    changes: dict[ConflictType, torch.Tensor],
    index: int,
    n_plus: int,
) -> HeadScores:
    # [conflict type, layer, head, alpha]
    stacked = torch.stack([changes[t][..., index] for t in types])
    return HeadScores(
        target=target,
        conflict_types=types,
        plus=stacked[..., :n_plus].mean(-1),
        minus=stacked[..., n_plus:].mean(-1),
    )
