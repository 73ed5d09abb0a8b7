"""POST /v1/messages, as Anthropic's clients expect it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import from_json

from juice.engine import Completion, SteeringReport, Update
from juice_server.chats import Chat, chat_of, prompt_of
from juice_server.errors import Failure, in_anthropics_words
from juice_server.routes.strict import StrictRoute
from juice_server.schemas.messages import CountRequest, MessagesRequest
from juice_server.schemas.messages_answer import EVENTS, CountAnswer, MessageAnswer
from juice_server.schemas.streams import STREAMED
from juice_server.service import Service, ServiceOf
from juice_server.sse import Event, answered
from juice_server.tools.reading import Arguments, Call, Part, Thought, Words
from juice_server.trace import Trace, trace_of

# A block of a stream as it begins, by its type.
EMPTY: dict[str, Event] = {
    "text": {"text": ""},
    "thinking": {"thinking": ""},
    "tool_use": {"input": {}},
}

router = APIRouter(route_class=StrictRoute)


@router.post(
    "/v1/messages",
    response_model=MessageAnswer,
    response_description=EVENTS,
    responses=STREAMED,
)
async def messages(body: MessagesRequest, request: Request, service: ServiceOf) -> Response:
    """Answer a chat."""
    chat = await chat_of(service.translator, request, body, body.turns(), body.for_template())
    answer = _Answer(service, body, trace_of(request.scope), chat)
    return await answered(service, request, chat.requests, answer, is_stream=body.stream)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request, service: ServiceOf) -> CountAnswer:
    """Return how many tokens a chat has."""

    def count() -> int:
        text = prompt_of(service.translator, body.turns(), body, body.for_template()).text
        return len(service.translator.tokens(text, add_special_tokens=False, is_to_fit=False))

    return CountAnswer(input_tokens=await service.translator.off_loop(request, count))


class _Answer:
    """Makes a message, or the events of a stream."""

    says_done = False

    def __init__(self, service: Service, body: MessagesRequest, trace: Trace, chat: Chat) -> None:
        self._model_name = service.translator.model_name
        self._description = service.model.description
        self._body, self._trace = body, trace
        self._id = f"msg_{uuid.uuid4().hex}"
        self._has_begun = False
        self._reader = chat.reader()
        self._blocks: list[Event] = []  # the last of them is open while a stream runs

    def of(self, completions: list[Completion]) -> Event:
        done = completions[0]
        for part in [*self._reader.feed(done.text), *self._reader.finish()]:
            self._take(part)
        return {
            **self._frame(
                [_whole(own) for own in self._blocks or [_block(Words(""))]], done.steering
            ),
            **self._stopped(done),
            "usage": self._usage(self._trace.n_generated_tokens),
        }

    def events(self, update: Update) -> Iterable[Event]:
        if not self._has_begun:
            self._has_begun = True
            begun = {**self._frame([]), "stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": {**begun, "usage": self._usage(0)}}
        for part in self._reader.feed(update.text):
            yield from self._streamed(part)

    def closing(self, completions: list[Completion]) -> Iterable[Event]:
        done = completions[0]
        for part in self._reader.finish():
            yield from self._streamed(part)
        if not self._blocks:
            yield from self._streamed(Words(""))
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
        yield {
            "type": "message_delta",
            "delta": self._stopped(done),
            "usage": self._usage(self._trace.n_generated_tokens),
            "steering": done.steering.to_dict(),
        }
        yield {"type": "message_stop"}

    def failed(self, failure: Failure) -> Event:
        return in_anthropics_words(failure)

    def _streamed(self, part: Part) -> Iterable[Event]:
        """Take a part of the answer; yield its events, those of a new block where it begins one."""
        is_new, at = self._take(part), len(self._blocks) - 1
        if is_new:
            if at:
                yield {"type": "content_block_stop", "index": at - 1}
            empty = {**self._blocks[at], **EMPTY[self._blocks[at]["type"]]}
            yield {"type": "content_block_start", "index": at, "content_block": empty}
        if delta := _delta(part):
            yield {"type": "content_block_delta", "index": at, "delta": delta}

    def _take(self, part: Part) -> bool:
        """Add a part of the answer to its blocks; return whether it begins one."""
        if isinstance(part, Arguments):
            self._blocks[-1]["input"] += part.text
            return False
        new, last = _block(part), self._blocks[-1] if self._blocks else {}
        kind = new["type"]
        if isinstance(part, Call) or kind != last.get("type"):
            self._blocks.append(new)
            return True
        last[kind] += new[kind]
        return False

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
        if any(block["type"] == "tool_use" for block in self._blocks):
            return {"stop_reason": "tool_use", "stop_sequence": None}
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


def _block(part: Words | Thought | Call) -> Event:
    """Return a part of an answer as a block; texts stand under their type, arguments as text."""
    if isinstance(part, Words):
        return {"type": "text", "text": part.text}
    if isinstance(part, Thought):
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": part.arguments}


def _whole(block: Event) -> Event:
    """Return a block with its arguments as an object, as far as they came."""
    if block["type"] != "tool_use":
        return block
    return {**block, "input": from_json(block["input"] or "{}", allow_partial=True)}


def _delta(part: Part) -> Event | None:
    if isinstance(part, Call | Arguments):
        text = part.arguments if isinstance(part, Call) else part.text
        return {"type": "input_json_delta", "partial_json": text} if text else None
    if isinstance(part, Thought):
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "text_delta", "text": part.text} if part.text else None
