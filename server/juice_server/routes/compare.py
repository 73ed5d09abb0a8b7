"""POST /compare: one prompt steered in several ways, in one batch.

These are unsteered, toward its context and toward memory, or as many `columns` as are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field, model_validator

from juice.engine.answer import Completion, FinishReason, Update
from juice.engine.steer import Steer, SteeringReport
from juice.errors import HeadSetNotFoundError
from juice.formula import TARGETS, GateMode, SteerTarget, Target
from juice.head_set.schema import MAX_BETA
from juice_server.fields import (
    ABSENT,
    Answer,
    GenerationFields,
    Usage,
    at_most,
    streamed,
    target_alone,
)
from juice_server.http import StrictRoute
from juice_server.requests import TokenProbability, TokenScore, Translator
from juice_server.routes.explain import NamedHeadSets, Question, request_for, steered_otherwise
from juice_server.routes.native import NativeRenderer, Timing
from juice_server.routes.stream import Event
from juice_server.service import AdmittingService, Service
from juice_server.trace import trace_of

MAX_COLUMNS = 16
Column = Annotated[Steer, BeforeValidator(target_alone)]


class CompareRequest(Question, NamedHeadSets, GenerationFields):
    """The body of POST /compare."""

    columns: Annotated[list[Column] | None, Field(min_length=1), at_most(MAX_COLUMNS)] = None
    """The ways to steer, up to 16, each as `steer` has it on other routes; the answers are then a
    list. Without it they are the three of the targets.
    """

    strength: float = Field(strict=True, default=1.0, ge=0, le=MAX_BETA)
    """Multiplies the betas."""
    gate: GateMode | None = None
    """Whether to steer only where a gate finds a reason to; without it, as the server is set."""
    top: int = Field(strict=True, default=10, ge=1, le=20)
    """How many of the likeliest first tokens to report, and with `logprobs` of every token."""
    logprobs: bool = False
    """Whether to list the tokens of the answers."""

    @model_validator(mode="after")
    def _three_ways(self) -> CompareRequest:
        if self.steer is not None:
            raise ValueError("it is steered in every way; leave out steer, and give strength")
        if self.n != 1:
            raise ValueError("each way has one answer; leave out n")
        of_three = {"strength", "gate", "head_sets"} & self.model_fields_set
        if self.columns is not None and of_three:
            raise ValueError(f"{min(of_three)} goes with the three targets; give it in columns")
        self.steer = Steer(target="none")
        return self

    def steer_toward(self, target: Target) -> Steer:
        """Return how to steer toward one of the targets."""
        name = self.head_set_of(target)
        return Steer(target=target, strength=self.strength, head_set=name, gate=self.gate)


class SteeredAnswer(Answer):
    """The answer under one way of steering."""

    text: str
    """The new text."""
    finish_reason: FinishReason
    """`stop`, or `length` after `max_tokens`."""
    first_token: list[TokenProbability]
    """The likeliest first tokens, best first."""
    steering: SteeringReport
    """What was applied."""
    logprobs: list[TokenScore] | None = ABSENT
    """Its tokens, where `logprobs` was asked for."""


class CompareResponse(Answer):
    """The answer of POST /compare; a target without a head set of its name is left out."""

    id: str
    """The id of the answer."""
    model: str
    """The name of the model."""
    answers: dict[SteerTarget, SteeredAnswer] | list[SteeredAnswer]
    """By target, or in the order of `columns`."""
    disagree: bool | None
    """Whether the answers of context and memory differ; null where one has no head set. With
    `columns`, whether any two of them do.
    """
    usage: Usage
    """Tokens of the prompt and of all answers."""
    timing: Timing
    """Where the time went."""


router = APIRouter(route_class=StrictRoute)


@router.post("/compare", response_model=CompareResponse, responses=streamed())
async def compare(body: CompareRequest, request: Request, service: AdmittingService) -> Response:
    """Show what context and memory would each answer.

    With `stream`: events {"target", "text"}, or {"column", "text"} with its number, with `logprobs`
    their tokens, a last one with the rest, and [DONE].
    """
    translator, trace = service.translator, trace_of(request.scope)
    ways = _targets(body, translator) if body.columns is None else body.columns
    steers = [
        translator.settled(way if isinstance(way, Steer) else body.steer_toward(way))
        for way in ways
        if way != "none"
    ]
    # Where the question begins is found for the request from which the others are made.
    of_question = [steer for steer in steers if steer.positions == "question"]
    fields = body.model_copy(update={"steer": of_question[0]}) if of_question else body
    made = await request_for(translator, request, body, fields, top_logprobs=body.top)
    requests = [steered_otherwise(translator, body, made, steer) for steer in steers]
    if body.columns is None:
        requests = [made, *requests]
    trace.steer, trace.n_choices = "", len(requests)
    renderer = CompareRenderer(service, request, body, ways)
    return await renderer.answered(requests, is_stream=body.stream)


def _targets(body: CompareRequest, translator: Translator) -> list[SteerTarget]:
    """Return no steering and the targets that can be steered to; raises HeadSetNotFoundError."""
    targets = body.targets(translator.model.head_sets.targets())
    if not targets:
        raise HeadSetNotFoundError(
            "there is nothing to compare: no head set named context or parametric has betas; "
            "see /v1/head_sets and `juice tune`"
        )
    return ["none", *targets]


class CompareRenderer(NativeRenderer):
    """Renders the answer to POST /compare."""

    id_prefix = "cmp-"
    streamed: ClassVar = {"answers": {"__all__": {"text", "logprobs"}}}

    def __init__(
        self,
        service: Service,
        request: Request,
        body: CompareRequest,
        ways: Sequence[SteerTarget | Steer],
    ) -> None:
        super().__init__(service, request, has_logprobs=body.logprobs)
        self._ways = ways

    def events(self, update: Update) -> Iterable[Event]:
        way = self._ways[update.index]
        place: Event = {"column": update.index} if isinstance(way, Steer) else {"target": way}
        return self.piece(update, {**place, "text": update.text})

    def of(self, completions: list[Completion]) -> CompareResponse:
        listed = [
            SteeredAnswer(
                text=completion.text,
                finish_reason=completion.finish_reason,
                first_token=self._texts.alternatives(completion.tokens[0]),
                steering=completion.steering,
                logprobs=self.logprobs(completion.tokens),
            )
            for completion in completions
        ]
        by_target = {
            way: answer
            for way, answer in zip(self._ways, listed, strict=True)
            if not isinstance(way, Steer)
        }
        compared = [by_target[target] for target in TARGETS if target in by_target]
        texts = {answer.text.strip() for answer in (compared if by_target else listed)}
        return CompareResponse(
            id=self._id,
            model=self._model_name,
            answers=by_target or listed,
            disagree=None if len(compared) == 1 else len(texts) > 1,
            usage=Usage.of(self._trace),
            timing=self.timing(completions),
        )
