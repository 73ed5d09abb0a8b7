"""Tokens as text, for answers that list them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from juice.engine import ScoredToken
from juice_server.schemas.generate import TokenProbability, TokenScore

LOWEST_LOGPROB = -9999.0


class TokenTexts(dict[int, str]):
    """The text of single tokens, cached; part of a character becomes the replacement character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        """Return and keep one token's text."""
        text = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return self.setdefault(token, text)

    def alternatives(self, token: ScoredToken) -> list[TokenProbability]:
        """Return the likeliest tokens at the place of a token."""
        return [
            TokenProbability(id=other, token=self[other], logprob=finite(logprob))
            for other, logprob in token.top
        ]

    def scores(self, tokens: Sequence[ScoredToken]) -> list[TokenScore]:
        """Return every token with its alternatives."""
        return [
            TokenScore(
                id=t.id,
                token=self[t.id],
                logprob=finite(t.logprob or 0.0),
                top=self.alternatives(t),
                text=t.text,
            )
            for t in tokens
        ]


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold: excluded tokens have minus infinity."""
    return max(logprob, LOWEST_LOGPROB)
