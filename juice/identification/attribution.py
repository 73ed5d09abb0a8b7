"""Head scores by attribution: how fast the lead of the target's answer grows with each head.

    S+[j][l, h] = mean over examples of  d/dc ( log p(target's answer) - log p(other answer) )
    S-[j][l, h] = -S+[j][l, h]

for every conflict type j, layer l and head h, where c is the head's coefficient in the dual run, at
c = 0, and p the probability of an answer's first token at the prompt's end. One forward and one
backward of each prompt give all heads, for both targets: the context's scores are memory's with the
other sign (docs/method.md, "Attribution").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from juice.data.example import ConflictExample, conflict_types
from juice.head_set import HeadScores
from juice.identification.gradients import gradients
from juice.identification.scored_prompt import ScoredPrompt, scored_prompt
from juice.identification.unfinished import Unfinished
from juice.methods import ConflictType, Target
from juice.progress import Advance, Progress, silent
from juice.steered_model import SteeredModel


def attribute_heads(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    *,
    targets: dict[Target, tuple[ConflictType, ...]],
    progress: Progress = silent,
    unfinished: Unfinished | None = None,
) -> dict[Target, HeadScores]:
    """Return the scores of every head for each target over its conflict types.

    Args:
        model: The model.
        examples: The examples to score on, which all have these conflict types.
        targets: The targets, each with the conflict types that it is scored on.
        progress: Reports how many prompts are done.
        unfinished: Keeps the derivatives by conflict type, and does not compute them again.

    Raises:
        UnsupportedModelError: Gradients do not pass through the model.
    """
    wanted = [t for t in conflict_types(examples) if any(t in own for own in targets.values())]
    unfinished = unfinished or Unfinished()
    by_type = torch.zeros(len(wanted), model.loaded.layout.n_layers, model.loaded.layout.n_heads)
    with progress("scoring heads", len(wanted) * len(examples)) as advance:
        for j, conflict_type in enumerate(wanted):
            key = f"attribution {conflict_type}"
            if (kept := unfinished.get(key)) is not None:
                by_type[j] = torch.tensor(kept)
                advance(len(examples))
                continue
            by_type[j] = _mean_slope(model, examples, conflict_type, advance)
            unfinished.put(key, by_type[j].tolist())
    scores: dict[Target, HeadScores] = {}
    for target, types in targets.items():
        own = by_type[[wanted.index(t) for t in types]]
        plus = own if target == "parametric" else -own
        scores[target] = HeadScores(
            target=target, conflict_types=types, plus=plus, minus=-plus, kind="attribution"
        )
    return scores


def _mean_slope(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    conflict_type: ConflictType,
    advance: Advance,
) -> torch.Tensor:
    """Return how fast memory's lead grows with each head, float32 [n_layers, n_heads]."""
    prompts = [scored_prompt(model, e, conflict_type) for e in examples]
    found = gradients(
        model.loaded,
        [prompt.ids for prompt in prompts],
        lambda logits, chosen: lead(logits, [prompts[i] for i in chosen], "parametric"),
        advance=advance,
    )
    return found.by_head.mean(0)


def lead(logits: torch.Tensor, prompts: Sequence[ScoredPrompt], target: Target) -> torch.Tensor:
    """Return the log-probability of the target's answer less that of the other one.

    Args:
        logits: At the prompts' ends, float32 [prompts, vocabulary].
        prompts: The prompts.
        target: Whose answer is to lead.

    Returns:
        Natural logs, float32 [prompts].
    """
    other: Target = "context" if target == "parametric" else "parametric"
    pairs = torch.tensor(
        [[p.answer_tokens[target], p.answer_tokens[other]] for p in prompts], device=logits.device
    )
    ahead, behind = logits.gather(1, pairs).unbind(1)
    return ahead - behind
