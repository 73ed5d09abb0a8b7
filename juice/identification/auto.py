"""The way that validates best: betas of a few heads, or a beta for each, in one run or in two.

One run costs nothing to serve, so it is taken unless another way is likely better: the 80 %
interval of the paired difference lies above zero. That is the mean of two: how often the target's
answer is given to validation facts, and how many prompts that leave open what is said keep their
likeliest token. A worse way passes in one case of ten at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from juice.engine.steer import Steer, unsteered
from juice.errors import NoConsistentHeadError
from juice.formula import Method
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Betas, Methods
from juice.identification.first_tokens import table_of
from juice.identification.learned import (
    Reached,
    heads_of,
    learn,
    looked_at,
    responses_of,
    scores_of,
)
from juice.identification.ordinary import expected_divergence
from juice.identification.outcomes import Z_LIKELY, Trials, difference_interval
from juice.identification.task import Task
from juice.identification.tune import (
    UNSTEERED,
    Line,
    Pair,
    Search,
    kept_open,
    measured,
    steering,
)

BASE = -1  # the choice not to steer, beside the indices of ways
FIRST_BETAS = (0.25, 0.5, 1.0)  # of a few heads: that which is within what divergence may be
WITHIN_REACH = 0.15  # of the value of what was learned: a search of betas may gain this much


@dataclass(frozen=True)
class Way:
    """A head set that one way found, and the method that it is for."""

    head_set: HeadSet
    method: Method
    line: Line | None = None
    value: float = -math.inf  # on the facts that are looked at; of learned coefficients


def learned_ways(task: Task, methods: Sequence[Method]) -> list[Way]:
    """Learn coefficients for each method, each from what the one before reached.

    Raises NoConsistentHeadError where the first reaches nothing.
    """
    ways: list[Way] = []
    start: Reached | None = None
    search = looked_at(task)
    for method in methods:
        try:
            found = learn(task, search, method=method, start=start)
        except NoConsistentHeadError:
            if not ways:
                raise
            break
        start, table = found.best, found.best.coefficients
        methods_given = Methods.model_validate({method: heads_of(table)})
        one = task.head_set(methods_given, scores_of(task, table), method=method)
        ways.append(Way(one, method, found.line, found.best.value))
        if task.is_late:
            break
    return ways


def best_way(task: Task, candidates: Callable[[], Sequence[HeadSet]]) -> HeadSet:
    """Return a head set with the way that validates best as its default, and the other method's.

    `candidates` returns sets of a few heads without betas. Raises NoConsistentHeadError where no
    way finds any heads.
    """
    ways, reasons = list[Way](), list[NoConsistentHeadError]()
    try:
        ways += learned_ways(task, ("june", "juice"))
    except NoConsistentHeadError as reason:
        reasons.append(reason)
    if not (ways and task.is_late):
        learned = max((way.value for way in ways), default=-math.inf)
        try:
            ways += _tuned(task, candidates(), learned - WITHIN_REACH)
        except NoConsistentHeadError as reason:
            reasons.append(reason)
    if not ways:
        raise reasons[0]
    return decided(task, ways)


def _tuned(task: Task, candidates: Sequence[HeadSet], at_least: float) -> list[Way]:
    """Return the best candidate with the two betas that do best; none where none does good.

    Betas are searched where a candidate comes near to a value at the first ones that are tried.
    """
    search = Search.of(task, task.held_out)
    head_set, pairs = search.best(candidates, "juice", partial(_first_pairs, task), at_least)
    if not pairs or pairs[0] == UNSTEERED:
        return []
    plus, minus = pairs[0]
    return [Way(head_set.with_betas("juice", Betas(plus=plus, minus=minus)), "juice")]


def _first_pairs(task: Task, head_set: HeadSet) -> list[Pair]:
    """Return the largest betas at which ordinary text should diverge by no more than it may."""
    model, most = task.model, task.options.allowed
    unit = table_of(model.loaded, steering(model, head_set, (1.0, -1.0), "juice"))
    at_one = expected_divergence(responses_of(task), unit)  # grows with the square of the betas
    beta = max((b for b in FIRST_BETAS if b * b * at_one <= most), default=FIRST_BETAS[0])
    return [(beta, -beta)]


def decided(task: Task, ways: Sequence[Way]) -> HeadSet:
    """Return a head set with the best way of each method, measured.

    The best is its default, unless it breaks what needs no steering and the other does not.
    """
    steers = [Steer(target=task.target, head_set=way.head_set, method=way.method) for way in ways]
    tried = {BASE: unsteered(), **{i: task.model.resolve(one) for i, one in enumerate(steers)}}
    trials = Trials(
        task.model,
        task.held_out,
        task.target,
        tried,
        f"comparing {task.name}",
        task.progress,
    )
    kept = kept_open(task, tried)

    def differences(i: int, j: int) -> list[list[float]]:
        groups = [trials.gains(i, j), [a - b for a, b in zip(kept[i], kept[j], strict=True)]]
        return [values for values in groups if values]

    best: dict[Method, int] = {}
    for i, way in enumerate(ways):
        before = best.get(way.method)
        if before is None or fmean(map(fmean, differences(i, before))) > 0:
            best[way.method] = i
    first = best.get("june", best.get("juice", 0))
    for i in best.values():
        interval = difference_interval(*differences(i, first), z=Z_LIKELY)
        if interval is not None and interval.low > 0:
            first = i
    given = {
        way.method: way.head_set.intervention(way.method)
        for way in map(ways.__getitem__, best.values())
    }
    chosen = ways[first].head_set.model_copy(update={"methods": Methods(**given)})
    lines = {method: line for method, i in best.items() if (line := ways[i].line) is not None}
    found = measured(task, chosen, trials, BASE, best, kept, lines)

    harmless = [
        method
        for method in best
        if (what := found.validation(method)) is not None
        and not what.is_weak
        and not what.broken(task.options.accepted_loss)
    ]
    if harmless and found.method not in harmless:
        return found.model_copy(update={"method": harmless[0]})
    return found
