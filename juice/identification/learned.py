"""Coefficients of all heads, learned along a line of accuracy against harm (docs/method.md).

Minimised is what `lessons` has, with a penalty on the sizes of the coefficients, by steps of
natural gradient: among the changes that move ordinary text and prompts that leave open what is said
equally far, by how these respond to each head (`ordinary.responses`), each step is the one that
lowers it most. Coefficients below SMALLEST are dropped, and none exceeds LARGEST.

The weight of divergence changes from stage to stage, by how far divergence is from what may be.
Each stage starts where the last one ended, and the mean over its last steps is a point on the line.
A stage that does well enough is the last; of several after the first only the mean counts, since
single ones wander. What counts is also tried at the scale at which divergence should be all that it
may, since it grows with about the square of the scale. Of all that is within, what does best on
facts that are not learned from is taken. In two runs the layers between the lowest and the highest
work twice, so outer ones that have little are left out where that wins as many conflicts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil, sqrt
from random import Random
from typing import Any, Self

import torch

from juice.errors import NoConsistentHeadError
from juice.formula import Method
from juice.head_set.schema import Betas, Head, HeadLists, Intervention, Point
from juice.head_set.scores import HeadScores
from juice.identification.lessons import Lessons
from juice.identification.options import MORE_DIVERGENCE
from juice.identification.ordinary import responses
from juice.identification.task import Task
from juice.identification.tune import Line, Search

FIRST_WEIGHT, N_STAGES = 10.0, 6
LEAST_CHANGE, MOST_CHANGE = 0.5, 2.0  # of the weight, from stage to stage
N_FIRST_STEPS, N_STEPS = 24, 8
# How far a stage's first step moves text and what is left open, in nats a token; later ones less.
FIRST_REACH, REACH = 0.004, 0.002
MOMENTUM, DAMPING = 0.7, 0.5
LAST_SHARE = 0.4  # of a stage's steps, which are averaged
SMALLEST, LARGEST = 0.05, 4.0
PENALTY = 0.01
N_LOOKED_AT = 36  # facts
# Of the scale at which divergence should be all that it may; and how often one is tried.
NEAR, MOST_SCALE, N_TRIED = 0.97, 1.5, 3
ALIKE = 0.02  # in value: the narrower is taken where it wins as many conflicts
NARROW = 0.1  # of the sum of squares: what the outer layers that two runs do without may have
FAR_BELOW, CLOSE = 0.5, 1.05  # times what may be: there is room; the scales reach it
ENOUGH = 0.7  # in value: what a stage that is the last wins, less what it breaks
# Of conflicts: where fewer are won, more divergence is taken that gains so much in value.
LITTLE, CLEARLY = 0.7, 0.05


@dataclass(frozen=True)
class Reached:
    """Coefficients of all heads, float32 [n_layers, n_heads], and what they do."""

    coefficients: torch.Tensor
    value: float
    point: Point

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "coefficients": self.coefficients.tolist(),
            "value": self.value,
            "point": self.point.model_dump(),
        }

    @classmethod
    def of_plain(cls, kept: dict[str, Any]) -> Self:
        """Return what `to_plain` gave."""
        point = Point.model_validate(kept["point"])
        return cls(torch.tensor(kept["coefficients"]), kept["value"], point)


@dataclass(frozen=True)
class Learned:
    """The best that was reached, and the line that it was chosen from."""

    best: Reached
    line: Line


def looked_at(task: Task) -> Search:
    """Return the reading of those validation examples that choose a point on the line.

    Raises ExampleError where no validation example can be used.
    """
    return Search.of(task, task.held_out, N_LOOKED_AT)


def learn(
    task: Task, search: Search, *, method: Method = "juice", start: Reached | None = None
) -> Learned:
    """Learn the coefficients of all heads toward a target.

    What `search` reads chooses a point on the line. Where little is won within the divergence that
    is allowed by default, it warns, and takes more. Every stage is kept in the task's unfinished
    results, and learning goes on from there.

    Args:
        task: What a head set is found for.
        search: Reads the validation examples that are `looked_at`.
        method: The runs through which is learned.
        start: Where to begin, and at which weight; None: at zero, with the first weight.

    Raises:
        NoConsistentHeadError: Nothing within the allowed divergence is better than no steering.
        UnsupportedModelError: Gradients do not pass through the model.
    """
    most = task.options.allowed
    judge = _Judge(search, task, method)
    stages = [Reached.of_plain(kept) for kept in task.unfinished.get(judge.key) or ()]
    lessons, metric = Lessons(task, task.examples, method), _Metric(responses_of(task))
    weight = FIRST_WEIGHT if start is None else start.point.weight
    for i in range(N_STAGES):
        if i >= len(stages):
            before = stages[-1] if stages else start
            coefficients = _descend(task, lessons, metric, before, weight, judge.said(before))
            stages.append(judge.reached(coefficients, weight))
            task.unfinished.put(judge.key, [stage.to_plain() for stage in stages])
        excess = stages[i].point.divergence / most
        is_good = FAR_BELOW <= excess <= CLOSE and stages[i].value >= ENOUGH
        if is_good or task.is_late:
            break
        weight *= min(max(excess, LEAST_CHANGE), MOST_CHANGE)
    settled = stages if start is not None else stages[1:]
    means = [judge.mean(settled)] if len(settled) > 1 else []
    tried = [*stages, *means]
    chosen_from = means or stages
    best = judge.best_within(most, tried, chosen_from)
    if task.options.max_divergence is None and (best is None or best.point.won < LITTLE):
        other = judge.best_within(MORE_DIVERGENCE, tried, chosen_from)
        if other is not None and (best is None or other.value > best.value + CLEARLY):
            warnings.warn(
                f"toward {task.target} in {judge.runs} {best.point.won if best else 0:.2f} of the "
                f"conflicts are won where ordinary text, and what is left open, diverge by at most "
                f"{most:g} nats a token, and {other.point.won:.2f} by {MORE_DIVERGENCE:g}, "
                f"which is taken; --max-divergence {most:g} forbids that",
                stacklevel=2,
            )
            best, most = other, MORE_DIVERGENCE
    # Those from the lowest to the highest layer work twice.
    if best is not None and method == "juice":
        narrow = judge.narrowed(best)
        tried.append(narrow)
        best = narrow if judge.is_as_good(narrow, best, most) else best
    if best is None or best.value <= judge.unsteered or not best.coefficients.any():
        raise NoConsistentHeadError(
            f"no coefficients toward {task.target} do better than no steering within "
            f"{most:g} nats a token of divergence; allow more with --max-divergence, or give more "
            "examples (--n-examples)"
        )
    return Learned(best, Line(tuple(one.point for one in tried), most))


class _Judge:
    """What coefficients do on facts that are not learned from."""

    def __init__(self, search: Search, task: Task, method: Method) -> None:
        self._search, self._target, self._method = search, task.target, method
        self.runs = "one run" if method == "june" else "two runs"
        self.key = f"learning {task.target} {method}"
        self.unsteered = search.unsteered.value

    def reached(self, coefficients: torch.Tensor, weight: float) -> Reached:
        """Return what coefficients do without those that are small."""
        return self._read(torch.where(coefficients.abs() >= SMALLEST, coefficients, 0.0), weight)

    def mean(self, several: Sequence[Reached]) -> Reached:
        """Return what the mean of coefficients does."""
        mean = torch.stack([one.coefficients for one in several]).mean(0)
        return self.reached(mean, several[-1].point.weight)

    def scaled(self, one: Reached, scale: float) -> Reached:
        """Return what coefficients do at a scale."""
        point = one.point
        kept = (scale * one.coefficients).clamp(-LARGEST, LARGEST)
        return self._read(kept, point.weight, scale * point.scale)

    def _read(self, kept: torch.Tensor, weight: float, scale: float = 1.0) -> Reached:
        found = self._search.judged(kept, self._method)
        point = Point(weight=weight, scale=scale, won=found.won, divergence=found.divergence)
        return Reached(kept, found.value, point)

    def narrowed(self, one: Reached) -> Reached:
        """Return what coefficients do without those of outer layers, of little size."""
        kept, point = one.coefficients.clone(), one.point
        sizes = kept.double().square().sum(1).tolist()  # by layer
        left, (first, last) = NARROW * sum(sizes), (0, len(sizes) - 1)
        while first < last and (least := min(sizes[first], sizes[last])) <= left:
            outer = first if sizes[first] == least else last
            kept[outer] = 0.0
            left -= least
            first, last = first + (outer == first), last - (outer == last)
        return self._read(kept, point.weight, point.scale)

    def best_within(
        self, most: float, tried: list[Reached], stages: Sequence[Reached]
    ) -> Reached | None:
        """Return the best of stages within what may be, as they are or at scales that are noted."""
        scaled = [found for stage in stages for found in self.scaled_within(stage, most)]
        tried += scaled
        within = [one for one in (*stages, *scaled) if one.point.divergence <= most]
        return max(within, key=lambda one: one.value, default=None)

    def is_as_good(self, one: Reached, best: Reached, most: float) -> bool:
        """Return whether one wins as many conflicts as the best, within what may be."""
        is_alike = one.value > max(best.value - ALIKE, self.unsteered)
        return one.point.won >= best.point.won and is_alike and one.point.divergence <= most

    def scaled_within(self, stage: Reached, most: float) -> Iterator[Reached]:
        """Yield what the stage does at other scales, until one is within what may be."""
        found, scale = stage, MOST_SCALE
        for _ in range(N_TRIED):
            ideal = found.point.scale * sqrt(most / max(found.point.divergence, 1e-9))
            scale = min(NEAR * ideal, scale)
            yield (found := self.scaled(stage, scale))
            if found.point.divergence <= most:
                break

    def said(self, before: Reached | None) -> str:
        """Return the words for the next stage, with how good the last one is."""
        what = f"learning {self._target} in {self.runs}"
        if before is None:
            return what
        point = before.point
        return f"{what} ({point.won:.2f} won at {point.divergence:.2f} nats)"


class _Metric:
    """How far changes of coefficients move text, and what is left open: d F d / 2, in nats a token.

    F is the Fisher information that `responses` tell, [pieces, n_layers, n_heads]. It is damped,
    since few pieces cannot tell what every change does.
    """

    def __init__(self, responses: torch.Tensor) -> None:
        rows = responses.flatten(1).double()
        fisher = rows.T @ rows / len(rows)
        damping = DAMPING * fisher.diagonal().mean().clamp(min=1e-9)
        damped = fisher + damping * torch.eye(len(fisher))
        self._root, self._diagonal = torch.linalg.cholesky(damped), damped.diagonal()

    def step(
        self, coefficients: torch.Tensor, slope: torch.Tensor, reach: float, penalty: float
    ) -> torch.Tensor:
        """Return coefficients from which what has this slope is lowered most, as far as `reach`.

        The penalty on their sizes then draws each toward zero, by its share of the step.
        """
        given = slope.flatten().double()
        change = -torch.cholesky_solve(given[:, None], self._root)[:, 0]
        moved = -float(change @ given) / 2
        length = sqrt(reach / max(moved, 1e-12))
        new = coefficients.flatten().double() + length * change
        left = (new.abs() - penalty * length / self._diagonal).clamp(min=0.0)
        return (new.sign() * left).float().view_as(coefficients)


def responses_of(task: Task) -> torch.Tensor:
    """Return how text and what is left open respond: the same for both targets and methods."""
    key = "responses of ordinary text"
    if (kept := task.unfinished.get(key)) is None:
        kept = responses(task.model, task.progress, task.left_open()).tolist()
        task.unfinished.put(key, kept)
    return torch.tensor(kept)


def _descend(
    task: Task,
    lessons: Lessons,
    metric: _Metric,
    start: Reached | None,
    weight: float,
    said: str,
) -> torch.Tensor:
    """Return the mean of the last coefficients of a stage."""
    layout, options = task.model.loaded.layout, task.options
    zeros = torch.zeros(layout.n_layers, layout.n_heads)
    coefficients = zeros if start is None else start.coefficients
    n_steps, reach = (N_FIRST_STEPS, FIRST_REACH) if start is None else (N_STEPS, REACH)
    penalty = PENALTY if options.penalty is None else options.penalty
    slope, last = zeros, list[torch.Tensor]()
    steps = islice(lessons.steps(Random(f"{options.seed} {weight}")), n_steps)
    with task.progress(said, n_steps) as advance:
        for i, step in enumerate(steps):
            new = lessons.slope(step, coefficients, weight)
            slope = MOMENTUM * slope + (1 - MOMENTUM) * new if i else new
            left = reach * (1 - i / n_steps)
            coefficients = metric.step(coefficients, slope, left, penalty)
            coefficients = coefficients.clamp(-LARGEST, LARGEST)
            last = [*last, coefficients][-ceil(LAST_SHARE * n_steps) :]
            advance(1)
            if task.is_late:
                break
    return torch.stack(last).mean(0)


def heads_of(coefficients: torch.Tensor) -> Intervention:
    """Return the heads and their betas in a table [n_layers, n_heads], strongest first.

    Raises NoConsistentHeadError where all are zero.
    """
    kept = sorted(
        (Head(*place) for place in coefficients.nonzero().tolist()),
        key=lambda head: -abs(float(coefficients[head])),
    )
    if not kept:
        raise NoConsistentHeadError(
            "no head's coefficient stayed away from zero; lower the penalty (--penalty), or "
            "give more examples (--n-examples)"
        )
    heads = HeadLists(
        plus=tuple(head for head in kept if coefficients[head] > 0),
        minus=tuple(head for head in kept if coefficients[head] < 0),
    )
    plus, minus = (
        tuple(float(coefficients[head]) for head in signed) for signed in (heads.plus, heads.minus)
    )
    return Intervention(heads=heads, betas=Betas(plus=plus, minus=minus))


def scores_of(task: Task, coefficients: torch.Tensor) -> HeadScores:
    """Return coefficients [n_layers, n_heads] as scores: one table for all conflict types."""
    tables = coefficients.repeat(len(task.conflict_types), 1, 1)
    return HeadScores(
        target=task.target,
        conflict_types=task.conflict_types,
        plus=tables.clamp(min=0),
        minus=(-tables).clamp(min=0),
        kind="learned",
    )
