"""Heads whose removal helps an answer under substitution and hurts it under coherent conflict.

As in the paper's table 1, heads are ranked by how much their removal raises p of the context answer
under substitution, and shown with what it does under coherent conflict. A head is reversed when its
effect on either answer changes sign. How many of all heads are consistent, that is, have an effect
of one sign under both conflict types, is counted for each answer.
"""

from __future__ import annotations

from typing import Any

import torch

from juice.errors import ExampleError
from juice.evaluation.analyses.inputs import AnalysisInputs
from juice.evaluation.analyses.knock_out_scores import knock_out_scores
from juice.methods import CONFLICTS

N_TOP = 10


def measure(inputs: AnalysisInputs) -> dict[str, Any]:
    """Return {rows, n_reversed, n_consistent, n_heads, n_examples, changes}.

    `changes` is {answer: [type][layer][head]}, `rows` the ten heads whose removal raises p of the
    context answer most under substitution.
    """
    examples = inputs.few
    if not set(CONFLICTS) <= set(inputs.conflict_types):
        raise ExampleError("reversals need substitution and coherent prompts in every example")
    changes = knock_out_scores(inputs.model, examples, CONFLICTS, inputs.progress)
    in_context, in_memory = changes["context"], changes["parametric"]  # [type, layer, head]
    ranking = in_context[0].flatten().argsort(descending=True, stable=True).tolist()
    rows = [_row(divmod(i, in_context.shape[2]), in_context, in_memory) for i in ranking[:N_TOP]]
    consistent = {a: int(((own > 0).all(0) | (own < 0).all(0)).sum()) for a, own in changes.items()}
    return {
        "rows": rows,
        "n_reversed": sum(row["is_reversed"] for row in rows),
        "n_consistent": consistent,
        "n_heads": in_context[0].numel(),
        "n_examples": len(examples),
        "changes": {answer: own.tolist() for answer, own in changes.items()},
    }


def _row(
    head: tuple[int, int], in_context: torch.Tensor, in_memory: torch.Tensor
) -> dict[str, Any]:
    values: dict[str, Any] = {
        t: {"context": float(in_context[(j, *head)]), "parametric": float(in_memory[(j, *head)])}
        for j, t in enumerate(CONFLICTS)
    }
    turned = any(
        values["substitution"][answer] * values["coherent"][answer] < 0
        for answer in ("context", "parametric")
    )
    return {"head": list(head), **values, "is_reversed": turned}
