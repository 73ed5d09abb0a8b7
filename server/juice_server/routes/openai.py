"""POST /v1/completions and /v1/chat/completions, as OpenAI's clients expect them, plus `steer`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field, model_validator

from juice.engine.answer import Completion, FinishReason, ScoredToken, Update
from juice.engine.steer import SteeringReport
from juice_server.chat import ChatFields, Message, TemplateFields, ToolChoice, Tools, offered
from juice_server.chat_prompt import Chat, chat_of
from juice_server.fields import (
    ABSENT,
    MAX_PROMPTS,
    MAX_TOKENS,
    TOP_LOGPROBS,
    Answer,
    Contexts,
    OpenAIFields,
    TokenId,
    Usage,
    as_list,
    at_most,
    streamed,
)
from juice_server.http import StrictRoute
from juice_server.requests import Offsets, TokenTexts, finite
from juice_server.routes.stream import Event, Renderer
from juice_server.service import AdmittingService, Service
from juice_server.tool_parser import Arguments, Call, Part, Reader, Thought, Words, whole
from juice_server.tools import Offer

COMPLETION_EVENTS = (
    "OpenAI's completion, with `steering`. A stream has an event for each piece of text: the same "
    "object with one choice, whose `finish_reason` is null until its last piece, which has "
    "`steering`; after them one without choices and with `usage`, where "
    "`stream_options.include_usage` asks for it, and `[DONE]`."
)
CHAT_EVENTS = (
    "OpenAI's chat completion, with `steering`. A stream has chunks (`chat.completion.chunk`) with "
    "one choice, whose `delta` has the role first, then pieces of `content`, of "
    "`reasoning_content`, or whole `tool_calls`; the last one of a choice has its `finish_reason` "
    "and `steering`. Then one without choices and with `usage`, where "
    "`stream_options.include_usage` asks for it, and `[DONE]`."
)


def _as_prompts(value: Any) -> Any:
    """Turn a string, tokens, or a list of either into a list of prompts."""
    is_tokens = isinstance(value, list) and value and isinstance(value[0], int)
    return [value] if is_tokens else as_list(value)


class CompletionRequest(OpenAIFields):
    """The body of POST /v1/completions.

    `prompt` is text, tokens, or a list of either; `context` goes before it.
    """

    default_max_tokens: ClassVar[int] = 16

    prompt: Annotated[
        list[str | Annotated[list[TokenId], Field(fail_fast=True)]],
        Field(min_length=1, fail_fast=True),
        at_most(MAX_PROMPTS),
        BeforeValidator(_as_prompts),
    ]
    """A text, or a list of tokens, or a list of either."""
    context: Contexts = None
    """What goes before the prompt: one for all prompts, or one for each."""
    logprobs: int | None = TOP_LOGPROBS
    """How many alternatives to report for every token; without it, no tokens are listed."""
    add_special_tokens: bool = True
    """Whether a text gets the tokens with which the model's prompts begin."""
    echo: bool = False
    """Begin the answer with the prompt, and with `logprobs` score its tokens."""

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.stream and self.logprobs is not None:
            raise ValueError(
                "echo with logprobs is not served as a stream; drop stream, echo or logprobs"
            )
        if self.echo and self.context is not None:
            raise ValueError(
                "echo with a context apart is not served; put the context into the prompt"
            )
        return self


class ChatRequest(TemplateFields, ChatFields):
    """The body of POST /v1/chat/completions.

    Without `max_tokens`, an answer has at most 512 tokens, or what the context leaves. `context`
    goes before the last user message, `documents` where the template puts them; contrasts need
    one of them.
    """

    default_max_tokens: ClassVar[int] = 512

    tools: Tools = None
    """The functions that the answer may call."""
    tool_choice: ToolChoice | None = None
    """Whether it must call one, and which."""
    parallel_tool_calls: bool = True
    """Whether it may have several calls."""
    messages: list[Message] = Field(min_length=1, max_length=4096, fail_fast=True)
    """The turns of the chat."""
    max_completion_tokens: int | None = Field(strict=True, default=None, ge=1, le=MAX_TOKENS)
    """The most new tokens; the same as `max_tokens`."""
    logprobs: bool = False
    """Whether to list the tokens of the answer."""
    top_logprobs: int | None = TOP_LOGPROBS
    """How many alternatives to report for each of them."""

    @model_validator(mode="after")
    def _settle(self) -> ChatRequest:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    def offer(self) -> Offer | None:
        functions = [tool.function.function for tool in self.tools or ()]
        choice = self.tool_choice or "auto"
        return offered(functions, choice, is_single=not self.parallel_tool_calls)

    def turns(self) -> list[dict[str, Any]]:
        return [message.plain() for message in self.messages]


