"""Ways of steering tried on examples, each with its accuracy and mean p_y by conflict type."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Generic, TypeVar

from juice.data.example import ConflictExample, judged_types
from juice.engine import Completion, GenerationRequest, Steering
from juice.methods import ConflictType, Target
from juice.progress import Progress
from juice.steered_model import SteeredModel

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
        return round(sum(self.accuracy.values()), 9), sum(self.p_answer.values()) / len(
            self.p_answer
        )


def scoring_request(
    model: SteeredModel,
    example: ConflictExample,
    conflict_type: ConflictType,
    target: Target,
    steering: Steering | None = None,
) -> GenerationRequest:
    """Return the request for the tokens of an example's answer that are judged.

    It watches the first token of the target's answer.

    Args:
        model: The model that will be asked.
        example: The example.
        conflict_type: Which of its prompts to ask.
        target: Whose answer p_y is of.
        steering: What steers it; None: nothing.
    """
    prompt = example.prompts[conflict_type]
    token = model.first_token(prompt, example.answer(target), opening=example.opening)
    watch = () if token is None else (token,)
    ids = model.tokenize(prompt, opening=example.opening)
    request = model.request(ids, max_tokens=example.max_tokens, watch=watch)
    return request if steering is None else request.with_steering(steering)


def answer(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    conflict_types: Sequence[ConflictType],
    target: Target,
    steering: Steering | None = None,
) -> Answers:
    """Return the completions of all examples' prompts, generated in one go.

    Args:
        model: The model to ask.
        examples: The examples.
        conflict_types: Which of their prompts to ask.
        target: Whose answer p_y is of.
        steering: What steers them; None: nothing.
    """
    requests = [
        scoring_request(model, e, t, target, steering) for t in conflict_types for e in examples
    ]
    completions = iter(model.engine.generate(requests))
    return {
        conflict_type: [next(completions) for _ in examples] for conflict_type in conflict_types
    }


class Trials(Generic[Choice]):
    """What several ways of steering do to validation examples, all generated in one go.

    Args:
        model: The model to ask.
        examples: The validation examples.
        target: Whose answer is right.
        steerings: The ways of steering, each under its choice.
        description: What the progress is called.
        progress: Reports how many prompts are answered.
    """

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
        unsteered = {at: scoring_request(model, examples[at[1]], at[0], target) for at in asked}
        # One prompt's steerings follow each other: rows of equal length need no padding.
        keys = [(at, choice) for at in asked for choice in steerings]
        requests = [unsteered[at].with_steering(steerings[choice]) for at, choice in keys]
        completions = model.engine.generate(requests, progress=progress, description=description)
        self._completions = dict(zip(keys, completions, strict=True))

    def outcome(self, choice: Choice, among: Sequence[int] | None = None) -> Outcome:
        """Return what a choice did to the examples at these indices; None: to all."""
        chosen = range(len(self._examples)) if among is None else among
        own = [self._examples[i] for i in chosen]
        answers = {
            t: [self._completions[(t, i), choice] for i in chosen]
            for t in judged_types(self._target, own)
        }
        return outcome(own, answers, self._target)

    def gains(self, choice: Choice, base: Choice) -> list[float]:
        """Return how much more often a choice gave the target's answer than another did.

        One value for each example, -1 to 1, the mean over its conflicts (for a target without
        conflicts, over all its prompts).
        """
        judged = judged_types(self._target, self._examples)
        conflicts = [t for t in judged if t != "clean"] or judged
        return [
            fmean(
                float(self._is_hit(t, i, choice)) - float(self._is_hit(t, i, base))
                for t in conflicts
            )
            for i in range(len(self._examples))
        ]

    def _is_hit(self, conflict_type: ConflictType, i: int, choice: Choice) -> bool:
        text = self._completions[(conflict_type, i), choice].text
        return self._examples[i].is_right(text, self._target)


def outcome(examples: Sequence[ConflictExample], answers: Answers, target: Target) -> Outcome:
    """Score answers, each by its example's own rule."""
    accuracy, p_answer = {}, {}
    for conflict_type, completions in answers.items():
        hits = [e.is_right(c.text, target) for c, e in zip(completions, examples, strict=True)]
        accuracy[conflict_type] = sum(hits) / len(hits)
        p_answer[conflict_type] = sum(
            math.exp(c.watched[0]) if c.watched else 0.0 for c in completions
        ) / len(completions)
    return Outcome(accuracy, p_answer)
