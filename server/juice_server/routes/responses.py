"""POST /v1/responses, as OpenAI's clients expect it, without a memory of earlier ones."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from juice.engine import Completion, ScoredToken, SteeringReport, Update
from juice_server.chats import Chat, chat_of
from juice_server.errors import Failure
from juice_server.routes.openai_answer import alternatives
from juice_server.routes.strict import StrictRoute
from juice_server.schemas.responses import ResponsesRequest
from juice_server.schemas.responses_answer import EVENTS, ResponseAnswer
from juice_server.schemas.streams import STREAMED
from juice_server.service import Service, ServiceOf
from juice_server.sse import Event, answered
from juice_server.tokens import finite
from juice_server.tools.reading import Arguments, Call, Part, Thought, Words
from juice_server.trace import Trace, trace_of

# An item of a stream as it begins, by its type.
EMPTY: dict[str, Event] = {
    "message": {"content": []},
    "reasoning": {"content": []},
    "function_call": {"arguments": ""},
}

router = APIRouter(route_class=StrictRoute)


@router.post(
    "/v1/responses",
    response_model=ResponseAnswer,
    response_description=EVENTS,
    responses=STREAMED,
)
async def responses(body: ResponsesRequest, request: Request, service: ServiceOf) -> Response:
    """Answer a chat."""
    chat = await chat_of(
        service.translator,
        request,
        body,
        body.messages(),
        body.for_template(),
        top_logprobs=body.top_logprobs or 0,
    )
    answer = _Answer(service, body, trace_of(request.scope), chat)
    return await answered(service, request, chat.requests, answer, is_stream=body.stream)


class _Answer:
    """Makes a response, or the events of a stream: the beginning, its items, the whole."""

    says_done = False

    def __init__(self, service: Service, body: ResponsesRequest, trace: Trace, chat: Chat) -> None:
        self._texts, self._model_name = service.translator.texts, service.translator.model_name
        self._body, self._trace, self._reader = body, trace, chat.reader()
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created, self._n_events = int(time.time()), 0
        self._items: list[Event] = []  # the last of them is open while a stream runs

    def of(self, completions: list[Completion]) -> Event:
        done = completions[0]
        for part in [*self._reader.feed(done.text), *self._reader.finish()]:
            self._take(part)
        return self._whole(done)

    def events(self, update: Update) -> Iterable[Event]:
        if not self._n_events:
            begun = self._response("in_progress", [])
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
        parts = self._reader.feed(update.text)
        if not parts and self._body.has_logprobs and update.tokens:
            parts = [Words("")]
        logprobs = self._logprobs(update.tokens)
        for part in parts:
            yield from self._streamed(part, logprobs)
            logprobs = []  # once for each token

    def closing(self, completions: list[Completion]) -> Iterable[Event]:
        done = completions[0]
        for part in self._reader.finish():
            yield from self._streamed(part, [])
        if not self._items:
            yield from self._streamed(Words(""), [])
        whole = self._whole(done)
        yield from self._item_done(whole["output"][-1])
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, failure: Failure) -> Event:
        own = {"code": failure.code, "message": failure.message, "param": failure.param}
        return self._event("error", **own)

    def _take(self, part: Part) -> bool:
        """Add a part of the answer to its items; return whether it begins one."""
        if isinstance(part, Arguments):
            self._items[-1]["arguments"] += part.text
            return False
        new, last = _item(part), self._items[-1] if self._items else {}
        if isinstance(part, Call) or new["type"] != last.get("type"):
            self._items.append(new)
            return True
        last["content"][0]["text"] += new["content"][0]["text"]
        return False

    def _streamed(self, part: Part, logprobs: list[Event]) -> Iterable[Event]:
        """Take a part of the answer; yield its events, those of a new item where it begins one."""
        last = self._items[-1] if self._items else None
        if self._take(part):
            if last is not None:
                yield from self._item_done({**last, "status": "completed"})
            begun = {**self._items[-1], **EMPTY[self._items[-1]["type"]], "status": "in_progress"}
            yield self._of_item("response.output_item.added", item=begun)
            if isinstance(part, Words):
                empty = _words("")
                yield self._of_item("response.content_part.added", content_index=0, part=empty)
        kind, text = _delta(part)
        own: Event = {"delta": text}
        if not isinstance(part, Call | Arguments):
            own["content_index"] = 0
        if isinstance(part, Words):
            own["logprobs"] = logprobs
        if text or logprobs:
            yield self._of_item(f"response.{kind}.delta", **own)

    def _item_done(self, item: Event) -> Iterable[Event]:
        """Yield the last events of an item."""
        if item["type"] == "function_call":
            own = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("response.function_call_arguments.done", item, **own)
        else:
            part = item["content"][0]
            is_text = part["type"] == "output_text"
            kind = "output_text" if is_text else "reasoning_text"
            own = {"logprobs": part["logprobs"]} if is_text else {}
            yield self._of_item(
                f"response.{kind}.done", item, content_index=0, text=part["text"], **own
            )
            if is_text:
                yield self._of_item("response.content_part.done", item, content_index=0, part=part)
        yield self._of_item("response.output_item.done", item, item=item)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _of_item(self, kind: str, of: Event | None = None, **fields: Any) -> Event:
        """Return an event of an item, else of the open one."""
        ids = [own["id"] for own in self._items]
        at = ids.index((of or self._items[-1])["id"])
        place = {} if "item" in fields else {"item_id": ids[at]}
        return self._event(kind, output_index=at, **place, **fields)

    def _whole(self, completion: Completion) -> Event:
        status = "incomplete" if completion.finish_reason == "length" else "completed"
        items = [{**own, "status": "completed"} for own in self._items or [_item(Words(""))]]
        items[-1]["status"] = status
        first = next((own for own in items if own["type"] == "message"), None)
        if first is not None:  # a response lists its tokens once
            first["content"][0]["logprobs"] = self._logprobs(completion.tokens)
        return self._response(status, items, completion.steering)

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
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": body.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": _plain(body.tool_choice),
            "tools": [_plain(tool) for tool in body.tools or ()],
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


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value


def _words(text: str) -> Event:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(part: Words | Thought | Call) -> Event:
    """Return a part of an answer as an item, without its status."""
    name = uuid.uuid4().hex
    if isinstance(part, Words):
        own = {"id": f"msg_{name}", "type": "message", "role": "assistant"}
        return {**own, "content": [_words(part.text)]}
    if isinstance(part, Thought):
        content = [{"type": "reasoning_text", "text": part.text}]
        return {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": content}
    called = {"call_id": part.id, "name": part.name, "arguments": part.arguments}
    return {"id": f"fc_{name}", "type": "function_call", **called}


def _delta(part: Part) -> tuple[str, str]:
    """Return what an event calls the text of a part, and the text."""
    if isinstance(part, Call):
        return "function_call_arguments", part.arguments
    if isinstance(part, Arguments):
        return "function_call_arguments", part.text
    return ("output_text" if isinstance(part, Words) else "reasoning_text"), part.text
