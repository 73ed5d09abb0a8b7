"""POST /v1/chat/completions, as OpenAI's clients expect it: the tokenizer's own template makes the prompt."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from juice.engine import Completion, ScoredToken, Update
from juice.errors import RequestError
from juice_server.schemas.generation import usage_of
from juice_server.schemas.openai import ChatRequest
from juice_server.service import Service, service_of
from juice_server.sse import Event, stream
from juice_server.tokens import finite
from juice_server.trace import Trace, trace_of

router = APIRouter()


@router.post("/v1/chat/completions", response_model=dict[str, Any])
async def chat(
    body: ChatRequest, request: Request, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Answer a chat."""
    trace = trace_of(request.scope)
    prompt = await service.translator.off_loop(lambda: _prompt(body, service))
    requests = await service.translator.requests(
        [prompt], body, trace, alias=body.model, is_chat=True, top_logprobs=body.top_logprobs or 0
    )
    answer = _Answer(service, body, trace)
    if body.stream:
        return await stream(service, request, requests, answer)
    completions = await service.complete(request, requests)
    return await asyncio.to_thread(lambda: JSONResponse(answer.of(completions)))


def _prompt(body: ChatRequest, service: Service) -> str:
    """Return the chat as one text.

    Raises RequestError where there is no template, or it refuses the messages.
    """
    prompts = service.translator.chat_model.prompts
    if prompts.chat_template is None:
        raise RequestError(
            f"{service.translator.model_name} has no chat template; use /v1/completions or"
            " /generate",
            param="messages",
        )
    return prompts.rendered([message.plain() for message in body.messages])


class _Answer:
    """Puts completions together to an answer, or their updates to a stream's chunks."""

    def __init__(self, service: Service, body: ChatRequest, trace: Trace) -> None:
        self._texts, self._model_name = service.translator.texts, service.translator.model_name
        self._body, self._trace = body, trace
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
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
        head = self._head("chat.completion")
        return {
            **head,
            "choices": choices,
            "usage": self._usage(),
            "steering": completions[0].steering.to_dict(),
        }

    def events(self, update: Update) -> Iterable[Event]:
        if update.index not in self._begun:
            self._begun.add(update.index)
            yield self._chunk(update.index, {"role": "assistant", "content": ""})
        if update.text or (self._body.logprobs and update.tokens):
            yield self._chunk(
                update.index, {"content": update.text}, logprobs=self._logprobs(update.tokens)
            )
        if update.completion is not None:
            done = self._chunk(update.index, {}, finish_reason=update.completion.finish_reason)
            yield {**done, "steering": update.completion.steering.to_dict()}

    def closing(self) -> Iterable[Event]:
        if self._body.include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def _chunk(
        self,
        index: int,
        delta: Event,
        *,
        finish_reason: str | None = None,
        logprobs: Event | None = None,
    ) -> Event:
        usage = {"usage": None} if self._body.include_usage else {}
        choice = {
            "index": index,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": logprobs,
        }
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage}

    def _head(self, kind: str) -> Event:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model_name}

    def _usage(self) -> Event:
        return usage_of(self._trace.n_prompt_tokens, self._trace.n_generated_tokens).model_dump()

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> Event | None:
        if not self._body.logprobs:
            return None
        content = []
        for token in tokens:
            top = [self._scored(other, logprob) for other, logprob in token.top]
            content.append({**self._scored(token.id, token.logprob or 0.0), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _scored(self, token: int, logprob: float) -> Event:
        text = self._texts[token]
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}
