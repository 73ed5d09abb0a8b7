"""POST /v1/responses, as OpenAI's clients expect it, without a memory of earlier ones."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from juice.engine import Completion, ScoredToken, SteeringReport, Update
from juice_server.chats import requests_of
from juice_server.errors import Failure
from juice_server.routes.openai_answer import alternatives
from juice_server.routes.strict import StrictRoute
from juice_server.schemas.responses import ResponsesRequest
from juice_server.service import Service, ServiceOf
from juice_server.sse import Event, answered
from juice_server.tokens import finite
from juice_server.trace import Trace, trace_of

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/responses", response_model=dict[str, Any])
async def responses(body: ResponsesRequest, request: Request, service: ServiceOf) -> Response:
    """Answer a chat."""
    requests = await requests_of(
        service.translator,
        request,
        body,
        body.messages(),
        top_logprobs=body.top_logprobs or 0,
    )
    answer = _Answer(service, body, trace_of(request.scope))
    return await answered(service, request, requests, answer, is_stream=body.stream)


class _Answer:
    """Makes a response, or the events of a stream: the beginning, the text, the whole."""

    def __init__(self, service: Service, body: ResponsesRequest, trace: Trace) -> None:
        self._texts, self._model_name = service.translator.texts, service.translator.model_name
        self._body, self._trace = body, trace
        self._id, self._item_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created, self._n_events = int(time.time()), 0
        self._completion: Completion | None = None

    def of(self, completions: list[Completion]) -> Event:
        return self._whole(completions[0])

    def events(self, update: Update) -> Iterable[Event]:
        if not self._n_events:
            begun = self._response("in_progress", [])
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
            item = self._item("in_progress", [])
            yield self._event("response.output_item.added", output_index=0, item=item)
            part = self._part("", ())
            yield self._of_part("response.content_part.added", part=part)
        if update.text or (self._body.has_logprobs and update.tokens):
            yield self._of_part(
                "response.output_text.delta",
                delta=update.text,
                logprobs=self._logprobs(update.tokens),
            )
        self._completion = update.completion

    def closing(self) -> Iterable[Event]:
        done = self._completion
        if done is None:
            return
        whole = self._whole(done)
        item = whole["output"][0]
        part = item["content"][0]
        yield self._of_part("response.output_text.done", text=done.text, logprobs=part["logprobs"])
        yield self._of_part("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, failure: Failure) -> Event:
        own = {"code": failure.code, "message": failure.message, "param": failure.param}
        return self._event("error", **own)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _of_part(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _whole(self, completion: Completion) -> Event:
        status = "incomplete" if completion.finish_reason == "length" else "completed"
        part = self._part(completion.text, completion.tokens)
        return self._response(status, [self._item(status, [part])], completion.steering)

    def _item(self, status: str, content: list[Event]) -> Event:
        own = {"id": self._item_id, "type": "message", "role": "assistant"}
        return {**own, "status": status, "content": content}

    def _part(self, text: str, tokens: Sequence[ScoredToken]) -> Event:
        own = {"type": "output_text", "text": text, "annotations": []}
        return {**own, "logprobs": self._logprobs(tokens)}

    def _response(
        self, status: str, output: list[Event], steering: SteeringReport | None = None
    ) -> Event:
        body, is_cut = self._body, status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model_name,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": body.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if steering is None else self._usage(),
            "user": None,
            **({} if steering is None else {"steering": steering.to_dict()}),
        }

    def _usage(self) -> Event:
        n_in, n_out = self._trace.n_prompt_tokens, self._trace.n_generated_tokens
        return {
            "input_tokens": n_in,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": n_out,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": n_in + n_out,
        }

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> list[Event]:
        if not self._body.has_logprobs:
            return []
        return [
            {
                **self._scored(token.id, token.logprob or 0.0),
                "top_logprobs": [self._scored(*other) for other in alternatives(token)],
            }
            for token in tokens
        ]

    def _scored(self, token: int, logprob: float) -> Event:
        text = self._texts[token]
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}
