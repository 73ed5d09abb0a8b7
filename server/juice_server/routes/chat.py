"""POST /v1/chat/completions, as OpenAI's clients expect it; a chat template makes the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from juice.engine import Completion, ScoredToken, Update
from juice_server.chats import requests_of
from juice_server.routes.openai_answer import OpenAIAnswer, alternatives
from juice_server.routes.strict import StrictRoute
from juice_server.schemas.openai import ChatRequest
from juice_server.service import Service, ServiceOf
from juice_server.sse import Event, answered
from juice_server.tokens import finite
from juice_server.trace import Trace, trace_of

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/chat/completions", response_model=dict[str, Any])
async def chat(body: ChatRequest, request: Request, service: ServiceOf) -> Response:
    """Answer a chat."""
    requests = await requests_of(
        service.translator,
        request,
        body,
        [message.plain() for message in body.messages],
        top_logprobs=body.top_logprobs or 0,
        **body.for_template(),
    )
    answer = _Answer(service, body, trace_of(request.scope))
    return await answered(service, request, requests, answer, is_stream=body.stream)


class _Answer(OpenAIAnswer):
    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest, trace: Trace) -> None:
        super().__init__(service, body, trace)
        self._has_logprobs = body.logprobs
        self._begun: set[int] = set()

    def of(self, completions: list[Completion]) -> Event:
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": c.text, "refusal": None},
                "finish_reason": c.finish_reason,
                "logprobs": self._logprobs(c.tokens),
            }
            for i, c in enumerate(completions)
        ]
        return self._whole(choices, completions[0].steering)

    def events(self, update: Update) -> Iterable[Event]:
        i, done = update.index, update.completion
        if i not in self._begun:
            self._begun.add(i)
            yield self._chunk(_choice(i, {"role": "assistant", "content": ""}))
        if update.text or (self._has_logprobs and update.tokens):
            logprobs = self._logprobs(update.tokens)
            yield self._chunk(_choice(i, {"content": update.text}, logprobs=logprobs))
        if done is not None:
            yield self._chunk(_choice(i, {}, finish_reason=done.finish_reason), done.steering)

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> Event | None:
        if not self._has_logprobs:
            return None
        content = []
        for token in tokens:
            top = [self._scored(*other) for other in alternatives(token)]
            content.append({**self._scored(token.id, token.logprob or 0.0), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _scored(self, token: int, logprob: float) -> Event:
        text = self._texts[token]
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}


def _choice(
    index: int, delta: Event, *, finish_reason: str | None = None, logprobs: Event | None = None
) -> Event:
    return {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
