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
    """Return two requests for each answer, of tokens, that read it for `origins_of`.

    It follows the prompt with its context, then the prompt alone. Raises RequestError for what
    cannot be read.
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
    read = [_end(completions[i], answers[i // 2]) for i in range(len(completions))]
    pairs = zip(answers, read[::2], read[1::2], strict=True)
    return [[Origin(*token) for token in zip(*each, strict=True)] for each in pairs]


def _end(completion: Completion, answer: Sequence[int]) -> list[float]:
    tokens = completion.prompt_tokens
    return [token.logprob or 0.0 for token in tokens[len(tokens) - len(answer) :]]
