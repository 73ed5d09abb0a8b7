"""Other draws of examples than that of the head set: what they find, and how much they agree.

No drawn example is tested on.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, combinations
from random import Random
from statistics import fmean
from typing import Any

from juice.data.example import ConflictExample
from juice.engine.steer import Steer
from juice.errors import ExampleError, NoConsistentHeadError
from juice.evaluation.analyses.inputs import AnalysisInputs, pool_of, score_each, scores_of
from juice.evaluation.answers import accuracy_of, overlap
from juice.evaluation.methods import UNSTEERED
from juice.evaluation.splits import limited
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Head
from juice.head_set.scores import ScoreKind
from juice.identification.find import find, select_heads
from juice.identification.options import IdentificationOptions
from juice.identification.outcomes import share_interval

N_POOL = 24
N_DRAWS = 30
N_SHOWN = 15
N_SEEDS = 10
N_TESTED = 150


def measure_stability(inputs: AnalysisInputs) -> dict[str, Any]:
    """Return the agreement of the head sets of resampled examples, by |D|.

    {sizes: {|D|: {overlap: {plus, minus, both}, by_chance, n_empty, frequency: [{sign, head,
    share}]}}, n_pool, n_draws, top_k}; `overlap` is the mean Jaccard index of all pairs of draws,
    `by_chance` that of as many heads drawn at random, `frequency` how often a head is chosen.
    """
    pool, top_k = pool_of(inputs, N_POOL), inputs.options.top_ks[0]
    if len(pool) < 4:
        raise ExampleError(
            f"{len(pool)} examples can be resampled; expected at least 4 that are not tested on"
        )
    scored, rng = score_each(inputs, pool), Random(inputs.options.seed)
    n_heads = sum(layer.n_heads for layer in inputs.model.loaded.layout.layers)
    sizes = {}
    for size in sorted({1, 2, 4, 8, min(16, len(pool) - 1)}):
        if size < len(pool):
            drawn = [rng.sample(scored, size) for _ in range(N_DRAWS)]
            every = map(scores_of, drawn)
            chosen = [select_heads(scores.plus, scores.minus, top_k=top_k) for scores in every]
            sizes[str(size)] = _agreement(chosen, n_heads, rng)
    return {"sizes": sizes, "n_pool": len(pool), "n_draws": N_DRAWS, "top_k": top_k}


def _agreement(
    chosen: list[tuple[list[Head], list[Head]]], n_heads: int, rng: Random
) -> dict[str, Any]:
    plus = [{("+", head) for head in heads} for heads, _ in chosen]
    minus = [{("-", head) for head in heads} for _, heads in chosen]
    both = [a | b for a, b in zip(plus, minus, strict=True)]
    by_chance = [
        {
            (sign, i)
            for sign, heads in enumerate(pair)
            for i in rng.sample(range(n_heads), len(heads))
        }
        for pair in chosen
    ]
    counts = Counter(chain.from_iterable(both))
    often = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:N_SHOWN]
    return {
        "overlap": {
            name: _mean_overlap(sets)
            for name, sets in (("plus", plus), ("minus", minus), ("both", both))
        },
        "by_chance": _mean_overlap(by_chance),
        "n_empty": sum(not heads for heads in both),
        "frequency": [
            {"sign": sign, "head": list(head), "share": n / len(chosen)}
            for (sign, head), n in often
        ],
    }


def _mean_overlap(sets: list[set[Any]]) -> float | None:
    values = [v for a, b in combinations(sets, 2) if (v := overlap(a, b)) is not None]
    return fmean(values) if values else None


def measure_seeds(way: ScoreKind, inputs: AnalysisInputs) -> dict[str, Any]:
    """Return the accuracy of each seed's head set under conflict, all on the same test examples.

    {way, n_examples, unsteered, mean, interval, worst, seeds: [{seed, accuracy, heads: [plus,
    minus], betas} or {seed, accuracy, problem}]}; a seed that finds no heads leaves the model as it
    is. The interval is that of the mean, over the facts.
    """
    splits = inputs.splits
    pool = [*splits.identification[inputs.target], *splits.large, *splits.validation]
    if not inputs.conflicts:
        raise ExampleError("the test examples share no conflict type that seeds could be judged on")
    tested = limited(splits.test, N_TESTED, inputs.options.seed)
    unsteered = _right(inputs, tested, None)
    right: list[list[float]] = []
    rows: list[dict[str, Any]] = []
    for seed in range(N_SEEDS):
        try:
            head_set = _found(inputs, pool, way, seed)
            right.append(_right(inputs, tested, head_set))
            n_heads = [len(head_set.heads.plus), len(head_set.heads.minus)]
            found: dict[str, Any] = {"betas": str(head_set.betas()), "heads": n_heads}
        except NoConsistentHeadError as error:
            right.append(unsteered)
            found = {"problem": str(error)}
        rows.append({"seed": seed, "accuracy": fmean(right[-1]), **found})
    means = [row["accuracy"] for row in rows]
    return {
        "way": way,
        "n_examples": len(tested),
        "unsteered": fmean(unsteered),
        "mean": fmean(means),
        "interval": share_interval([fmean(fact) for fact in zip(*right, strict=True)]),
        "worst": min(means),
        "seeds": rows,
    }


def _found(
    inputs: AnalysisInputs, pool: list[ConflictExample], way: ScoreKind, seed: int
) -> HeadSet:
    how = IdentificationOptions(target=inputs.target, name=f"{way}-{seed}", method=way, seed=seed)
    found = find(inputs.model, pool, how, progress=inputs.progress).head_sets[inputs.target]
    if found.betas() is None:
        raise ExampleError(f"{found.name} could not be tuned")
    return found


def _right(
    inputs: AnalysisInputs, tested: list[ConflictExample], head_set: HeadSet | None
) -> list[float]:
    """Return each fact's share of conflict prompts with the target's answer, where any fits."""
    steer = Steer(target=inputs.target, head_set=head_set) if head_set else UNSTEERED
    answers = inputs.ask(tested, inputs.conflicts, steer)
    each = zip(*answers.values(), strict=True)
    return [accuracy_of(fact) for fact in each if any(fact)]
