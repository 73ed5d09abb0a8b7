"""Other draws of examples than that of the head set: what they find, and how much they agree.

They have other seeds, or are of one relation: does what that finds carry over to the others?

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
from juice.evaluation.splits import domain_of, limited
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Head
from juice.head_set.scores import ScoreKind
from juice.identification.find import find, select_heads
from juice.identification.options import IdentificationOptions
from juice.identification.outcomes import difference_interval, share_interval

N_POOL = 24
N_DRAWS = 30
N_SHOWN = 15
N_SEEDS = 10
N_TESTED = 150
N_OF_RELATION = 10  # examples, to find heads on


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
    pool = _untested(inputs)
    tested = limited(inputs.splits.test, N_TESTED, inputs.options.seed)
    unsteered = _right(inputs, tested, None)
    right: list[list[float]] = []
    rows: list[dict[str, Any]] = []
    for seed in range(N_SEEDS):
        head_set, found = _found(inputs, pool, way, seed)
        right.append(unsteered if head_set is None else _right(inputs, tested, head_set))
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


def measure_transfer(way: ScoreKind, inputs: AnalysisInputs) -> dict[str, Any]:
    """Return the accuracy under conflict of each relation's head set on every relation.

    {way, n_examples: {relation: n}, unsteered: {relation: accuracy}, served: the same or null,
    found_on: {relation: {accuracy: {relation: accuracy}, heads: [plus, minus], betas} or {accuracy,
    problem}}, gain_at_home, gain_elsewhere, interval}. Gains are over the unsteered model, the mean
    of the relations': of a relation's facts by the heads found on it, and by those found on others.
    The interval is that of their difference, fact by fact. A relation that finds no heads leaves
    the model as it is.
    """
    pool, by_relation = _untested(inputs), dict[str, list[ConflictExample]]()
    for example in pool:
        by_relation.setdefault(domain_of(example), []).append(example)
    relations = [
        name for name in inputs.splits.domains if len(by_relation.get(name, ())) >= N_OF_RELATION
    ]
    if len(relations) < 2:
        raise ExampleError(
            f"{len(relations)} of the tested relations have {N_OF_RELATION} examples or more that "
            "are not tested on; expected at least 2"
        )
    facts = [e for e in inputs.splits.test if domain_of(e) in relations]
    tested = {name: list[ConflictExample]() for name in relations}
    for example in limited(facts, N_TESTED, inputs.options.seed):
        tested[domain_of(example)].append(example)

    def right(head_set: HeadSet | None) -> dict[str, list[float]]:
        return {name: _right(inputs, some, head_set) for name, some in tested.items()}

    unsteered, steered, found_on = right(None), dict[str, dict[str, list[float]]](), {}
    for name in relations:
        head_set, found = None, dict[str, Any]()
        try:
            head_set, found = _found(inputs, by_relation[name], way, inputs.options.seed)
        except ExampleError as error:  # such as a relation that the model knows nothing of
            found = {"problem": str(error)}
        steered[name] = unsteered if head_set is None else right(head_set)
        found_on[name] = {"accuracy": _means(steered[name]), **found}
    served = None if inputs.head_set is None else _means(right(inputs.head_set))
    home = {name: steered[name][name] for name in relations}
    elsewhere = {
        name: [
            fmean(values)
            for values in zip(*(steered[o][name] for o in relations if o != name), strict=True)
        ]
        for name in relations
    }
    before = fmean(_means(unsteered).values())
    differences = ([a - b for a, b in zip(home[n], elsewhere[n], strict=True)] for n in relations)
    return {
        "way": way,
        "n_examples": {name: len(values) for name, values in unsteered.items()},
        "unsteered": _means(unsteered),
        "served": served,
        "found_on": found_on,
        "gain_at_home": fmean(_means(home).values()) - before,
        "gain_elsewhere": fmean(_means(elsewhere).values()) - before,
        "interval": difference_interval(*differences),
    }


def _means(right: dict[str, list[float]]) -> dict[str, float]:
    return {name: fmean(values) for name, values in right.items()}


def _untested(inputs: AnalysisInputs) -> list[ConflictExample]:
    """Return the examples that are not tested on. Raises ExampleError where nothing is judged."""
    if not inputs.conflicts:
        raise ExampleError("the test examples share no conflict type that heads could be judged on")
    splits = inputs.splits
    return [*splits.identification[inputs.target], *splits.large, *splits.validation]


def _found(
    inputs: AnalysisInputs, pool: list[ConflictExample], way: ScoreKind, seed: int
) -> tuple[HeadSet | None, dict[str, Any]]:
    """Return the head set of a draw and what it has, or None and the problem."""
    how = IdentificationOptions(target=inputs.target, name=f"{way}-{seed}", method=way, seed=seed)
    try:
        found = find(inputs.model, pool, how, progress=inputs.progress).head_sets[inputs.target]
    except NoConsistentHeadError as error:
        return None, {"problem": str(error)}
    if found.betas() is None:
        raise ExampleError(f"{found.name} could not be tuned")
    n_heads = [len(found.heads.plus), len(found.heads.minus)]
    return found, {"betas": str(found.betas()), "heads": n_heads}


def _right(
    inputs: AnalysisInputs, tested: list[ConflictExample], head_set: HeadSet | None
) -> list[float]:
    """Return each fact's share of conflict prompts with the target's answer, where any fits."""
    steer = Steer(target=inputs.target, head_set=head_set) if head_set else UNSTEERED
    answers = inputs.ask(tested, inputs.conflicts, steer)
    each = zip(*answers.values(), strict=True)
    return [accuracy_of(fact) for fact in each if any(fact)]
