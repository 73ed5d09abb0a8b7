"""Outcomes of ways of steering: accuracy and mean p_y by conflict type, and how sure they are.

The intervals of means, of 95 % unless said, stay honest where there are few values, or all are
alike. Values come in groups that count alike, such as domains: the mean is that of the groups'
means. n is then Kish's effective number, 1 / sum of w^2, where w is the weight of each value; what
the groups differ by counts as chance, so intervals are rather too wide.

Sources: Wilson (1927); Agresti and Min (2005); Kish, "Survey Sampling" (1965).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Generic, NamedTuple, TypeVar

from juice.data.example import ConflictExample, judged_types
from juice.engine.answer import Completion
from juice.engine.request import Request
from juice.engine.steer import Steering
from juice.formula import ConflictType, Target
from juice.progress import Progress
from juice.steered_model import SteeredModel

Z = 1.959964
Z_LIKELY = 1.281552  # of an interval of 80 %


class Interval(NamedTuple):
    """A confidence interval of a mean."""

    low: float
    high: float


def share_interval(*groups: Sequence[float]) -> Interval | None:
    """Return Wilson's interval of a mean of values from 0 to 1; None without values."""
    given = [values for values in groups if values]
    if not given:
        return None
    n, p = _effective_n(given), fmean(map(fmean, given))
    middle = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def difference_interval(*groups: Sequence[float], z: float = Z) -> Interval | None:
    """Return the interval of a mean of paired differences, each from -1 to 1; None without values.

    Two more values, one that gains and one that loses everything, keep it from collapsing. `z` is
    its half width in standard errors.
    """
    given = [values for values in groups if values]
    if not given:
        return None
    n = _effective_n(given)

    def padded(term: Sequence[float], of_one: float, of_minus_one: float) -> float:
        return (n * fmean(term) + of_one + of_minus_one) / (n + 2)

    middle = padded([fmean(values) for values in given], 1, -1)
    squares = [fmean((v - middle) ** 2 for v in values) for values in given]
    variance = padded(squares, (1 - middle) ** 2, (1 + middle) ** 2)
    half = z * math.sqrt(variance / (n + 2))
    return Interval(max(-1.0, middle - half), min(1.0, middle + half))


def _effective_n(groups: Sequence[Sequence[float]]) -> float:
    return len(groups) ** 2 / sum(1 / len(values) for values in groups)


Answers = dict[ConflictType, list[Completion]]
Choice = TypeVar("Choice", bound=Hashable)


@dataclass(frozen=True)
class Outcome:
    """What one way of steering did to the examples: accuracy and mean p_y by conflict type."""

    accuracy: dict[ConflictType, float]
    p_answer: dict[ConflictType, float]

    @property
    def rank(self) -> tuple[float, float]:
        """What orders outcomes: the sum of accuracies, then the mean p_y."""
        n_types = len(self.p_answer)
        return round(sum(self.accuracy.values()), 9), sum(self.p_answer.values()) / n_types


def answer_tokens(model: SteeredModel, example: ConflictExample) -> int:
    """Return how many tokens of an answer are generated to judge it: as many as the longest has."""
    answers = (*example.parametric_answer, *example.context_answer)
    form = model.prompts
    lengths = [len(form.encode(form.raw(a), add_special_tokens=False)) for a in answers]
    return max(example.max_tokens, *lengths)


def scoring_request(
    model: SteeredModel,
    example: ConflictExample,
    conflict_type: ConflictType,
    target: Target,
    steering: Steering | None = None,
) -> Request:
    """Return the request for the tokens of an example's answer that are judged.

    It watches the first token of the target's answer, for p_y.
    """
    prompt, opening = example.prompts[conflict_type], example.opening
    token = model.first_token(prompt, example.answer(target), opening=opening)
    watch = () if token is None else (token,)
    ids = model.tokenize(prompt, opening=opening)
    request = model.request(ids, max_tokens=answer_tokens(model, example), watch=watch)
    return request if steering is None else request.with_steering(steering)


def answer(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    conflict_types: Sequence[ConflictType],
    target: Target,
    steering: Steering | None = None,
) -> Answers:
    """Return the completions of all examples' prompts of these types, generated in one go."""
    requests = [
        scoring_request(model, e, t, target, steering) for t in conflict_types for e in examples
    ]
    completions = iter(model.engine.generate(requests))
    return {t: [next(completions) for _ in examples] for t in conflict_types}


class Trials(Generic[Choice]):
    """The answers to examples under several ways of steering, each a choice, made in one go."""

    def __init__(
        self,
        model: SteeredModel,
        examples: Sequence[ConflictExample],
        target: Target,
        steerings: Mapping[Choice, Steering],
        description: str,
        progress: Progress,
    ) -> None:
        self._examples = examples
        self._target: Target = target
        judged = judged_types(target, examples, any)
        asked = [(t, i) for t in judged for i, e in enumerate(examples) if t in e.prompts]
        self._at = {(examples[i].prompts[t], examples[i].opening): (t, i) for t, i in asked}
        unsteered = {
            (t, i): scoring_request(model, examples[i], t, target).with_options(top_logprobs=1)
            for t, i in asked
        }
        # One prompt's steerings follow each other: rows of equal length need no padding.
        keys = [(at, choice) for at in asked for choice in steerings]
        requests = [unsteered[at].with_steering(steerings[choice]) for at, choice in keys]
        completions = model.engine.generate(requests, progress=progress, description=description)
        self._completions = dict(zip(keys, completions, strict=True))

    def completion(
        self, example: ConflictExample, prompt: str, choice: Choice
    ) -> Completion | None:
        """Return the answer to an example's prompt under a choice; None where it was not asked.

        The likeliest token is beside each of its own.
        """
        at = self._at.get((prompt, example.opening))
        return None if at is None else self._completions[at, choice]

    def outcome(self, choice: Choice, among: Sequence[int] | None = None) -> Outcome:
        """Return the outcome of a choice on the examples at these indices; None: on all."""
        chosen = range(len(self._examples)) if among is None else among
        examples = [self._examples[i] for i in chosen]
        answers = {
            t: [self._completions[(t, i), choice] for i in chosen]
            for t in judged_types(self._target, examples)
        }
        return outcome(examples, answers, self._target)

    def gains(self, choice: Choice, base: Choice) -> list[float]:
        """Return the gain of a choice over another in how often it gave the target's answer.

        One value for each example, -1 to 1, the mean over its conflicts (for a target without
        conflicts, over all its prompts).
        """
        judged = judged_types(self._target, self._examples)
        conflicts = [t for t in judged if t != "clean"] or judged

        def share(i: int, choice: Choice) -> float:
            texts = (self._completions[(t, i), choice].text for t in conflicts)
            return fmean(self._examples[i].is_right(text, self._target) for text in texts)

        return [share(i, choice) - share(i, base) for i in range(len(self._examples))]


def outcome(examples: Sequence[ConflictExample], answers: Answers, target: Target) -> Outcome:
    """Score answers, each by its example's own rule."""
    accuracy, p_answer = {}, {}
    for conflict_type, completions in answers.items():
        hits = [e.is_right(c.text, target) for c, e in zip(completions, examples, strict=True)]
        accuracy[conflict_type] = sum(hits) / len(hits)
        found = [math.exp(c.watched[0]) if c.watched else 0.0 for c in completions]
        p_answer[conflict_type] = sum(found) / len(found)
    return Outcome(accuracy, p_answer)
