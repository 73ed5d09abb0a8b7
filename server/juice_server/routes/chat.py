"""POST /v1/chat/completions, as OpenAI's clients expect it; a chat template makes the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import Response

from juice.engine import Completion, ScoredToken, Update
from juice_server.chats import Chat, chat_of
from juice_server.routes.openai_answer import OpenAIAnswer, alternatives
from juice_server.routes.strict import StrictRoute
from juice_server.schemas.openai import ChatRequest
from juice_server.schemas.openai_answers import CHAT_EVENTS, ChatAnswer
from juice_server.schemas.streams import STREAMED
from juice_server.service import Service, ServiceOf
from juice_server.sse import Event, answered
from juice_server.tokens import finite
from juice_server.tools.reading import Arguments, Call, Part, Reader, Thought, Words, whole
from juice_server.trace import Trace, trace_of

router = APIRouter(route_class=StrictRoute)


@router.post(
    "/v1/chat/completions",
    response_model=ChatAnswer,
    response_description=CHAT_EVENTS,
    responses=STREAMED,
)
async def chat(body: ChatRequest, request: Request, service: ServiceOf) -> Response:
    """Answer a chat."""
    chat = await chat_of(
        service.translator,
        request,
        body,
        [message.plain() for message in body.messages],
        body.for_template(),
        top_logprobs=body.top_logprobs or 0,
    )
    answer = _Answer(service, body, trace_of(request.scope), chat)
    return await answered(service, request, chat.requests, answer, is_stream=body.stream)


class _Answer(OpenAIAnswer):
    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest, trace: Trace, chat: Chat) -> None:
        super().__init__(service, body, trace)
        self._has_logprobs, self._chat = body.logprobs, chat
        self._begun: dict[int, _Begun] = {}

    def of(self, completions: list[Completion]) -> Event:
        choices = []
        for i, done in enumerate(completions):
            parts = whole(self._chat.reader(), done.text)
            choice = {
                "index": i,
                "message": _message(parts),
                "finish_reason": _reason(done, any(isinstance(own, Call) for own in parts)),
                "logprobs": self._logprobs(done.tokens),
            }
            choices.append(choice)
        return self._whole(choices, completions[0].steering)

    def events(self, update: Update) -> Iterable[Event]:
        i, done = update.index, update.completion
        if i not in self._begun:
            self._begun[i] = _Begun(self._chat.reader())
            yield self._chunk(_choice(i, {"role": "assistant", "content": ""}))
        begun = self._begun[i]
        parts = begun.reader.feed(update.text)
        if done is not None:
            parts += begun.reader.finish()
        deltas = [begun.delta(own) for own in parts]
        logprobs = self._logprobs(update.tokens) if update.tokens else None
        if logprobs is not None and not deltas:
            deltas.append({"content": ""})
        for delta in deltas:
            yield self._chunk(_choice(i, delta, logprobs=logprobs))
            logprobs = None  # once for each token
        if done is not None:
            reason = _reason(done, begun.n_calls > 0)
            yield self._chunk(_choice(i, {}, finish_reason=reason), done.steering)

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


@dataclass
class _Begun:
    """A streamed choice: what reads it, and how many calls it has so far."""

    reader: Reader
    n_calls: int = 0

    def delta(self, part: Part) -> Event:
        if isinstance(part, Words):
            return {"content": part.text}
        if isinstance(part, Thought):
            return {"reasoning_content": part.text}
        if isinstance(part, Arguments):
            more = {"index": self.n_calls - 1, "function": {"arguments": part.text}}
            return {"tool_calls": [more]}
        self.n_calls += 1
        return {"tool_calls": [{"index": self.n_calls - 1, **_call(part)}]}


def _message(parts: Sequence[Part]) -> Event:
    calls = [_call(own) for own in parts if isinstance(own, Call)]
    thoughts = "".join(own.text for own in parts if isinstance(own, Thought))
    text = "".join(own.text for own in parts if isinstance(own, Words))
    return {
        "role": "assistant",
        "content": text if text or not calls else None,
        "refusal": None,
        **({"reasoning_content": thoughts} if thoughts else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _call(call: Call) -> Event:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _reason(done: Completion, has_calls: bool) -> str:
    return "tool_calls" if has_calls and done.finish_reason == "stop" else done.finish_reason


def _choice(
    index: int, delta: Event, *, finish_reason: str | None = None, logprobs: Event | None = None
) -> Event:
    return {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
