"""Tokens as text, for the answers that name them one by one."""

from __future__ import annotations

from collections.abc import Sequence

from juice.engine import ScoredToken
from juice.steered_model import SteeredModel
from juice_server.schemas.generate import TokenProbability, TokenScore

LOWEST_LOGPROB = -9999.0


def token_text(model: SteeredModel, token: int) -> str:
    """Return one token's text; where it is part of a character, the replacement character."""
    return str(model.loaded.tokenizer.decode([token], clean_up_tokenization_spaces=False))


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold: models that exclude tokens give them minus infinity."""
    return max(logprob, LOWEST_LOGPROB)


def alternatives(model: SteeredModel, token: ScoredToken) -> list[TokenProbability]:
    """Return the likeliest tokens in a place."""
    return [TokenProbability(id=other, token=token_text(model, other), logprob=finite(logprob)) for other, logprob in token.top]


def scores(model: SteeredModel, tokens: Sequence[ScoredToken]) -> list[TokenScore]:
    """Return every token with its alternatives."""
    return [
        TokenScore(id=t.id, token=token_text(model, t.id), logprob=finite(t.logprob or 0.0), top=alternatives(model, t)) for t in tokens
    ]
