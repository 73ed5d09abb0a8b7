"""The model interface that making examples needs; `juice.SteeredModel` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from juice.progress import Progress, silent


class Answers(Protocol):
    """The answer to a prompt."""

    @property
    def text(self) -> str:
        """The continuation."""


class AskedModel(Protocol):
    """A model that answers, tokenises and scores, in a chat or not."""

    @property
    def chat_template_sha256(self) -> str | None:
        """The hash of the chat template that prompts go through; None for plain prompts."""

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        max_tokens: int,
        progress: Progress = silent,
    ) -> Sequence[Answers]:
        """Continue every prompt, a text or its tokens, greedily."""

    def tokenize(self, prompt: str, *, opening: str = "") -> tuple[int, ...]:
        """Return the tokens of a prompt and of the opening of its reply."""

    def fits(self, prompt: str | Sequence[int], *, max_tokens: int) -> bool:
        """Return whether a prompt leaves room for `max_tokens` new tokens."""

    def first_token(self, prompt: str, answer: str, *, opening: str = "") -> int | None:
        """Return the first token of an answer after a prompt and the opening of its reply.

        None if it has none of its own.
        """

    def answer_logprobs(
        self, pairs: Sequence[tuple[str, str]], *, progress: Progress = silent
    ) -> Sequence[tuple[float, ...] | None]:
        """Return the log-probabilities of each answer's tokens after its prompt.

        None for a pair that is too long.
        """
