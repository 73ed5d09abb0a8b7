"""The head set and the betas that do best on validation examples (docs/method.md, "Choosing").

Candidates are compared, and betas searched, by the first new token: that costs a prefill of a few
prompts for each pair. It counts how many answers begin right, less what steering breaks, beyond the
accepted loss, where it is not needed. From the best pair that is known the search goes to the best
neighbour until none is better: first along one sign at a time, in steps of a factor of two, then
also diagonally, in halves of those. The best pairs and the unsteered model then generate the
answers to all validation prompts: accuracies, gain and gate go into the set.

The paper's tuning instead steers the whole validation set with every pair of betas of a grid. The
best sum of accuracies over the target's conflict types wins; ties go to the higher mean p_y, then
to the gentler pair. A sign without heads is not varied (docs/method.md, "Stage 2").
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from random import Random
from statistics import fmean
from typing import NamedTuple, Self

import torch

from juice.data.example import ConflictExample, fact_keys
from juice.data.readers.sources import Examples, read_examples
from juice.engine.answer import Completion
from juice.engine.steer import Steer, Steering, SteeringReport, unsteered
from juice.errors import ExampleError, UsageError
from juice.formula import Method
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import HARM_STRENGTHS, Betas, Harm, Point, Validation
from juice.identification.examples import (
    in_form_of_examples,
    taking_turns,
    unseen,
    with_scored_answers,
)
from juice.identification.first_tokens import (
    FirstTokens,
    Reading,
    conflict_prompts,
    protected_prompts,
)
from juice.identification.gates import measured_gates
from juice.identification.ordinary import OrdinaryText, its_end, ordinary_pieces, some_places
from juice.identification.outcomes import Choice, Trials, difference_interval
from juice.identification.task import Task
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

# A search: first in steps of a factor of two, then in halves of those.
COARSE = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
FINE = (0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
# The paper's grid.
GRID_PLUS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
GRID_MINUS = (0.0, -1.0, -2.0, -3.0)
Pair = tuple[float, float]
GRID: tuple[Pair, ...] = tuple(product(GRID_PLUS, GRID_MINUS))
COMPARED_AT: tuple[Pair, ...] = ((1.0, -1.0), (1.0, -0.5))
UNSTEERED: Pair = (0.0, 0.0)
# A unit of either beta must gain this much: so few facts cannot tell less apart.
COST_OF_BETA = 0.01
N_READ, N_PROTECTED = 20, 12  # examples
N_PIECES = 4  # of ordinary text
OPEN_EVERY = 2  # of the prompts that leave open what is said
HOPELESS = 1.0  # times more divergence than may be
N_FINALISTS = 2


def tune(
    model: SteeredModel,
    head_set: HeadSet,
    validation: Examples,
    *,
    method: Method | None = None,
    progress: Progress = silent,
) -> HeadSet:
    """Return the head set with a method's best betas, what they did, and their gate.

    Prompts take the form in which the set's heads were found: plain, or in a chat; it warns where
    the examples were made in another, and of those about facts that found or tuned the set.

    Args:
        model: The model.
        head_set: The head set to tune.
        validation: The examples to tune on, of which those that the model knows are used; as for
            `juice.identify`.
        method: `juice` or `june`, whose betas to tune; None: the set's default.
        progress: Reports how many prompts are read and answered.

    Raises:
        ExampleError: No example can be used.
        HeadSetMismatchError: The head set is another model's.
        UsageError: The model was given another form of prompt, or each head has its own beta.
    """
    examples = read_examples(validation, split="validation")
    model.check_fits(head_set)
    if n_alike := len(examples) - len(unseen(examples, [head_set])):
        warnings.warn(
            f"{n_alike} of {len(examples)} validation examples are about facts that found or tuned "
            f"the head set {head_set.name!r}: what is measured on these says little of others",
            stacklevel=2,
        )
    model = in_form_of_examples(model.in_form_of(head_set), examples, is_chosen=True)
    task = Task(
        model=model,
        target=head_set.target,
        validation=with_scored_answers(model, examples),
        progress=progress,
    )
    chosen, found = choose(task, [head_set], method or head_set.method), head_set.identification
    if found is None or not found.facts:
        return chosen  # what found it is not known, so that a few facts would say too much
    facts = tuple(sorted({*found.facts, *fact_keys(task.validation)}))
    return chosen.model_copy(update={"identification": found.model_copy(update={"facts": facts})})


def choose_and_tune(task: Task, candidates: Sequence[HeadSet]) -> HeadSet:
    """Return the best candidate with betas of each method that is asked for; the first chooses.

    Where no validation example can be used, it warns, and the set stays as it was.
    """
    chosen = candidates[0]
    for method in task.options.methods:
        key = f"tuned {task.target} {method}"
        if (kept := task.unfinished.get(key)) is not None:
            scores = candidates[0].scores
            chosen = HeadSet.parse(kept, key).model_copy(update={"scores": scores})
            continue
        is_first = method == task.options.methods[0]
        try:
            chosen = choose(task, candidates if is_first else [chosen], method)
        except ExampleError as error:
            warnings.warn(
                f"betas of {chosen.name!r} ({method}) stay untuned: {error}", stacklevel=2
            )
            continue
        task.unfinished.put(key, chosen.model_dump(mode="json"))
    return chosen


def choose(task: Task, candidates: Sequence[HeadSet], method: Method = "juice") -> HeadSet:
    """Return the candidate that does best on the validation examples, with a method's betas tuned.

    Of those found by probes the first is taken, and tuned on the paper's grid.

    Raises:
        ExampleError: No validation example can be used.
        UsageError: Each head of a candidate has its own beta.
    """
    candidates, model = [one.having(method) for one in candidates], task.model
    chosen = candidates[0]
    betas = chosen.betas(method)
    if betas is not None and betas.is_per_head:
        raise UsageError(
            f"each head of the set {chosen.name!r} has a beta of its own; there is nothing to "
            "tune: change its strength in requests, or learn it again "
            "(`juice identify --method learned`)"
        )
    examples = task.held_out
    if task.options.method == "probe":
        pairs = grid_of(chosen, method)
    else:
        chosen, pairs = Search.of(task, examples).best(candidates, method)
        pairs = [pair for pair in pairs if pair != UNSTEERED][:N_FINALISTS]
    trials = try_betas(
        model,
        chosen,
        examples,
        method,
        task.progress,
        [*pairs, UNSTEERED],
    )
    best = best_betas(trials, pairs)
    kept = kept_open(task, {best: steering(model, chosen, best, method)})
    if chosen.model.fingerprint is None:
        # Betas are tuned on these weights, so the set belongs to them from now on.
        chosen = chosen.model_copy(update={"model": model.description.identity})
    tuned = chosen.with_betas(method, Betas(plus=best[0], minus=best[1]))
    return measured(task, tuned, trials, UNSTEERED, {method: best}, kept)


def measured(
    task: Task,
    head_set: HeadSet,
    trials: Trials[Choice],
    base: Choice,
    best: Mapping[Method, Choice],
    kept: Mapping[Choice, Sequence[float]],
    lines: Mapping[Method, Line] | None = None,
) -> HeadSet:
    """Return a head set with what each method's choice among trials did, its gate, and its harm.

    `kept` is what `kept_open` returned, and `lines` are those that coefficients were chosen from.
    """
    model, options = task.model, task.options

    def known(example: ConflictExample, prompt: str, method: Method | None) -> Completion | None:
        return trials.completion(example, prompt, base if method is None else best[method])

    gates = measured_gates(
        model, head_set, tuple(best), task.held_out, options.protect, task.progress, known
    )
    harms = harm_of(model, head_set, tuple(best), task.progress)
    ended = kept_ends(task, head_set, tuple(best))
    for method, choice in best.items():
        line = (lines or {}).get(method, Line((), options.allowed))
        gains, gate = trials.gains(choice, base), gates[method]
        effects = {"open": kept[choice], "ends": ended[method]}
        found = Validation(
            n_examples=len(gains),
            accuracy=dict(trials.outcome(choice).accuracy),
            accuracy_unsteered=dict(trials.outcome(base).accuracy),
            gain=fmean(gains),
            gain_interval=difference_interval(gains),
            by_relation=_by_relation(task.held_out, gains),
            side_effects=gate.side_effects
            | {kind: (1.0, fmean(values)) for kind, values in effects.items() if values},
            harm=harms[method],
            line=line.points,
            allowed=line.allowed,
        )
        metrics = {f"validation_{method}": found.model_dump(mode="json")}
        head_set = head_set.with_metrics(metrics).with_gate(method, gate.gate)
    return head_set


def kept_open(task: Task, steerings: Mapping[Choice, Steering]) -> dict[Choice, list[float]]:
    """Return 1 for each prompt that leaves open what is said whose next token stays, else 0."""
    text = OrdinaryText(task.model.loaded, task.left_open(held_out=True), its_end)
    found = text.kept([*steerings.values()], task.progress, "comparing what is left open")
    return dict(zip(steerings, found, strict=True))


def kept_ends(
    task: Task, head_set: HeadSet, methods: Sequence[Method]
) -> dict[Method, list[float]]:
    """Return 1 for each reply that ends where it does without steering, else 0."""
    ending = [reply.ids for reply in task.replies(held_out=True) if reply.ends]
    steers = [Steer(target=head_set.target, head_set=head_set, method=m) for m in methods]
    text = OrdinaryText(task.model.loaded, ending, its_end)
    found = text.kept(
        [*map(task.model.resolve, steers)], task.progress, "reading where replies end"
    )
    return dict(zip(methods, found, strict=True))


def _by_relation(
    examples: Sequence[ConflictExample], gains: Sequence[float]
) -> dict[str, tuple[float, int]]:
    """Return the mean gain of each relation's examples, and how many these are."""
    found = dict[str, list[float]]()
    for example, gain in zip(examples, gains, strict=True):
        if example.relation is not None:
            found.setdefault(example.relation, []).append(gain)
    return {name: (fmean(found[name]), len(found[name])) for name in sorted(found)}


