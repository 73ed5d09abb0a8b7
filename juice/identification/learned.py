"""Coefficients of all heads, learned along a line of accuracy against harm (docs/method.md).

Adam minimises what `lessons` has, with a penalty on the sizes of the coefficients: it keeps most of
them near zero. Those below SMALLEST are dropped, and none exceeds LARGEST.

The weight of divergence grows from stage to stage. Each stage starts where the last one ended, and
the mean over its last steps is a point on the line. It ends close to where divergence is within
what may be; points beyond that are also tried at smaller scales, since divergence falls with about
the square of the scale. Of all that are within, the one that does best on facts that are not
learned from is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from math import sqrt
from random import Random
from typing import Any, Self

import torch

from juice.errors import NoConsistentHeadError
from juice.formula import Method
from juice.head_set.schema import Betas, Head, HeadLists, Intervention, Point
from juice.head_set.scores import HeadScores
from juice.identification.lessons import Lessons
from juice.identification.task import Task
from juice.identification.tune import Search
from juice.progress import silent

FIRST_WEIGHT, N_STAGES = 5.0, 6
LEAST_GROWTH, MOST_GROWTH = 1.25, 2.0  # of the weight, from stage to stage
N_FIRST_STEPS, N_STEPS = 32, 16
FIRST_RATE, RATE, LAST_RATE = 0.1, 0.05, 0.02
LAST_SHARE = 0.4  # of a stage's steps: slower, and averaged
SMALLEST, LARGEST = 0.05, 4.0
PENALTY = 0.01
N_LOOKED_AT = 36  # facts
SCALES = (0.97, 0.85)  # of the one at which divergence should be all that it may
N_SCALED = 2  # stages, the last
CLOSE = 1.05  # times what may be: the scales reach it


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
    line: tuple[Point, ...]


def learn(task: Task, *, method: Method = "juice", start: Reached | None = None) -> Learned:
    """Learn the coefficients of all heads toward a target.

    The task's validation examples choose a point on the line. Every stage is kept in the task's
    unfinished results, and learning goes on from there.

    Args:
        task: What a head set is found for.
        method: The runs through which is learned.
        start: Where to begin, and at which weight; None: at zero, with the first weight.

    Raises:
        ExampleError: No validation example can be used.
        NoConsistentHeadError: Nothing within the allowed divergence is better than no steering.
        UnsupportedModelError: Gradients do not pass through the model.
    """
    most, quiet = task.options.max_divergence, replace(task, progress=silent)
    judge = _Judge(Search.of(quiet, method, task.held_out, N_LOOKED_AT), task, method)
    stages = [Reached.of_plain(kept) for kept in task.unfinished.get(judge.key) or ()]
    lessons = Lessons(task, task.examples, method)
    weight = FIRST_WEIGHT if start is None else start.point.weight
    for i in range(N_STAGES):
        if i >= len(stages):
            before = stages[-1] if stages else start
            coefficients = _descend(task, lessons, before, weight, judge.said(before))
            stages.append(judge.reached(coefficients, weight))
            task.unfinished.put(judge.key, [stage.to_plain() for stage in stages])
        excess = stages[i].point.divergence / most
        if excess <= CLOSE or task.is_late:
            break
        weight *= min(max(excess, LEAST_GROWTH), MOST_GROWTH)
    scaled = [
        judge.reached(stage.coefficients, stage.point.weight, scale * ideal)
        for stage in stages[-N_SCALED:]
        if (ideal := sqrt(most / max(stage.point.divergence, 1e-9))) < 1
        for scale in SCALES
    ]
    within = [one for one in (*stages, *scaled) if one.point.divergence <= most]
    best = max(within, key=lambda one: one.value, default=None)
    if best is None or best.value <= judge.unsteered or not best.coefficients.any():
        raise NoConsistentHeadError(
            f"no coefficients toward {task.target} do better than no steering within "
            f"{most:g} nats a token of divergence; allow more with --max-divergence, or give more "
            "examples (--n-examples)"
        )
    line = tuple(one.point for one in (*stages, *scaled))
    return Learned(best, line)


class _Judge:
    """What coefficients do on facts that are not learned from."""

    def __init__(self, search: Search, task: Task, method: Method) -> None:
        self._search, self._target = search, task.target
        self._runs = "one run" if method == "june" else "two runs"
        self.key = f"learning {task.target} {method}"
        self.unsteered = search.unsteered.value

    def reached(self, coefficients: torch.Tensor, weight: float, scale: float = 1.0) -> Reached:
        scaled = scale * coefficients
        kept = torch.where(scaled.abs() >= SMALLEST * min(scale, 1.0), scaled, 0.0)
        found = self._search.judged(kept)
        point = Point(weight=weight, scale=scale, won=found.won, divergence=found.divergence)
        return Reached(kept, found.value, point)

    def said(self, before: Reached | None) -> str:
        """Return the words for the next stage, with how good the last one is."""
        what = f"learning {self._target} in {self._runs}"
        if before is None:
            return what
        point = before.point
        return f"{what} ({point.won:.2f} won at {point.divergence:.2f} nats)"


def _descend(
    task: Task, lessons: Lessons, start: Reached | None, weight: float, said: str
) -> torch.Tensor:
    """Return the mean of the last coefficients of a stage."""
    layout, options = task.model.loaded.layout, task.options
    zeros = torch.zeros(layout.n_layers, layout.n_heads)
    coefficients = zeros if start is None else start.coefficients.clone()
    n_steps, rate = (N_FIRST_STEPS, FIRST_RATE) if start is None else (N_STEPS, RATE)
    penalty = PENALTY if options.penalty is None else options.penalty
    coefficients.requires_grad_()
    optimizer = torch.optim.Adam([coefficients], lr=rate, betas=(0.9, 0.99))
    last: list[torch.Tensor] = []
    steps = islice(lessons.steps(Random(f"{options.seed} {weight}")), n_steps)
    with task.progress(said, n_steps) as advance:
        for i, step in enumerate(steps):
            current = coefficients.detach()
            coefficients.grad = lessons.slope(step, current, weight) + penalty * current.sign()
            if i >= (1 - LAST_SHARE) * n_steps:
                optimizer.param_groups[0]["lr"] = LAST_RATE
                last.append(current.clone())
            optimizer.step()
            coefficients.data.clamp_(-LARGEST, LARGEST)
            advance(1)
            if task.is_late:
                break
    return torch.stack([*last[1:], coefficients.detach()]).mean(0)


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
