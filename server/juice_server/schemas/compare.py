"""POST /compare: one prompt unsteered, toward its context and toward memory."""

from __future__ import annotations

from pydantic import Field, model_validator

from juice.engine import FinishReason, Steer, SteeringReport, SteerTarget
from juice.head_set.betas import MAX_BETA
from juice.methods import GateMode
from juice_server.schemas.documented import Documented
from juice_server.schemas.generate import Timing, TokenProbability, TokenScore
from juice_server.schemas.question import NamedHeadSets, Question
from juice_server.schemas.shared import GenerationFields, Usage


class CompareRequest(Question, NamedHeadSets, GenerationFields):
    """The body of POST /compare."""

    strength: float = Field(default=1.0, ge=0, le=MAX_BETA)
    """Multiplies the betas."""
    gate: GateMode | None = None
    """Whether to steer only where a gate finds a reason to; without it, as the server is set."""
    top: int = Field(default=10, ge=1, le=20)
    """How many of the likeliest first tokens to report, and with `logprobs` of every token."""
    logprobs: bool = False
    """Whether to list the tokens of the answers."""

    @model_validator(mode="after")
    def _three_ways(self) -> CompareRequest:
        if self.steer is not None:
            raise ValueError("it is steered in every way; leave out steer, and give strength")
        if self.n != 1:
            raise ValueError("each way has one answer; leave out n")
        return self

    def steered(self, target: SteerTarget) -> CompareRequest:
        """Return the same for one way of steering."""
        if target == "none":
            return self.model_copy(update={"steer": Steer(target="none")})
        name = self.head_set_of(target)
        steer = Steer(target=target, strength=self.strength, head_set=name, gate=self.gate)
        return self.model_copy(update={"steer": steer})


class Answer(Documented):
    """The answer under one way of steering."""

    text: str
    """The new text."""
    finish_reason: FinishReason
    """`stop`, or `length` after `max_tokens`."""
    first_token: list[TokenProbability]
    """The likeliest first tokens, best first."""
    steering: SteeringReport
    """What was applied."""
    logprobs: list[TokenScore] | None = None
    """Its tokens, where `logprobs` was asked for."""


class CompareResponse(Documented):
    """The answer of POST /compare; a target without a head set of its name is left out."""

    id: str
    """The id of the answer."""
    model: str
    """The name of the model."""
    answers: dict[SteerTarget, Answer]
    """By target."""
    disagree: bool | None
    """Whether the answers of context and memory differ; null where one has no head set."""
    usage: Usage
    """Tokens of the prompt and of all answers."""
    timing: Timing
    """Where the time went."""