def harm_of(
    model: SteeredModel, head_set: HeadSet, methods: Sequence[Method], progress: Progress
) -> dict[Method, dict[str, Harm]]:
    """Return the harm of each method's betas to ordinary text, by strength."""
    steerings = {
        (method, f"{strength:g}"): model.resolve(
            Steer(target=head_set.target, head_set=head_set, method=method, strength=strength)
        )
        for method in methods
        for strength in HARM_STRENGTHS
    }
    text = OrdinaryText(model.loaded, ordinary_pieces(model).held_out[::2])
    found = text.harm([*steerings.values()], progress, "measuring harm")
    harms: dict[Method, dict[str, Harm]] = {method: {} for method in methods}
    for (method, strength), harm in zip(steerings, found, strict=True):
        harms[method][strength] = harm
    return harms


class Line(NamedTuple):
    """The points that learned coefficients were chosen from, and the divergence allowed."""

    points: tuple[Point, ...]
    allowed: float


class Judged(NamedTuple):
    """What a way of steering does: its value, the share of conflicts won, and its divergence."""

    value: float
    won: float
    divergence: float


class Search:
    """Reads some examples under any betas of any candidate, and prompts to protect, of others.

    Ordinary text is read as well, and prompts that leave open what is said; the larger divergence
    counts. In a search of betas, what diverges more than it may has a worse value than no steering.
    """

    def __init__(
        self,
        task: Task,
        examples: Sequence[ConflictExample],
        endangered: Sequence[ConflictExample],
    ) -> None:
        self._task = task
        model, target = task.model, task.target
        self._groups = conflict_prompts(model, target, examples)
        self._protected = protected_prompts(model, target, endangered, task.options.protect)
        if not self._groups:
            raise ExampleError(
                f"the validation examples hold no conflict for the {target} target; "
                "give others with --validation"
            )
        self._tokens = FirstTokens(model.loaded, {**self._groups, **self._protected})
        pieces = ordinary_pieces(model).held_out
        text = pieces[:: max(1, len(pieces) // N_PIECES)]
        self._text = OrdinaryText(model.loaded, text, some_places)
        left_open = task.left_open(held_out=True)[::OPEN_EVERY]
        self._open = OrdinaryText(model.loaded, left_open, its_end)

    @classmethod
    def of(cls, task: Task, examples: Sequence[ConflictExample], n_read: int = N_READ) -> Self:
        """Return a search that reads some of the validation examples."""
        mixed = Random(0).sample(examples, len(examples))  # a file may be sorted by relation
        return cls(task, taking_turns(mixed[:n_read], task.target), mixed[:N_PROTECTED])

    def best(
        self,
        candidates: Sequence[HeadSet],
        method: Method,
        compared_at: Callable[[HeadSet], Sequence[Pair]] = lambda _: COMPARED_AT,
        at_least: float = -math.inf,
    ) -> tuple[HeadSet, list[Pair]]:
        """Return the best candidate, and the pairs of a method's betas that were tried, best first.

        Those that are no better than no steering are left out, unless all are.

        Candidates are compared at a few pairs, of COARSE's betas. Where none of these has the value
        `at_least`, nothing is searched, and there are no pairs.
        """
        starts = [
            (one, pair) for one in candidates for pair in grid_of(one, method, compared_at(one))
        ]
        found = self._values(starts, method, "comparing candidates for")
        if max(found) < at_least:
            return candidates[0], []
        best = starts[max(range(len(starts)), key=lambda i: found[i])][0]
        tried = {
            pair: value for (one, pair), value in zip(starts, found, strict=True) if one is best
        }

        def values(new: Sequence[Pair]) -> list[float]:
            of_new = self._values([(best, pair) for pair in new], method, "searching betas of")
            tried.update(zip(new, of_new, strict=True))
            return of_new

        pairs = climb(values, dict(tried))
        return best, [p for p in pairs if tried[p] > self.unsteered.value] or pairs

    def judged(self, coefficients: torch.Tensor, method: Method) -> Judged:
        """Return what a method's coefficients for all heads do, float32 [n_layers, n_heads].

        Their value is that of the answers alone, however far they make text diverge.
        """
        chosen = Steering(
            coefficients={layer: row for layer, row in enumerate(coefficients) if row.any()},
            report=SteeringReport(applied=True, target=self._task.target, method=method),
        )
        return self._judged([chosen], f"reading {self._task.target} answers", math.inf)[0]

    @cached_property
    def unsteered(self) -> Judged:
        """What no steering does."""
        value = fmean(map(self._before.score, self._groups))
        return Judged(value, fmean(self._before.right[t] for t in self._groups), 0.0)

    def _values(
        self, tried: Sequence[tuple[HeadSet, Pair]], method: Method, what: str
    ) -> list[float]:
        """Return values of which none beyond what divergence may be exceeds no steering's."""
        steerings = [steering(self._task.model, one, pair, method) for one, pair in tried]
        values, most = list[float](), self._task.options.allowed
        found = self._judged(steerings, f"{what} {tried[0][0].name}")
        for (value, _, divergence), (_, pair) in zip(found, tried, strict=True):
            excess = max(0.0, divergence / most - 1)
            worth = min(value, self.unsteered.value) - excess if excess else value
            values.append(worth - COST_OF_BETA * (pair[0] - pair[1]))
        return values

    def _judged(
        self, steerings: Sequence[Steering], description: str, most: float = HOPELESS
    ) -> list[Judged]:
        """Judge ways of steering; answers are not read where divergence is `most` times too large.

        Such a way counts as if it won everything and broke nothing.
        """
        before, options, progress = self._before, self._task.options, self._task.progress
        texts = {"ordinary text": self._text, "what is left open": self._open}
        harms = [
            text.harm(steerings, progress, f"{description}, {kind}") for kind, text in texts.items()
        ]
        divergences = [max(one.divergence for one in of) for of in zip(*harms, strict=True)]
        bound = (1 + most) * options.allowed
        read = [i for i, one in enumerate(divergences) if one < bound]
        readings = dict(
            zip(read, self._read([steerings[i] for i in read], description), strict=True)
        )
        found = []
        for i, one in enumerate(divergences):
            value = won = 1.0
            if (reading := readings.get(i)) is not None:
                broken = sum(
                    max(0.0, before.score(kind) - reading.score(kind) - options.accepted_loss)
                    for kind in self._protected
                )
                value = fmean(map(reading.score, self._groups)) - broken
                won = fmean(reading.right[t] for t in self._groups)
            found.append(Judged(value, won, one))
        return found

    @cached_property
    def _before(self) -> Reading:
        return self._read([unsteered()], "reading without steering")[0]

    def _read(self, steerings: Sequence[Steering], description: str) -> list[Reading]:
        return self._tokens.read(steerings, self._task.progress, description)


def climb(
    values: Callable[[Sequence[Pair]], Sequence[float]], known: dict[Pair, float]
) -> list[Pair]:
    """Return the pairs of betas that were tried, best first; ties go to the gentler.

    `values` gives the values of pairs, to be maximised, and `known` has those of pairs that were
    tried before, at least one; a sign whose betas are all 0 in them is not varied.
    """
    tried = dict(known)
    varies = (any(plus for plus, _ in known), any(minus for _, minus in known))

    def rank(pair: Pair) -> tuple[float, float]:
        return tried[pair], pair[1] - pair[0]

    centre = max(tried, key=rank)
    for grid, diagonals in ((COARSE, False), (FINE, True)):
        while True:
            around = _around(centre, grid, varies, diagonals=diagonals)
            if new := [pair for pair in around if pair not in tried]:
                tried.update(zip(new, values(new), strict=True))
            before, centre = centre, max(tried, key=rank)
            if before == centre:
                break
    return sorted(tried, key=rank, reverse=True)


def _around(
    centre: Pair, grid: Sequence[float], varies: tuple[bool, bool], *, diagonals: bool
) -> Iterator[Pair]:
    at = [grid.index(abs(beta)) for beta in centre]
    plus, minus = (
        range(max(0, i - 1), min(len(grid), i + 2)) if varied else (i,)
        for i, varied in zip(at, varies, strict=True)
    )
    for i in plus:
        for j in minus:
            if diagonals or i == at[0] or j == at[1]:
                yield grid[i], 0.0 - grid[j]


def try_betas(
    model: SteeredModel,
    head_set: HeadSet,
    examples: Sequence[ConflictExample],
    method: Method,
    progress: Progress,
    pairs: Sequence[Pair],
) -> Trials[Pair]:
    """Steer the examples with several pairs of betas of a method."""
    tried = {pair: steering(model, head_set, pair, method) for pair in pairs}
    description = f"tuning {head_set.name} betas"
    return Trials(model, examples, head_set.target, tried, description, progress)


def steering(model: SteeredModel, head_set: HeadSet, pair: Pair, method: Method) -> Steering:
    """Return the steering of a set at a pair of betas."""
    (plus, minus), target = pair, head_set.target
    return model.resolve(
        Steer(target=target, head_set=head_set, beta_plus=plus, beta_minus=minus, method=method)
    )


def grid_of(head_set: HeadSet, method: Method, pairs: Sequence[Pair] = GRID) -> list[Pair]:
    """Return the pairs of betas of a method to try; those of a sign without heads are 0."""
    heads = head_set.intervention(method).heads
    plus, minus = bool(heads.plus), bool(heads.minus)
    return list(dict.fromkeys((a * plus, b * minus) for a, b in pairs))


def best_betas(
    trials: Trials[Pair], pairs: Sequence[Pair], among: Sequence[int] | None = None
) -> Pair:
    """Return the pair that did best on the examples at the indices `among`; None: on all."""
    return max(pairs, key=lambda pair: (*trials.outcome(pair, among).rank, -(pair[0] - pair[1])))