class OpenAIAnswer(Answer):
    """What the answers of both routes have."""

    id: str
    """The id of the answer."""
    object: str
    created: int
    """When it was begun, in seconds since 1970."""
    model: str
    """The name of the model."""
    system_fingerprint: str
    """A name for all that decides a request's bits alone: model, dtype, engine, versions, flags."""
    choices: list[Any]
    usage: Usage
    """Tokens of prompts and answers."""
    steering: SteeringReport
    """What was applied; of several prompts, to the first."""


class CompletionLogprobs(Answer):
    """The tokens of a choice; those of the prompt first, where it is echoed."""

    tokens: list[str]
    """The text of each token."""
    token_logprobs: list[float | None]
    """The log-probability of each token; null for the first of a prompt."""
    top_logprobs: list[dict[str, float] | None]
    """The likeliest tokens in its place and itself, by text; null for the first of a prompt."""
    text_offset: list[int]
    """The character of the text at which each token begins."""


class CompletionChoice(Answer):
    """One text; choice i of prompt p has the index p * n + i."""

    index: int
    """The number of the choice."""
    text: str
    """The new text, after the prompt where it is echoed."""
    finish_reason: FinishReason
    """`stop`, or `length` after `max_tokens`."""
    logprobs: CompletionLogprobs | None
    """Its tokens, where `logprobs` was asked for."""
    steering: SteeringReport | None = ABSENT
    """What was applied to it, where there are several prompts."""


class CompletionAnswer(OpenAIAnswer):
    """The answer of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    """The texts."""


class ScoredText(Answer):
    """A token and how likely it was."""

    token: str
    """Its text."""
    logprob: float
    """Its log-probability, that of the steered model before sampling."""
    bytes: list[int]
    """Its text in UTF-8."""


class ScoredPlace(ScoredText):
    """A token of the answer and its alternatives."""

    top_logprobs: list[ScoredText]
    """The likeliest tokens in its place and itself, best first."""


class ChatLogprobs(Answer):
    """The tokens of a chat's answer."""

    content: list[ScoredPlace]
    """Each of them, those of calls and thoughts too."""
    refusal: None = None


class AnsweredFunction(Answer):
    """The function that the answer calls."""

    name: str
    """Its name."""
    arguments: str
    """Its arguments: a JSON object, as text."""


class AnsweredCall(Answer):
    """A call that the answer makes."""

    id: str
    """The id of the call, which its result repeats."""
    type: Literal["function"] = "function"
    function: AnsweredFunction
    """What is called, and with what."""


class AnsweredMessage(Answer):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """The text; null where there are calls alone."""
    refusal: None = None
    reasoning_content: str | None = ABSENT
    """What the model thought first; absent where its tokenizer does not tell it apart."""
    tool_calls: list[AnsweredCall] | None = ABSENT
    """The calls; absent where there are none."""


class ChatChoice(Answer):
    """One answer."""

    index: int
    """The number of the choice."""
    message: AnsweredMessage
    """What the assistant says and calls."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    """`stop`, `length` after `max_tokens`, or `tool_calls` where it ends with calls."""
    logprobs: ChatLogprobs | None
    """Its tokens, where `logprobs` was asked for."""


class ChatAnswer(OpenAIAnswer):
    """The answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    """The answers."""


def alternatives(token: ScoredToken) -> list[tuple[int, float]]:
    """Return the alternatives of a token, itself among them where there are any, best first."""
    found = [*token.top]
    if found and token.logprob is not None and token.id not in dict(found):
        found.append((token.id, token.logprob))
    return found


def scored_places(
    texts: TokenTexts, tokens: Sequence[ScoredToken], left_out: Collection[int] = ()
) -> list[ScoredPlace]:
    """Return the tokens of an answer with their alternatives, as chats and responses list them.

    Those that its text leaves out have no bytes.
    """

    def fields(token: int, logprob: float) -> dict[str, Any]:
        found = list(texts.bytes_of(token))
        return {"token": texts.name_of(token), "logprob": finite(logprob), "bytes": found}

    return [
        ScoredPlace(
            **fields(token.id, token.logprob or 0.0)
            | ({"bytes": []} if token.id in left_out else {}),
            top_logprobs=[ScoredText(**fields(*other)) for other in alternatives(token)],
        )
        for token in tokens
    ]


