"""The way that validates best: betas of a few heads, or a beta for each, in one run or in two.

One run costs nothing to serve, so it is taken unless another way is certainly better on the
validation facts: the 95 % interval of the paired difference in how often the target's answer is
given lies above zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from juice.engine.steer import Steer, unsteered
from juice.errors import NoConsistentHeadError
from juice.formula import Method
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Betas, Methods, Point
from juice.identification.learned import Reached, heads_of, learn, scores_of
from juice.identification.outcomes import Trials, difference_interval
from juice.identification.task import Task
from juice.identification.tune import UNSTEERED, Search, measured

BASE = -1  # the choice not to steer, beside the indices of ways


@dataclass(frozen=True)
class Way:
    """A head set that one way found, and the method that it is for."""

    head_set: HeadSet
    method: Method
    line: tuple[Point, ...] = ()


def learned_ways(task: Task, methods: Sequence[Method]) -> list[Way]:
    """Learn coefficients for each method, each from what the one before reached.

    Raises NoConsistentHeadError where the first reaches nothing.
    """
    ways: list[Way] = []
    start: Reached | None = None
    for method in methods:
        try:
            found = learn(task, method=method, start=start)
        except NoConsistentHeadError:
            if not ways:
                raise
            break
        start, table = found.best, found.best.coefficients
        methods_given = Methods.model_validate({method: heads_of(table)})
        one = task.head_set(methods_given, scores_of(task, table), method=method)
        ways.append(Way(one, method, found.line))
        if task.is_late:
            break
    return ways


def best_way(task: Task, candidates: Callable[[], Sequence[HeadSet]]) -> HeadSet:
    """Return a head set with the way that validates best as its default, and the other method's.

    `candidates` returns sets of a few heads without betas. Raises NoConsistentHeadError where no
    way finds any heads.
    """
    ways, reasons = list[Way](), list[NoConsistentHeadError]()
    finders: list[Callable[[], list[Way]]] = [
        lambda: learned_ways(task, ("june", "juice")),
        lambda: _tuned(task, candidates()),
    ]
    for find in finders:
        try:
            ways += find()
        except NoConsistentHeadError as reason:
            reasons.append(reason)
        if ways and task.is_late:
            break
    if not ways:
        raise reasons[0]
    return decided(task, ways)


def _tuned(task: Task, candidates: Sequence[HeadSet]) -> list[Way]:
    """Return the best candidate with the two betas that do best; none where none does good."""
    head_set, pairs = Search.of(task, "juice", task.held_out).best(candidates)
    if pairs[0] == UNSTEERED:
        return []
    plus, minus = pairs[0]
    return [Way(head_set.with_betas("juice", Betas(plus=plus, minus=minus)), "juice")]


def decided(task: Task, ways: Sequence[Way]) -> HeadSet:
    """Return a head set with the best way of each method, measured; the best is its default."""
    steers = [Steer(target=task.target, head_set=way.head_set, method=way.method) for way in ways]
    tried = {BASE: unsteered(), **{i: task.model.resolve(one) for i, one in enumerate(steers)}}
    trials = Trials(
        task.model, task.held_out, task.target, tried, f"comparing {task.name}", task.progress
    )
    best: dict[Method, int] = {}
    for i, way in enumerate(ways):
        before = best.get(way.method)
        if before is None or fmean(trials.gains(i, before)) > 0:
            best[way.method] = i
    first = best.get("june", best.get("juice", 0))
    for i in best.values():
        interval = difference_interval(trials.gains(i, first))
        if interval is not None and interval.low > 0:
            first = i
    given = {
        way.method: way.head_set.intervention(way.method)
        for way in map(ways.__getitem__, best.values())
    }
    chosen = ways[first].head_set.model_copy(update={"methods": Methods(**given)})
    for method, i in best.items():
        chosen = measured(task, chosen, method, trials, i, BASE, ways[i].line)
    return chosen
