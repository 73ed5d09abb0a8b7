"""POST /origins, /sweep and /explain: where answers come from, what strength does, which heads."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from juice.engine import Steer, SteeringReport, SteerTarget
from juice.engine.request import MAX_TOP_LOGPROBS
from juice.head_set.betas import MAX_BETA
from juice.methods import Target
from juice_server.schemas.documented import Documented
from juice_server.schemas.generate import TokenProbability
from juice_server.schemas.question import NamedHeadSets, Question
from juice_server.schemas.shared import TokenId, at_most

MAX_ANSWERS, MAX_ANSWER_TOKENS, MAX_STRENGTHS, MAX_HEADS = 8, 4096, 64, 64
Tokens = Annotated[list[TokenId], Field(fail_fast=True), at_most(MAX_ANSWER_TOKENS)]
DEFAULT_STRENGTHS = tuple(0.25 * i for i in range(13))


class OriginsRequest(Question):
    """The body of POST /origins: a question with a context, and answers to it."""

    answers: Annotated[list[Tokens], Field(min_length=1, max_length=MAX_ANSWERS)]
    """The tokens of each answer."""

    @model_validator(mode="after")
    def _has_a_context(self) -> OriginsRequest:
        if self.context is None and self.documents is None:
            raise ValueError("give the context apart, as context or documents")
        return self


class TokenOrigin(Documented):
    """One token, read unsteered with and without the context."""

    id: int
    """The token."""
    token: str
    """Its text."""
    with_context: float
    """Its log-probability after the question with its context."""
    without_context: float
    """Its log-probability after the question alone."""


class OriginsResponse(Documented):
    """The answer of POST /origins."""

    origins: list[list[TokenOrigin]]
    """The tokens of each answer."""


class SteeredQuestion(Question, NamedHeadSets):
    """A question, and one way to steer its answer."""

    target: Target
    """What wins a conflict: `context` or `parametric`."""
    head_set: str | None = None
    """The target's head set, by name, in place of `head_sets`."""

    @model_validator(mode="after")
    def _one_name(self) -> SteeredQuestion:
        if self.head_set is not None and super().head_set_of(self.target) is not None:
            raise ValueError(f"give the head set of {self.target} once: head_set, or head_sets")
        return self

    def head_set_of(self, target: SteerTarget) -> str | None:
        """Return the name of the head set that was given for a target."""
        named = super().head_set_of(target)
        return self.head_set if named is None and target == self.target else named

    def steer(self, strength: float, target: SteerTarget | None = None) -> Steer:
        """Return how to steer at a strength, toward the target or another."""
        toward = target or self.target
        named = self.head_set_of(toward)
        return Steer(target=toward, head_set=named, strength=strength, gate="off")


class SweepRequest(SteeredQuestion):
    """The body of POST /sweep."""

    strengths: Annotated[
        list[Annotated[float, Field(ge=0, le=MAX_BETA)]],
        Field(min_length=2, max_length=MAX_STRENGTHS),
    ] = Field(default_factory=lambda: list(DEFAULT_STRENGTHS))
    """The strengths, in rising order."""
    answers: Annotated[list[str], Field(min_length=2, max_length=2)] | None = None
    """Two answers, as they follow the prompt; else the first tokens in which the unsteered answer,
    or that toward memory, and that toward the context differ.
    """
    max_tokens: int = Field(default=32, ge=1, le=256)
    """How far to look for a difference."""

    @model_validator(mode="after")
    def _rise(self) -> SweepRequest:
        if self.strengths != sorted(set(self.strengths)):
            raise ValueError("strengths are not in rising order; give each once, the lowest first")
        if self.answers is not None and self.answers[0] == self.answers[1]:
            raise ValueError("the two answers are the same")
        return self


class Curve(Documented):
    """How likely one answer is at each strength."""

    text: str
    """The answer."""
    tokens: list[int]
    """Its tokens."""
    probabilities: list[float]
    """Its probability at each strength."""


class SweepResponse(Documented):
    """The answer of POST /sweep."""

    strengths: list[float]
    """The strengths."""
    curves: list[Curve]
    """Two answers: the first is what memory, or no steering, says; none where both say the same."""
    after: str
    """What both answers begin with; the curves are about what comes next."""
    flip: float | None
    """The lowest strength at which the other answer becomes the likelier one; null for none."""
    steering: SteeringReport
    """What is applied at strength 1."""


class ExplainRequest(SteeredQuestion):
    """The body of POST /explain: one token of an answer."""

    strength: float = Field(default=1.0, ge=0, le=MAX_BETA)
    """Multiplies the betas."""
    answer: Tokens = Field(default_factory=list)
    """The tokens of the answer before the one that is explained."""
    tokens: Annotated[list[TokenId], Field(min_length=2, max_length=2)] | None = None
    """Two tokens that may come; else the likeliest steered one, and the likeliest unsteered one."""
    top: int = Field(default=10, ge=2, le=MAX_TOP_LOGPROBS)
    """How many candidates to report for each way of steering."""

    @model_validator(mode="after")
    def _differ(self) -> ExplainRequest:
        if self.tokens is not None and self.tokens[0] == self.tokens[1]:
            raise ValueError("the two tokens are the same")
        return self


class HeadEffect(Documented):
    """What one steered head does."""

    layer: int
    """Its layer."""
    head: int
    """Its number in the layer."""
    beta: float
    """What its clean output is multiplied by before it is added."""
    effect: float
    """How much lower the steered difference is without this head."""


class ExplainResponse(Documented):
    """The answer of POST /explain.

    A difference is that of the logits of two tokens, which is that of their log-probabilities.
    """

    tokens: list[TokenProbability]
    """The two tokens, with their steered log-probabilities."""
    unsteered: float
    """The difference without steering."""
    steered: float
    """The difference with steering."""
    heads: list[HeadEffect]
    """The steered heads, the largest effect first."""
    candidates: dict[SteerTarget, list[TokenProbability]]
    """The likeliest tokens under each way of steering, best first."""
    steering: SteeringReport
    """What was applied."""