class OpenAIRenderer(Renderer):
    """Renders completions as an answer, or their updates as the chunks of a stream."""

    answer: ClassVar[type[OpenAIAnswer]]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, service: Service, request: Request, body: OpenAIFields) -> None:
        super().__init__(service, request)
        self._fingerprint, self._include_usage = service.system_fingerprint, body.include_usage

    def closing(self, completions: list[Completion]) -> Iterable[Event]:  # noqa: ARG002
        """Yield a stream's last chunk, the usage, where it is wanted."""
        if self._include_usage:
            usage = Usage.of(self._trace).model_dump()
            yield {**self._frame(self.chunk_kind, []), "usage": usage}

    def _whole(self, choices: Sequence[Any], steering: SteeringReport) -> OpenAIAnswer:
        frame = self._frame(self.kind, choices)
        return self.answer(**frame, usage=Usage.of(self._trace), steering=steering)

    def _chunk(self, choice: Event, steering: SteeringReport | None = None) -> Event:
        chunk = self._frame(self.chunk_kind, [choice])
        if self._include_usage:
            chunk["usage"] = None
        if steering is not None:
            chunk["steering"] = steering.to_dict()
        return chunk

    def _frame(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model_name,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }


def _choice(
    index: int,
    content: Event,
    finish_reason: str | None = None,
    logprobs: CompletionLogprobs | ChatLogprobs | None = None,
) -> Event:
    listed = None if logprobs is None else logprobs.model_dump()
    return {"index": index, **content, "finish_reason": finish_reason, "logprobs": listed}


router = APIRouter(route_class=StrictRoute)


@router.post(
    "/v1/completions", response_model=CompletionAnswer, responses=streamed(COMPLETION_EVENTS)
)
async def completions(
    body: CompletionRequest, request: Request, service: AdmittingService
) -> Response:
    """Continue one or more prompts."""
    scored_prompt = body.echo and (body.logprobs is not None or body.max_tokens == 0)
    translator = service.translator.trusting(request, body)
    prompts = await translator.joined_off_loop(request, body.prompt, body.context)
    requests = await translator.requests(
        request,
        prompts,
        body,
        alias=body.model,
        add_special_tokens=body.add_special_tokens,
        top_logprobs=body.logprobs or 0,
        prompt_logprobs=scored_prompt,
    )
    renderer = CompletionRenderer(service, request, body)
    return await renderer.answered(requests, is_stream=body.stream)


