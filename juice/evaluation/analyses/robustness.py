"""Accuracy over |D| examples, K heads and the betas, one varied at a time (the paper's figure 5).

|D| and K change the heads, with the head set's own betas (+1 and -1 where each head has its own).
The grid of betas is finer and wider than the one that tuning searches. Accuracy is the mean over
the target's conflict types.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from juice.data.example import ConflictExample
from juice.engine import Steer
from juice.errors import ExampleError
from juice.evaluation.analyses.inputs import AnalysisInputs
from juice.evaluation.analyses.scored_pool import pool_of, score_each, scores_of
from juice.evaluation.answers import ask
from juice.evaluation.methods import Treatment
from juice.evaluation.metrics import mean
from juice.evaluation.splits import domain_of, limited
from juice.head_set import Betas, Head, HeadScores
from juice.identification.selection import select_heads

SIZES = range(1, 11)
TOP_KS = (1, 2, 3, 5, 7, 10, 15, 20, 30)
BETAS_PLUS = tuple(0.5 * i for i in range(11))
BETAS_MINUS = tuple(-0.5 * i for i in range(11))
N_GRID_EXAMPLES = 20


def measure(inputs: AnalysisInputs) -> dict[str, Any]:
    """Return the accuracy for each |D|, each K and each pair of betas.

    {examples: [{n, accuracy}], heads: [{k, accuracy}], betas: {plus, minus, accuracy:
    [plus][minus], n_examples}, unsteered, beta, n_examples}
    """
    if inputs.head_set is None:
        raise ExampleError("there is no head set to vary")
    betas = _betas(inputs)
    scored = score_each(inputs, pool_of(inputs, max(SIZES)))
    few, top_k = inputs.few, inputs.options.top_ks[0]
    n_drawn = min(len(inputs.splits.identification[inputs.target]), len(scored))

    def accuracy_of(scores: HeadScores, k: int) -> float:
        plus, minus = select_heads(scores.plus, scores.minus, top_k=k)
        return accuracy(inputs, few, plus, minus, betas)

    by_size = [
        {"n": n, "accuracy": accuracy_of(scores_of(scored[:n]), top_k)}
        for n in SIZES
        if n <= len(scored)
    ]
    by_k = [{"k": k, "accuracy": accuracy_of(scores_of(scored[:n_drawn]), k)} for k in TOP_KS]
    return {
        "examples": by_size,
        "heads": by_k,
        "betas": _grid(inputs, limited(few, N_GRID_EXAMPLES, inputs.seed)),
        "unsteered": accuracy(inputs, few, [], [], betas),
        "beta": betas.model_dump(),
        "n_examples": len(few),
    }


def _betas(inputs: AnalysisInputs) -> Betas:
    own = inputs.head_set.betas() if inputs.head_set else None
    return Betas(plus=1.0, minus=-1.0) if own is None or own.is_per_head else own


def _grid(inputs: AnalysisInputs, examples: Sequence[ConflictExample]) -> dict[str, Any]:
    assert inputs.head_set is not None, "checked above"
    heads = inputs.head_set.heads
    # A sign without heads changes nothing, so one value is enough.
    plus, minus = BETAS_PLUS if heads.plus else (0.0,), BETAS_MINUS if heads.minus else (0.0,)
    rows: list[list[float]] = []
    with inputs.progress("varying the betas", len(plus) * len(minus)) as advance:
        for beta_plus in plus:
            row: list[float] = []
            rows.append(row)
            for beta_minus in minus:
                betas = Betas(plus=beta_plus, minus=beta_minus)
                row.append(accuracy(inputs, examples, heads.plus, heads.minus, betas))
                advance(1)
    return {"plus": list(plus), "minus": list(minus), "accuracy": rows, "n_examples": len(examples)}


def accuracy(
    inputs: AnalysisInputs,
    examples: Sequence[ConflictExample],
    plus: Iterable[Head],
    minus: Iterable[Head],
    betas: Betas,
) -> float:
    """Return the mean accuracy over the target's conflict types with these heads and betas.

    Args:
        inputs: The model and its target.
        examples: The examples to ask.
        plus: The + heads.
        minus: The - heads; without any heads nothing is steered.
        betas: The betas of both signs.
    """
    model, target, steer = inputs.model, inputs.target, None
    if (plus := tuple(plus)) or minus:
        head_set = model.make_head_set(
            name="varied",
            target=target,
            plus=plus,
            minus=tuple(minus),
            beta_plus=betas.plus,
            beta_minus=betas.minus,
        )
        steer = Steer(target=target, head_set=head_set)
    treatments = {domain_of(e): Treatment(target=target, steer=steer) for e in examples}
    answers = ask(model, examples, inputs.judged_types, treatments, target)
    return mean([mean([float(a.is_correct) for a in own if a]) for own in answers.values()])
