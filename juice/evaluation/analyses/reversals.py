"""Heads that turn into their opposite: removed, they help an answer under substitution and hurt it under coherent conflict.

The paper's table 1: heads ranked by how much removing them raises p of the context answer under
substitution, and what removing them does under coherent conflict. A head is reversed when its
effect on either answer changes sign. And the filter of identification seen head by head: how many
are consistent under all conflict types, how many under some only.
"""

from __future__ import annotations

from typing import Any

import torch

from juice.data.example import CONFLICTS
from juice.errors import ExampleError
from juice.evaluation.analyses.inputs import AnalysisInputs
from juice.evaluation.analyses.knock_out_scores import knock_out_scores

N_TOP = 10


def measure(inputs: AnalysisInputs) -> dict[str, Any]:
    """Return {rows, n_reversed, n_consistent, n_heads, n_examples, changes}.

    `changes` is {answer: [type][layer][head]}, `rows` the ten heads whose removal helps the
    target's opposite most.
    """
    examples = inputs.few
    if not set(CONFLICTS) <= set(inputs.conflict_types):
        raise ExampleError("reversals need substitution and coherent prompts in every example")
    changes = knock_out_scores(inputs.model, examples, CONFLICTS, inputs.progress)
    told, known = changes["context"], changes["parametric"]  # [type, layer, head]
    ranking = told[0].flatten().argsort(descending=True, stable=True).tolist()
    rows = [_row(divmod(i, told.shape[2]), told, known) for i in ranking[:N_TOP]]
    consistent = {a: int(((own > 0).all(0) | (own < 0).all(0)).sum()) for a, own in changes.items()}
    return {
        "rows": rows,
        "n_reversed": sum(row["is_reversed"] for row in rows),
        "n_consistent": consistent,
        "n_heads": told[0].numel(),
        "n_examples": len(examples),
        "changes": {answer: own.tolist() for answer, own in changes.items()},
    }


def _row(head: tuple[int, int], told: torch.Tensor, known: torch.Tensor) -> dict[str, Any]:
    values: dict[str, Any] = {
        t: {"context": float(told[(j, *head)]), "parametric": float(known[(j, *head)])}
        for j, t in enumerate(CONFLICTS)
    }
    turned = any(
        values["substitution"][answer] * values["coherent"][answer] < 0
        for answer in ("context", "parametric")
    )
    return {"head": list(head), **values, "is_reversed": turned}
