"""How good the head sets are that other seeds find, for each way of finding heads.

The ways are those that the evaluated methods use. Each seed draws the examples that find heads, and
those that tune, from what is not tested on, as `juice identify` does. Accuracy is that of the
target's answers under conflict, on test examples that are the same for every seed.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from juice.data.example import ConflictExample
from juice.engine import Steer
from juice.errors import ExampleError, JuiceError
from juice.evaluation.analyses.inputs import AnalysisInputs
from juice.evaluation.answers import ask
from juice.evaluation.head_sets import FOUND_BY, PART_OF
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


def measure(inputs: AnalysisInputs) -> dict[str, Any]:
    """Return what each seed finds and how good it is.

    {n_examples, unsteered, ways: {way: {mean, interval, worst, seeds: [{seed, accuracy, heads:
    [plus, minus], betas} or {seed, accuracy, problem}]}}}; a seed that finds nothing leaves the
    model as it is. The interval is that of the mean, over the facts.
    """
    splits, target = inputs.splits, inputs.target
    pool = [*splits.identification[target], *splits.large, *splits.validation]
    ways = {FOUND_BY[PART_OF[name]] for name in inputs.methods if name in PART_OF}
    if not ways or not set(inputs.judged_types) - {"clean"}:
        raise ExampleError(
            "seeds compares ways of finding heads on conflicts; evaluate juice, served or learned "
            "on examples that all have one conflict type"
        )
    tested = limited(splits.test, N_TESTED, inputs.seed)
    unsteered = _right(inputs, tested, None)
    return {
        "n_examples": len(tested),
        "unsteered": fmean(unsteered),
        "ways": {
            way: _of_way(inputs, pool, tested, unsteered, way)
            for way in FOUND_BY.values()
            if way in ways
        },
    }


def _of_way(
    inputs: AnalysisInputs,
    pool: list[ConflictExample],
    tested: list[ConflictExample],
    unsteered: list[float],
    way: ScoreKind,
) -> dict[str, Any]:
    right: list[list[float]] = []
    rows: list[dict[str, Any]] = []
    for seed in range(N_SEEDS):
        try:
            found = _found(inputs, pool, way, seed)
            right.append(_right(inputs, tested, found))
            betas, heads = str(found.betas()), found.heads
            what: dict[str, Any] = {"betas": betas, "heads": [len(heads.plus), len(heads.minus)]}
        except JuiceError as error:
            right.append(unsteered)
            what = {"problem": str(error)}
        rows.append({"seed": seed, "accuracy": fmean(right[-1]), **what})
    means = [row["accuracy"] for row in rows]
    return {
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
