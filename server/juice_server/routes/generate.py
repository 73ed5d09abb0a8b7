"""POST /generate: one or more prompts, steered as asked."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from juice.engine import Completion, ScoredToken, Update
from juice_server.schemas.generate import Choice, GenerateRequest, GenerateResponse, Timing
from juice_server.schemas.generation import Usage, usage_of
from juice_server.service import Service, service_of
from juice_server.sse import Event, stream
from juice_server.trace import Trace, trace_of

router = APIRouter()


@router.post("/generate", response_model=GenerateResponse)
async def generate(
    body: GenerateRequest, request: Request, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Continue one or more prompts.

    With `stream`: events {"text", "index"}, a last one with the rest, and [DONE].
    """
    trace = trace_of(request.scope)
    requests = await service.translator.requests(
        body.prompt, body, trace, contexts=body.context, top_logprobs=body.logprobs or 0
    )
    answer = _Answer(service, body, trace)
    if body.stream:
        return await stream(service, request, requests, _Stream(answer))
    completions = await service.complete(request, requests)
    return await asyncio.to_thread(
        lambda: JSONResponse(answer.of(completions).model_dump(exclude_unset=True))
    )


class _Answer:
    """Makes an answer from completions."""

    def __init__(self, service: Service, body: GenerateRequest, trace: Trace) -> None:
        self.texts = service.translator.texts
        self.model_name = service.translator.model_name
        self.trace = trace
        self.has_logprobs = body.logprobs is not None
        self.id = f"gen-{uuid.uuid4().hex}"

    def of(self, completions: list[Completion]) -> GenerateResponse:
        first = completions[0]
        choices = [
            Choice(index=i, text=c.text, finish_reason=c.finish_reason, **self.scored(c.tokens))
            for i, c in enumerate(completions)
        ]
        return GenerateResponse(
            id=self.id,
            model=self.model_name,
            text=first.text,
            finish_reason=first.finish_reason,
            steering=first.steering,
            usage=self.usage(),
            timing=timing_of(completions, self.trace),
            **self.scored(first.tokens),
            **({"choices": choices} if len(choices) > 1 else {}),
        )

    def scored(self, tokens: tuple[ScoredToken, ...]) -> dict[str, Any]:
        """Return the field `logprobs`, where it was requested."""
        return {"logprobs": self.texts.scores(tokens)} if self.has_logprobs else {}

    def usage(self) -> Usage:
        return usage_of(self.trace.n_prompt_tokens, self.trace.n_generated_tokens)


class _Stream:
    """The events of a stream; the last has all of the answer that was not sent before."""

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer
        self._completions: dict[int, Completion] = {}

    def events(self, update: Update) -> Iterable[Event]:
        if update.completion is not None:
            self._completions[update.index] = update.completion
        event: Event = {"text": update.text, "index": update.index}
        for name, scored in self._answer.scored(update.tokens).items():
            event[name] = [score.model_dump() for score in scored]
        if update.text or (self._answer.has_logprobs and update.tokens):
            yield event

    def closing(self) -> Iterable[Event]:
        ordered = [self._completions[i] for i in sorted(self._completions)]
        rest = self._answer.of(ordered).model_dump(
            exclude={"text": True, "logprobs": True, "choices": {"__all__": {"text", "logprobs"}}},
            exclude_unset=True,
        )
        yield rest


def timing_of(completions: list[Completion], trace: Trace) -> Timing:
    """Return the seconds until the first start, the first token, and now."""
    firsts = [c.timing.tokens_s[0] for c in completions if c.timing.tokens_s]
    return Timing(
        queued_s=round(min(c.timing.queued_s for c in completions), 4),
        first_token_s=round(min(firsts), 4) if firsts else None,
        total_s=round(trace.age_s, 4),
    )
