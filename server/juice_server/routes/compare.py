"""POST /compare: one prompt unsteered, toward its context and toward memory, in one batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from fastapi import APIRouter, Request, Response
from pydantic import Field, model_validator

from juice.engine.answer import Completion, FinishReason, Update
from juice.engine.steer import Steer, SteeringReport
from juice.errors import HeadSetNotFoundError
from juice.formula import TARGETS, GateMode, SteerTarget, Target
from juice.head_set.schema import MAX_BETA
from juice_server.fields import ABSENT, Answer, GenerationFields, Usage, streamed
from juice_server.http import StrictRoute
from juice_server.requests import TokenProbability, TokenScore
from juice_server.routes.explain import NamedHeadSets, Question, request_for, steered_otherwise
from juice_server.routes.native import NativeRenderer, Timing
from juice_server.routes.stream import Event
from juice_server.service import Service, ServiceOf
from juice_server.trace import trace_of


class CompareRequest(Question, NamedHeadSets, GenerationFields):
    """The body of POST /compare."""

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
        self.steer = Steer(target="none")
        return self

    def steered(self, target: Target) -> CompareRequest:
        """Return the same for one way of steering."""
        name = self.head_set_of(target)
        steer = Steer(target=target, strength=self.strength, head_set=name, gate=self.gate)
        return self.model_copy(update={"steer": steer})


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
    answers: dict[SteerTarget, SteeredAnswer]
    """By target."""
    disagree: bool | None
    """Whether the answers of context and memory differ; null where one has no head set."""
    usage: Usage
    """Tokens of the prompt and of all answers."""
    timing: Timing
    """Where the time went."""


router = APIRouter(route_class=StrictRoute)


@router.post("/compare", response_model=CompareResponse, responses=streamed())
async def compare(body: CompareRequest, request: Request, service: ServiceOf) -> Response:
    """Show what context and memory would each answer.

    With `stream`: events {"target", "text"}, with `logprobs` their tokens, a last one with the
    rest, and [DONE].
    """
    translator, trace = service.translator, trace_of(request.scope)
    targets = body.targets(translator.model.head_sets.targets())
    if not targets:
        raise HeadSetNotFoundError(
            "there is nothing to compare: no head set named context or parametric has betas; "
            "see /v1/head_sets and `juice tune`"
        )
    unsteered = await request_for(translator, request, body, body, top_logprobs=body.top)
    steers = [translator.steer(body.steered(target), None) for target in targets]
    requests = [unsteered, *(steered_otherwise(translator, body, unsteered, s) for s in steers)]
    trace.steer, trace.n_choices = "", len(requests)
    renderer = CompareRenderer(service, request, body, ["none", *targets])
    return await renderer.answered(requests, is_stream=body.stream)


class CompareRenderer(NativeRenderer):
    """Renders the answer to POST /compare."""

    id_prefix = "cmp-"
    streamed: ClassVar = {"answers": {"__all__": {"text", "logprobs"}}}

    def __init__(
        self, service: Service, request: Request, body: CompareRequest, ways: list[SteerTarget]
    ) -> None:
        super().__init__(service, request, has_logprobs=body.logprobs)
        self._ways = ways

    def events(self, update: Update) -> Iterable[Event]:
        return self.piece(update, {"target": self._ways[update.index], "text": update.text})

    def of(self, completions: list[Completion]) -> CompareResponse:
        answers = {
            target: SteeredAnswer(
                text=completion.text,
                finish_reason=completion.finish_reason,
                first_token=self._texts.alternatives(completion.tokens[0]),
                steering=completion.steering,
                logprobs=self.logprobs(completion.tokens),
            )
            for target, completion in zip(self._ways, completions, strict=True)
        }
        texts = {answers[target].text.strip() for target in TARGETS if target in answers}
        return CompareResponse(
            id=self._id,
            model=self._model_name,
            answers=answers,
            disagree=len(texts) > 1 if len(answers) > 2 else None,
            usage=Usage.of(self._trace),
            timing=self.timing(completions),
        )
