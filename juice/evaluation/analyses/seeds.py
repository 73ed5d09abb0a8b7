"""How good the head sets are that other seeds find.

Each seed draws the examples that find heads, and those that tune, from what is not tested on, as
`juice identify` does. Accuracy is that of the target's answers under conflict, on test examples
that are the same for every seed.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from juice.data.example import ConflictExample
from juice.engine import Steer
from juice.errors import ExampleError, NoConsistentHeadError
from juice.evaluation.analyses.inputs import AnalysisInputs
from juice.evaluation.answers import ask
from juice.evaluation.methods import Treatment
from juice.evaluation.splits import domain_of, limited
from juice.head_set import HeadSet
from juice.head_set.scores import ScoreKind
from juice.identification import IdentificationOptions
from juice.identification.drawing import usable_examples
from juice.identification.intervals import share_interval
from juice.identification.recipe import find_head_sets
from juice.identification.validation import N_TUNED_ON, validation_share

N_SEEDS = 10
N_TESTED = 150


def measure(way: ScoreKind, inputs: AnalysisInputs) -> dict[str, Any]:
    """Return what each seed finds and how good it is.

    {way, n_examples, unsteered, mean, interval, worst, seeds: [{seed, accuracy, heads: [plus,
    minus], betas} or {seed, accuracy, problem}]}; a seed that finds no heads leaves the model as it
    is. The interval is that of the mean, over the facts.
    """
    splits, target = inputs.splits, inputs.target
    pool = [*splits.identification[target], *splits.large, *splits.validation]
    if not set(inputs.judged_types) - {"clean"}:
        raise ExampleError("the test examples share no conflict type that seeds could be judged on")
    tested = limited(splits.test, N_TESTED, inputs.seed)
    unsteered = _right(inputs, tested, None)
    right: list[list[float]] = []
    rows: list[dict[str, Any]] = []
    for seed in range(N_SEEDS):
        try:
            found = _found(inputs, pool, way, seed)
            right.append(_right(inputs, tested, found))
            betas, heads = str(found.betas()), found.heads
            what: dict[str, Any] = {"betas": betas, "heads": [len(heads.plus), len(heads.minus)]}
        except NoConsistentHeadError as error:
            right.append(unsteered)
            what = {"problem": str(error)}
        rows.append({"seed": seed, "accuracy": fmean(right[-1]), **what})
    means = [row["accuracy"] for row in rows]
    return {
        "way": way,
        "n_examples": len(tested),
        "unsteered": fmean(unsteered),
        "mean": fmean(means),
        "interval": share_interval([fmean(own) for own in zip(*right, strict=True)]),
        "worst": min(means),
        "seeds": rows,
    }


def _found(
    inputs: AnalysisInputs, pool: list[ConflictExample], way: ScoreKind, seed: int
) -> HeadSet:
    target, name = inputs.target, f"{way}-{seed}"
    options = IdentificationOptions(method=way, seed=seed)
    drawn, rest = usable_examples(inputs.model, pool, options)
    found = find_head_sets(
        inputs.model,
        drawn,
        [target],
        options,
        names={target: name},
        validation=validation_share(rest, seed, n=N_TUNED_ON),
        progress=inputs.progress,
    )[target]
    if found.betas() is None:
        raise ExampleError(f"{name} could not be tuned")
    return found


def _right(
    inputs: AnalysisInputs, tested: list[ConflictExample], head_set: HeadSet | None
) -> list[float]:
    """Return the share of each fact's conflict prompts that get the target's answer."""
    steer = None if head_set is None else Steer(target=inputs.target, head_set=head_set)
    treatment = Treatment(target=inputs.target, steer=steer)
    treatments = {domain_of(e): treatment for e in tested}
    conflicts = [t for t in inputs.judged_types if t != "clean"]
    answers = ask(inputs.model, tested, conflicts, treatments, inputs.target)
    return [
        fmean(float(a.is_correct) for a in own if a) for own in zip(*answers.values(), strict=True)
    ]
