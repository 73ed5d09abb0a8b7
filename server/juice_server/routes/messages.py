"""POST /v1/messages, as Anthropic's clients expect it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from juice.engine import Completion, SteeringReport, Update
from juice_server.chats import prompt_of, requests_of
from juice_server.errors import Failure, in_anthropics_words
from juice_server.routes.strict import StrictRoute
from juice_server.schemas.messages import CountRequest, MessagesRequest
from juice_server.service import Service, ServiceOf
from juice_server.sse import Event, answered
from juice_server.trace import Trace, trace_of

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/messages", response_model=dict[str, Any])
async def messages(body: MessagesRequest, request: Request, service: ServiceOf) -> Response:
    """Answer a chat."""
    requests = await requests_of(
        service.translator, request, body, body.turns(), **body.for_template()
    )
    answer = _Answer(service, body, trace_of(request.scope))
    return await answered(service, request, requests, answer, is_stream=body.stream)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request, service: ServiceOf) -> dict[str, int]:
    """Return how many tokens a chat has."""

    def count() -> int:
        text = prompt_of(service.translator, body.turns(), body, **body.for_template()).text
        return len(service.translator.tokens(text, add_special_tokens=False, is_to_fit=False))

    return {"input_tokens": await service.translator.off_loop(request, count)}


class _Answer:
    """Makes a message, or the events of a stream."""

    def __init__(self, service: Service, body: MessagesRequest, trace: Trace) -> None:
        self._model_name = service.translator.model_name
        self._description = service.model.description
        self._body, self._trace = body, trace
        self._id = f"msg_{uuid.uuid4().hex}"
        self._has_begun = False
        self._completion: Completion | None = None

    def of(self, completions: list[Completion]) -> Event:
        done = completions[0]
        return {
            **self._frame([{"type": "text", "text": done.text}], done.steering),
            **self._stopped(done),
            "usage": self._usage(self._trace.n_generated_tokens),
        }

    def events(self, update: Update) -> Iterable[Event]:
        if not self._has_begun:
            self._has_begun = True
            begun = {**self._frame([]), "stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": {**begun, "usage": self._usage(0)}}
            block = {"type": "text", "text": ""}
            yield {"type": "content_block_start", "index": 0, "content_block": block}
        if update.text:
            delta = {"type": "text_delta", "text": update.text}
            yield {"type": "content_block_delta", "index": 0, "delta": delta}
        self._completion = update.completion

    def closing(self) -> Iterable[Event]:
        done = self._completion
        if done is None:
            return
        yield {"type": "content_block_stop", "index": 0}
        yield {
            "type": "message_delta",
            "delta": self._stopped(done),
            "usage": self._usage(self._trace.n_generated_tokens),
            "steering": done.steering.to_dict(),
        }
        yield {"type": "message_stop"}

    def failed(self, failure: Failure) -> Event:
        return in_anthropics_words(failure)

    def _frame(self, content: list[Event], steering: SteeringReport | None = None) -> Event:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model_name,
            "content": content,
            **({} if steering is None else {"steering": steering.to_dict()}),
        }

    def _stopped(self, done: Completion) -> Event:
        """Return why the answer ends: at its own end, at a stop sequence, or at the bound."""
        if done.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        ids = done.token_ids
        if ids and ids[-1] in self._description.stop_token_ids:
            return {"stop_reason": "end_turn", "stop_sequence": None}
        # The text ends before the sequence, its tokens do not.
        whole = str(self._description.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        found = [own for own in self._body.stop_sequences if own in whole]
        first = min(found, key=whole.index, default=None)
        return {"stop_reason": "stop_sequence" if first else "end_turn", "stop_sequence": first}

    def _usage(self, n_out: int) -> Event:
        return {
            "input_tokens": self._trace.n_prompt_tokens,
            "output_tokens": n_out,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        }
