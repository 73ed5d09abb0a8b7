"""POST /generate.

Unknown keys are refused: a misspelt `steer` must never pass unsteered.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from juice.engine import FinishReason, SteeringReport
from juice_server.schemas.documented import Documented
from juice_server.schemas.shared import (
    MAX_PROMPTS,
    TOP_LOGPROBS,
    Contexts,
    GenerationFields,
    Usage,
    as_list,
    at_most,
)


class GenerateRequest(GenerationFields):
    """The body of POST /generate; `logprobs` is how many alternatives are reported for every token.

    `context` goes before the prompt: one for all prompts, or one for each; the methods `cad` and
    `adacad` need it apart.
    """

    prompt: Annotated[
        list[str], BeforeValidator(as_list), Field(min_length=1), at_most(MAX_PROMPTS)
    ]
    """A text, or several."""
    context: Contexts = None
    """What goes before the prompt: one for all prompts, or one for each. The methods `cad` and
    `adacad` need it apart.
    """
    logprobs: int | None = TOP_LOGPROBS
    """How many alternatives to report for every token; without it, no tokens are listed."""


class Timing(Documented):
    """Seconds since the request reached the engine; `total_s` since it reached the server."""

    queued_s: float
    """When the first of them started."""
    first_token_s: float | None
    """When the first token came; null where there is none."""
    total_s: float
    """When the answer was complete."""


class TokenProbability(Documented):
    """One token of a distribution."""

    id: int
    """The token."""
    token: str
    """Its text."""
    logprob: float
    """Its log-probability, that of the steered model before sampling."""


class TokenScore(Documented):
    """A generated token and its alternatives, best first."""

    id: int
    """The token."""
    token: str
    """Its text when it stands alone."""
    logprob: float
    """Its log-probability, that of the steered model before sampling."""
    top: list[TokenProbability]
    """The likeliest tokens in its place, best first."""
    text: str
    """Its share of the answer: the shares of all tokens, joined, are the answer's text. A special
    token has none, nor has one that ends within a character.
    """


class Choice(Documented):
    """One of several texts: choice i of prompt p has the index p * n + i."""

    index: int
    """Its number."""
    text: str
    """The new text."""
    finish_reason: FinishReason
    """`stop`, or `length` after `max_tokens`."""
    logprobs: list[TokenScore] | None = None
    """Its tokens, where `logprobs` was asked for."""


class GenerateResponse(Documented):
    """The answer of POST /generate; `text` is the first choice, `choices` lists them if several."""

    id: str
    """The id of the answer."""
    model: str
    """The name of the model."""
    text: str
    """The new text."""
    finish_reason: FinishReason
    """`stop`, or `length` after `max_tokens`."""
    steering: SteeringReport
    """What was applied."""
    usage: Usage
    """Tokens of prompts and answers."""
    timing: Timing
    """Where the time went."""
    logprobs: list[TokenScore] | None = None
    """The tokens of the first choice, where `logprobs` was asked for."""
    choices: list[Choice] | None = None
    """All choices, where there are several."""