class CompletionRenderer(OpenAIRenderer):
    """Renders the answer to POST /v1/completions; each chunk is like it, with one choice."""

    id_prefix, answer = "cmpl-", CompletionAnswer
    kind = chunk_kind = "text_completion"

    def __init__(self, service: Service, request: Request, body: CompletionRequest) -> None:
        super().__init__(service, request, body)
        self._body = body
        self._tokenizer = self._description.tokenizer
        self._begun: set[int] = set()
        self._offsets: dict[int, Offsets] = {}

    def of(self, completions: list[Completion]) -> Answer:
        choices = []
        for i, done in enumerate(completions):
            text = {"text": self._echoed(i) + done.text}
            logprobs = self._logprobs(i, done.tokens, done.prompt_tokens)
            choice = _choice(i, text, done.finish_reason, logprobs)
            if len(self._body.prompt) > 1:  # a gate decides about each
                choice["steering"] = done.steering
            choices.append(choice)
        return self._whole(choices, completions[0].steering)

    def events(self, update: Update) -> Iterable[Event]:
        i, done = update.index, update.completion
        text = update.text if i in self._begun else self._echoed(i) + update.text
        self._begun.add(i)
        if text or done or (self._body.logprobs is not None and update.tokens):
            reason = done.finish_reason if done else None
            choice = _choice(i, {"text": text}, reason, self._logprobs(i, update.tokens))
            yield self._chunk(choice, done.steering if done else None)

    def _echoed(self, index: int) -> str:
        """Return the prompt of a choice, where it is to be echoed."""
        if not self._body.echo:
            return ""
        prompt = self._body.prompt[index // self._body.n]
        return prompt if isinstance(prompt, str) else str(self._tokenizer.decode(prompt))

    def _logprobs(
        self, index: int, new: Sequence[ScoredToken], prompt: Sequence[ScoredToken] = ()
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        tokens, texts = (*prompt, *new), self._texts
        if index not in self._offsets:
            unwritten = self._n_unwritten(index, tokens) if self._body.echo else 0
            self._offsets[index] = Offsets(-unwritten)
        left_out = texts.special if self._body.skip_special_tokens else ()
        pieces = [texts.bytes_of(token.id) for token in prompt]
        pieces += [b"" if token.id in left_out else texts.bytes_of(token.id) for token in new]
        return CompletionLogprobs(
            tokens=[texts.name_of(token.id) for token in tokens],
            token_logprobs=[t.logprob if t.logprob is None else finite(t.logprob) for t in tokens],
            top_logprobs=[self._top(token) for token in tokens],
            text_offset=self._offsets[index].of(pieces),
        )

    def _n_unwritten(self, index: int, tokens: Sequence[ScoredToken]) -> int:
        """Return how many characters of first special tokens the echo of a prompt leaves out."""
        special = {*self._tokenizer.all_special_ids}
        first = itertools.takewhile(lambda token: token.id in special, tokens)
        texts, prompt = [self._texts[token.id] for token in first], self._echoed(index)
        written = (i for i in range(len(texts) + 1) if prompt.startswith("".join(texts[i:])))
        return sum(map(len, texts[: next(written)]))

    def _top(self, token: ScoredToken) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        # Of two tokens with the same text, the likelier one is kept.
        return {
            self._texts.name_of(other): finite(logprob)
            for other, logprob in reversed(alternatives(token))
        }


@router.post("/v1/chat/completions", response_model=ChatAnswer, responses=streamed(CHAT_EVENTS))
async def chat(body: ChatRequest, request: Request, service: AdmittingService) -> Response:
    """Answer a chat."""
    n_top = body.top_logprobs or 0
    chat = await chat_of(service.translator, request, body, top_logprobs=n_top)
    renderer = ChatRenderer(service, request, body, chat)
    return await renderer.answered(chat.requests, is_stream=body.stream)


class ChatRenderer(OpenAIRenderer):
    """Renders the answer to POST /v1/chat/completions; a chunk has a `delta` for its message."""

    id_prefix, answer = "chatcmpl-", ChatAnswer
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, request: Request, body: ChatRequest, chat: Chat) -> None:
        super().__init__(service, request, body)
        self._has_logprobs, self._chat = body.logprobs, chat
        self._begun: dict[int, _Begun] = {}

    def of(self, completions: list[Completion]) -> Answer:
        choices = []
        for i, done in enumerate(completions):
            message = _message(whole(self._chat.reader(), done.text))
            reason = _reason(done, has_calls=message.tool_calls is not None)
            logprobs = self._logprobs(done.tokens)
            choices.append(
                ChatChoice(index=i, message=message, finish_reason=reason, logprobs=logprobs)
            )
        return self._whole(choices, completions[0].steering)

    def events(self, update: Update) -> Iterable[Event]:
        """Yield the chunks of an update: the role first, then parts of the turn, then its end."""
        i, done = update.index, update.completion
        if i not in self._begun:
            self._begun[i] = _Begun(self._chat.reader())
            yield self._chunk(_choice(i, {"delta": {"role": "assistant", "content": ""}}))
        begun = self._begun[i]
        parts = begun.reader.feed(update.text)
        if done is not None:
            parts += begun.reader.finish()
        deltas = [begun.delta(part) for part in parts]
        logprobs = self._logprobs(update.tokens) if update.tokens else None
        if logprobs is not None and not deltas:
            deltas.append({"content": ""})
        for delta in deltas:
            yield self._chunk(_choice(i, {"delta": delta}, None, logprobs))
            logprobs = None  # once for each token
        if done is not None:
            reason = _reason(done, has_calls=begun.n_calls > 0)
            yield self._chunk(_choice(i, {"delta": {}}, reason), done.steering)

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        left_out = self._chat.left_out(self._texts)
        return ChatLogprobs(content=scored_places(self._texts, tokens, left_out))


@dataclass
class _Begun:
    """A streamed choice: its reader, and how many calls it has so far."""

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
        return {"tool_calls": [{"index": self.n_calls - 1, **_call(part).model_dump()}]}


def _message(parts: Sequence[Part]) -> AnsweredMessage:
    calls = [_call(part) for part in parts if isinstance(part, Call)]
    text, thoughts = (
        "".join(part.text for part in parts if isinstance(part, kind)) for kind in (Words, Thought)
    )
    return AnsweredMessage(
        content=text if text or not calls else None,
        reasoning_content=thoughts or None,
        tool_calls=calls or None,
    )


def _call(call: Call) -> AnsweredCall:
    function = AnsweredFunction(name=call.name, arguments=call.arguments)
    return AnsweredCall(id=call.id, function=function)


def _reason(done: Completion, *, has_calls: bool) -> Literal["stop", "length", "tool_calls"]:
    return "tool_calls" if has_calls and done.finish_reason == "stop" else done.finish_reason
