"""The score of every head, by sign and conflict type, on the examples that the heads were found on (method.md, stage 1).

One value: mean over examples and alphas of p_y(z_h <- z_h + alpha * z_h) - p_y.
"""

from __future__ import annotations

from typing import Any

from juice.errors import NoConsistentHeadError
from juice.evaluation.analyses.context import Context
from juice.head_set import HeadScores
from juice.identification.scores import score_heads
from juice.identification.select import chosen_heads
from juice.identification.tuning import conflict_types_of


def measure(context: Context) -> dict[str, Any]:
    """Return {conflict_types, plus, minus: [type][layer][head], chosen: {plus, minus}, n_examples, alphas}."""
    examples, settings, found = context.splits.identification[context.target], context.settings, None
    if context.head_set is not None:
        found = context.head_set.identification
    alphas_plus = found.alphas_plus if found else settings.alphas_plus
    alphas_minus = found.alphas_minus if found else settings.alphas_minus
    scores = score_heads(
        context.model.loaded, examples, targets={context.target: conflict_types_of(context.target, examples)},
        alphas_plus=alphas_plus, alphas_minus=alphas_minus, progress=context.progress,
    )[context.target]  # fmt: skip
    return {
        "conflict_types": list(scores.conflict_types),
        "plus": scores.plus.tolist(),
        "minus": scores.minus.tolist(),
        "chosen": _chosen(context, scores),
        "n_examples": len(examples),
        "alphas": [*alphas_plus, *alphas_minus],
    }


def _chosen(context: Context, scores: HeadScores) -> dict[str, Any]:
    heads = context.head_set.heads if context.head_set else None
    try:
        heads = heads or chosen_heads(scores, context.settings.top_k)
    except NoConsistentHeadError:
        return {"plus": [], "minus": []}
    return heads.model_dump(mode="json")
