"""The origin of each token of an answer: the prompt's context, or the model's memory.

Each answer is read unsteered, with the context and without it. A token that is likelier with the
context comes from there, whatever steered the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from juice.engine.answer import Completion
from juice.engine.request import Request
from juice.steered_model import SteeredModel


class Origin(NamedTuple):
    """One token, and its two log-probabilities."""

    id: int
    with_context: float
    without_context: float

    @property
    def gain(self) -> float:
        """By how much the context makes it likelier, in nats."""
        return self.with_context - self.without_context


def origin_requests(
    model: SteeredModel,
    prompt_ids: Sequence[int],
    without_context: Sequence[int],
    answers: Sequence[Sequence[int]],
) -> list[Request]:
    """Return the requests that read answers, for `origins_of`.

    Args:
        model: The model.
        prompt_ids: The tokens of the prompt with its context.
        without_context: Those of the prompt alone.
        answers: Those of each answer.

    Raises RequestError for what cannot be read.
    """
    return [
        model.request([*ids, *answer], max_tokens=0, prompt_logprobs=True)
        for answer in answers
        for ids in (prompt_ids, without_context)
    ]


def origins_of(
    completions: Sequence[Completion], answers: Sequence[Sequence[int]]
) -> list[list[Origin]]:
    """Return the origin of each token of each answer, from the completions of its requests."""
    read = [
        [token.logprob or 0.0 for token in completion.prompt_tokens] for completion in completions
    ]
    return [
        [
            Origin(*each)
            for each in zip(
                answer, _end(read[2 * i], answer), _end(read[2 * i + 1], answer), strict=True
            )
        ]
        for i, answer in enumerate(answers)
    ]


def _end(logprobs: Sequence[float], answer: Sequence[int]) -> Sequence[float]:
    return logprobs[len(logprobs) - len(answer) :]
