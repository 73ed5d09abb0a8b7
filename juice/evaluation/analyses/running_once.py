"""One run against two, over the best 1 to 10 heads (the paper's table 2 and figure 6).

Heads whose removal alone raises p of the target's answer under a conflict type are ranked by how
much, on the identification and validation examples. On the test examples the best i of them are
removed together, by z_h <- z_h - z_h: in one run, of the stream that is already changed, and in
two, of the clean run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from juice.data.example import ConflictExample
from juice.engine import Steer
from juice.errors import ExampleError
from juice.evaluation.analyses.inputs import N_EXAMPLES, AnalysisInputs
from juice.evaluation.analyses.knock_out_scores import knock_out_scores
from juice.evaluation.methods import Treatment
from juice.evaluation.metrics import mean
from juice.evaluation.splits import limited
from juice.head_set import Head
from juice.methods import METHODS, ConflictType, Method

N_HEADS = 10


def measure(inputs: AnalysisInputs) -> dict[str, Any]:
    """Return p of the target's answer, mean over examples, with 0 to 10 heads removed.

    {n_examples, n_finders, by_type: {conflict type: {heads, none: p, juice: [p with 1, 2 ... heads
    removed], june: [...]}}}
    """
    finders = limited(
        [*inputs.splits.identification[inputs.target], *inputs.splits.validation],
        N_EXAMPLES,
        inputs.seed,
    )
    measured: dict[str, Any] = {
        "n_examples": len(inputs.few),
        "n_finders": len(finders),
        "by_type": {},
    }
    for conflict_type in inputs.judged_types:
        if conflict_type == "clean":
            continue
        finding = [e for e in finders if conflict_type in e.prompts]
        if not finding:
            continue
        changes = knock_out_scores(inputs.model, finding, (conflict_type,), inputs.progress)[
            inputs.target
        ][0]
        heads = best_heads(changes)
        own: dict[str, Any] = {
            "heads": [list(head) for head in heads],
            "none": mean_p(inputs, conflict_type, [], "juice"),
        }
        for method in METHODS:
            own[method] = [
                mean_p(inputs, conflict_type, heads[: i + 1], method) for i in range(len(heads))
            ]
        measured["by_type"][conflict_type] = own
    if not measured["by_type"]:
        raise ExampleError(
            "no conflict type is in every test example and in an example that ranks heads"
        )
    return measured


def best_heads(changes: torch.Tensor) -> list[Head]:
    """Return up to ten heads whose removal raises p, best first, by changes [layers, heads]."""
    heads = [Head(layer, index) for layer, index in (changes > 0).nonzero().tolist()]
    return sorted(heads, key=lambda head: (-float(changes[head]), head))[:N_HEADS]


def mean_p(
    inputs: AnalysisInputs, conflict_type: ConflictType, heads: Sequence[Head], method: Method
) -> float:
    """Return the mean p of the target's answer with these heads removed.

    Args:
        inputs: The model, its target and the test examples.
        conflict_type: Which of their prompts to ask.
        heads: The heads to remove; none: the unsteered model.
        method: `june` for one run, `juice` for two.
    """
    model, target, steer = inputs.model, inputs.target, None
    if heads:
        head_set = model.make_head_set(
            name="removed", target=target, minus=heads, beta_minus=-1.0, method=method
        )
        steer = Steer(target=target, head_set=head_set, method=method)
    treatment = Treatment(target=target, steer=steer)
    examples: list[ConflictExample] = inputs.few
    requests = [treatment.request(model, e, conflict_type, max_tokens=1) for e in examples]
    watched = [c.watched for c in model.engine.generate(requests)]
    return mean([math.exp(own[0 if target == "parametric" else 1]) for own in watched if own])
