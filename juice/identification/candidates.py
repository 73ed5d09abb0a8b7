"""The candidate and the betas under which right first tokens lead most.

That costs a prefill of a few prompts for each pair of betas. What protected prompts lose counts
against them, beyond the accepted loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch

from juice.data.example import ConflictExample, judged_types
from juice.engine import Steering, SteeringReport
from juice.engine.steering import unsteered
from juice.errors import ExampleError
from juice.head_set import HeadSet
from juice.identification.first_tokens import Asked, FirstTokens, Reading
from juice.identification.grid import steering
from juice.identification.protection import Protection, protected_prompts
from juice.identification.search import Pair, climb
from juice.methods import Method, Target
from juice.progress import Progress
from juice.steered_model import SteeredModel

COMPARED_AT: tuple[Pair, ...] = ((1.0, -1.0), (1.0, -0.5))
# A unit of either beta must gain this much: so few facts cannot tell less apart.
COST_OF_BETA = 0.01
UNSTEERED: Pair = (0.0, 0.0)


class Search:
    """Reads some examples under any betas of any candidate.

    Args:
        model: The model.
        target: What is steered toward.
        examples: The examples to read.
        endangered: The examples to make protected prompts from.
        method: `juice` for two runs, `june` for one.
        protection: What steering should leave alone.
        progress: Reports how many prompts are read.
    """

    def __init__(
        self,
        model: SteeredModel,
        target: Target,
        examples: Sequence[ConflictExample],
        endangered: Sequence[ConflictExample],
        method: Method,
        protection: Protection,
        progress: Progress,
    ) -> None:
        self._model = model
        self._target: Target = target
        self._method: Method = method
        self._protection = protection
        self._progress = progress
        conflicts = [t for t in judged_types(target, examples, any) if t != "clean"]
        asked: dict[str, list[Asked]] = {
            t: [
                (model.prompts.tokens(e.prompts[t], e.opening), token)
                for e in examples
                if t in e.prompts
                and (token := model.first_token(e.prompts[t], e.answer(target), opening=e.opening))
                is not None
            ]
            for t in conflicts
        }
        self._groups = {t: own for t, own in asked.items() if own}
        self._protected = protected_prompts(model, target, endangered, protection.kinds)
        self._tokens = FirstTokens(model.loaded, {**self._groups, **self._protected}, method)
        self._unsteered: Reading | None = None

    def best(self, candidates: Sequence[HeadSet]) -> tuple[HeadSet, list[Pair]]:
        """Return the best candidate, and the pairs of betas that were tried on it, best first."""
        starts = [(own, pair) for own in candidates for pair in _compared_at(own)]
        found = self._values(starts, "comparing candidates for")
        best = starts[max(range(len(starts)), key=lambda i: found[i])][0]
        pairs = climb(
            lambda new: self._values([(best, pair) for pair in new], "searching betas of"),
            {pair: value for (own, pair), value in zip(starts, found, strict=True) if own is best},
        )
        return best, [pair for pair in pairs if pair != UNSTEERED]

    @property
    def prompts(self) -> list[Asked]:
        """All prompts, the protected ones included."""
        groups = [*self._groups.values(), *self._protected.values()]
        return [asked for group in groups for asked in group]

    def value_of(self, coefficients: torch.Tensor) -> float:
        """Return the value of coefficients for all heads, float32 [n_layers, n_heads]."""
        chosen = Steering(
            coefficients={layer: own for layer, own in enumerate(coefficients) if own.any()},
            report=SteeringReport(applied=True, target=self._target, method=self._method),
        )
        return self._value(self._read([chosen], f"reading {self._target} answers")[0])

    def _values(self, tried: Sequence[tuple[HeadSet, Pair]], what: str) -> list[float]:
        steerings = [steering(self._model, own, pair, self._method) for own, pair in tried]
        readings = self._read(steerings, f"{what} {tried[0][0].name}")
        return [
            self._value(reading) - COST_OF_BETA * (pair[0] - pair[1])
            for reading, (_, pair) in zip(readings, tried, strict=True)
        ]

    def _value(self, reading: Reading) -> float:
        if not self._groups:
            raise ExampleError(
                f"the validation examples hold no conflict for the {self._target} target; "
                "give others with --validation"
            )
        before, accepted = self._without_steering(), self._protection.accepted
        excess = sum(
            max(0.0, before.score(kind) - reading.score(kind) - accepted)
            for kind in self._protected
        )
        return fmean(map(reading.score, self._groups)) - excess

    def _without_steering(self) -> Reading:
        if self._unsteered is None:
            (self._unsteered,) = self._read([unsteered()], "reading without steering")
        return self._unsteered

    def _read(self, steerings: Sequence[Steering], description: str) -> list[Reading]:
        return self._tokens.read(steerings, self._progress, description)


def _compared_at(head_set: HeadSet) -> list[Pair]:
    """Return the betas at which candidates are compared; those of a sign without heads are 0."""
    plus, minus = bool(head_set.heads.plus), bool(head_set.heads.minus)
    return list(dict.fromkeys((a * plus, b * minus) for a, b in COMPARED_AT))
