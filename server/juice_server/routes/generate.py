"""POST /generate: one or more prompts, steered as asked."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from juice.engine import Completion, ScoredToken, Update
from juice_server.errors import Failure
from juice_server.prompts import joined
from juice_server.routes.strict import StrictRoute
from juice_server.schemas.generate import Choice, GenerateRequest, GenerateResponse, Timing
from juice_server.schemas.shared import usage_of
from juice_server.schemas.streams import STREAMED
from juice_server.service import Service, ServiceOf
from juice_server.sse import Event, answered
from juice_server.trace import Trace, trace_of

router = APIRouter(route_class=StrictRoute)


@router.post("/generate", response_model=GenerateResponse, responses=STREAMED)
async def generate(body: GenerateRequest, request: Request, service: ServiceOf) -> Response:
    """Continue one or more prompts.

    With `stream`: events {"text", "index"}, a last one with the rest, and [DONE].
    """
    trace = trace_of(request.scope)
    requests = await service.translator.requests(
        request, joined(body.prompt, body.context), body, top_logprobs=body.logprobs or 0
    )
    answer = _Answer(service, body, trace)
    return await answered(service, request, requests, answer, is_stream=body.stream)


class _Answer:
    """Makes an answer from completions, or a stream's events, whose last has all the rest."""

    says_done = True

    def __init__(self, service: Service, body: GenerateRequest, trace: Trace) -> None:
        self._texts = service.translator.texts
        self._model_name = service.translator.model_name
        self._trace = trace
        self._has_logprobs = body.logprobs is not None
        self._id = f"gen-{uuid.uuid4().hex}"

    def of(self, completions: list[Completion]) -> Event:
        return self._response(completions).model_dump(exclude_unset=True)

    def events(self, update: Update) -> Iterable[Event]:
        event: Event = {"text": update.text, "index": update.index}
        for name, scored in self._scored(update.tokens).items():
            event[name] = [score.model_dump() for score in scored]
        if update.text or (self._has_logprobs and update.tokens):
            yield event

    def closing(self, completions: list[Completion]) -> Iterable[Event]:
        yield self._response(completions).model_dump(
            exclude={"text": True, "logprobs": True, "choices": {"__all__": {"text", "logprobs"}}},
            exclude_unset=True,
        )

    def failed(self, failure: Failure) -> Event:
        return failure.body()

    def _response(self, completions: list[Completion]) -> GenerateResponse:
        first = completions[0]
        choices = [
            Choice(index=i, text=c.text, finish_reason=c.finish_reason, **self._scored(c.tokens))
            for i, c in enumerate(completions)
        ]
        return GenerateResponse(
            id=self._id,
            model=self._model_name,
            text=first.text,
            finish_reason=first.finish_reason,
            steering=first.steering,
            usage=usage_of(self._trace.n_prompt_tokens, self._trace.n_generated_tokens),
            timing=timing_of(completions, self._trace),
            **self._scored(first.tokens),
            **({"choices": choices} if len(choices) > 1 else {}),
        )

    def _scored(self, tokens: tuple[ScoredToken, ...]) -> dict[str, Any]:
        """Return the field `logprobs`, where it was requested."""
        return {"logprobs": self._texts.scores(tokens)} if self._has_logprobs else {}


def timing_of(completions: list[Completion], trace: Trace) -> Timing:
    """Return the seconds until the first start, the first token, and now."""
    firsts = [c.timing.tokens_s[0] for c in completions if c.timing.tokens_s]
    return Timing(
        queued_s=round(min(c.timing.queued_s for c in completions), 4),
        first_token_s=round(min(firsts), 4) if firsts else None,
        total_s=round(trace.age_s, 4),
    )
