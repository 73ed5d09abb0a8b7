"""POST /compare: one prompt unsteered, toward the context and toward memory, in one batch."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from juice.engine import Completion, SteerTarget, Update
from juice.errors import HeadSetNotFoundError
from juice.head_set import HeadSetLibrary
from juice.methods import TARGETS
from juice_server.errors import Failure
from juice_server.questions import asked
from juice_server.routes.generate import timing_of
from juice_server.routes.strict import StrictRoute
from juice_server.schemas.compare import Answer, CompareRequest, CompareResponse
from juice_server.schemas.shared import usage_of
from juice_server.schemas.streams import STREAMED
from juice_server.service import Service, ServiceOf
from juice_server.sse import Event, answered
from juice_server.trace import Trace, trace_of

router = APIRouter(route_class=StrictRoute)


@router.post("/compare", response_model=CompareResponse, responses=STREAMED)
async def compare(body: CompareRequest, request: Request, service: ServiceOf) -> Response:
    """Show what context and memory would each answer.

    With `stream`: events {"target", "text"}, with `logprobs` their tokens, a last one with the
    rest, and [DONE].
    """
    trace = trace_of(request.scope)
    translator = service.translator
    targets = _targets(body, translator.model.head_sets)
    requests = [
        await asked(translator, request, body, body.steered(target), top_logprobs=body.top)
        for target in targets
    ]
    trace.steer, trace.n_choices = "", len(targets)
    answer = _Answer(service, body, trace, targets)
    return await answered(service, request, requests, answer, is_stream=body.stream)


def _targets(body: CompareRequest, sets: HeadSetLibrary) -> list[SteerTarget]:
    """Return the ways that are compared; raises HeadSetNotFoundError."""
    targets = body.targets(sets.targets())
    if not targets:
        raise HeadSetNotFoundError(
            "there is nothing to compare: no head set named context or parametric has betas; "
            "see /v1/head_sets and `juice tune`"
        )
    return ["none", *targets]


class _Answer:
    """Makes an answer from completions, or a stream's events, whose last has all the rest."""

    says_done = True

    def __init__(
        self, service: Service, body: CompareRequest, trace: Trace, targets: Sequence[SteerTarget]
    ) -> None:
        self._texts = service.translator.texts
        self._model_name = service.translator.model_name
        self._body, self._trace, self._targets = body, trace, targets

    def of(self, completions: list[Completion]) -> Event:
        return self._response(completions).model_dump(exclude_unset=True)

    def events(self, update: Update) -> Iterable[Event]:
        if update.text or (self._body.logprobs and update.tokens):
            scored = self._scored(update.tokens)
            tokens = {name: [own.model_dump() for own in value] for name, value in scored.items()}
            yield {"target": self._targets[update.index], "text": update.text, **tokens}

    def closing(self, completions: list[Completion]) -> Iterable[Event]:
        yield self._response(completions).model_dump(
            exclude={"answers": {"__all__": {"text", "logprobs"}}}, exclude_unset=True
        )

    def failed(self, failure: Failure) -> Event:
        return failure.body()

    def _response(self, completions: list[Completion]) -> CompareResponse:
        answers = {
            target: Answer(
                text=completion.text,
                finish_reason=completion.finish_reason,
                first_token=self._texts.alternatives(completion.tokens[0]),
                steering=completion.steering,
                **self._scored(completion.tokens),
            )
            for target, completion in zip(self._targets, completions, strict=True)
        }
        texts = {answers[t].text.strip() for t in TARGETS if t in answers}
        return CompareResponse(
            id=f"cmp-{uuid.uuid4().hex}",
            model=self._model_name,
            answers=answers,
            disagree=len(texts) > 1 if len(answers) > 2 else None,
            usage=usage_of(self._trace.n_prompt_tokens, self._trace.n_generated_tokens),
            timing=timing_of(completions, self._trace),
        )

    def _scored(self, tokens: Sequence[Any]) -> dict[str, Any]:
        """Return the field `logprobs`, where it was requested."""
        return {"logprobs": self._texts.scores(tuple(tokens))} if self._body.logprobs else {}
