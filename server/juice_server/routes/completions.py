"""POST /v1/completions, as OpenAI's clients expect it, with `steer` beside their fields."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from juice.engine import Completion, ScoredToken, Update
from juice_server.schemas.generation import usage_of
from juice_server.schemas.openai import CompletionRequest
from juice_server.service import Service, service_of
from juice_server.sse import Event, stream
from juice_server.tokens import finite
from juice_server.trace import Trace, trace_of

router = APIRouter()


@router.post("/v1/completions", response_model=dict[str, Any])
async def completions(
    body: CompletionRequest, request: Request, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Continue one or more prompts."""
    trace = trace_of(request.scope)
    scored_prompt = body.echo and (body.logprobs is not None or body.max_tokens == 0)
    requests = await service.translator.requests(
        body.prompt,
        body,
        trace,
        contexts=body.context,
        alias=body.model,
        top_logprobs=body.logprobs or 0,
        prompt_logprobs=scored_prompt,
    )
    answer = _Answer(service, body, trace)
    if body.stream:
        return await stream(service, request, requests, answer)
    done = await service.complete(request, requests)
    return await asyncio.to_thread(lambda: JSONResponse(answer.of(done)))


class _Answer:
    """Puts completions together to an answer, or their updates to a stream's chunks."""

    def __init__(self, service: Service, body: CompletionRequest, trace: Trace) -> None:
        self._tokenizer = service.model.description.tokenizer
        self._texts, self._model_name = service.translator.texts, service.translator.model_name
        self._body, self._trace = body, trace
        self._id, self._created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}

    def of(self, completions: list[Completion]) -> Event:
        choices = []
        for i, c in enumerate(completions):
            text = self._echoed(i) + c.text
            tokens = (*c.prompt_tokens, *c.tokens)
            choices.append(
                {
                    "index": i,
                    "text": text,
                    "finish_reason": c.finish_reason,
                    "logprobs": self._logprobs(i, tokens),
                }
            )
        return {
            **self._head(),
            "choices": choices,
            "usage": self._usage(),
            "steering": completions[0].steering.to_dict(),
        }

    def events(self, update: Update) -> Iterable[Event]:
        i = update.index
        text = update.text if i in self._begun else self._echoed(i) + update.text
        self._begun.add(i)
        done = update.completion
        if not (text or done or (self._body.logprobs is not None and update.tokens)):
            return
        choice = {
            "index": i,
            "text": text,
            "finish_reason": done.finish_reason if done else None,
            "logprobs": self._logprobs(i, update.tokens),
        }
        yield {
            **self._chunk_head(),
            "choices": [choice],
            **({"steering": done.steering.to_dict()} if done else {}),
        }

    def closing(self) -> Iterable[Event]:
        if self._body.include_usage:
            yield {**self._head(), "choices": [], "usage": self._usage()}

    def _head(self) -> Event:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model_name,
        }

    def _chunk_head(self) -> Event:
        return {**self._head(), "usage": None} if self._body.include_usage else self._head()

    def _usage(self) -> Event:
        return usage_of(self._trace.n_prompt_tokens, self._trace.n_generated_tokens).model_dump()

    def _echoed(self, index: int) -> str:
        """Return the prompt of a choice, where it is to be repeated."""
        if not self._body.echo:
            return ""
        prompt = self._body.prompt[index // self._body.n]
        return prompt if isinstance(prompt, str) else str(self._tokenizer.decode(prompt))

    def _logprobs(self, index: int, tokens: Sequence[ScoredToken]) -> Event | None:
        if self._body.logprobs is None:
            return None
        texts = [self._texts[t.id] for t in tokens]
        offset = self._offsets.get(index, 0)
        offsets = [offset := offset + n for n in (0, *map(len, texts))]
        self._offsets[index] = offsets[-1]
        return {
            "tokens": texts,
            "token_logprobs": [None if t.logprob is None else finite(t.logprob) for t in tokens],
            "top_logprobs": [self._top(t) for t in tokens],
            "text_offset": offsets[:-1],
        }

    def _top(self, token: ScoredToken) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        # Of two tokens that read the same the likelier one stays.
        return {self._texts[other]: finite(logprob) for other, logprob in reversed(token.top)}
