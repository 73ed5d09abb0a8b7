"""POST /v1/messages and its count_tokens, as Anthropic's clients expect them, plus `steer`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, Tag, model_validator
from pydantic_core import from_json

from juice.engine.answer import Completion, Update
from juice.engine.request import MAX_STOPS
from juice.engine.steer import SteeringReport
from juice.engine.structure import Structure
from juice_server.chat import (
    MAX_ID,
    MAX_TOOLS,
    ChatFields,
    ItemToolChoice,
    Mode,
    Name,
    TextPart,
    Texts,
    by_type,
    made_call,
    offered,
    plain,
    with_one_system_turn,
)
from juice_server.chat_prompt import Chat, chat_of, prompt_of
from juice_server.errors import Failure, in_anthropics_words
from juice_server.fields import MAX_TOKENS, Answer, Documented, Unsupported, at_most, streamed
from juice_server.http import StrictRoute
from juice_server.routes.stream import Event, Renderer
from juice_server.service import AdmittingService, Service, ServiceOf
from juice_server.tool_parser import Arguments, Call, Part, Thought, WholePart, Words, whole
from juice_server.tools import Function, Offer

OPEN_TURN = "a last turn of the assistant's goes on by itself"


class ToolUseBlock(Documented):
    """A call of a function that the assistant makes."""

    type: Literal["tool_use"]
    id: str = Field(max_length=MAX_ID)
    """The id of the call, which its result repeats."""
    name: str = Field(max_length=MAX_ID)
    """The name of the function."""
    input: dict[str, Any]
    """Its arguments."""


class ThinkingBlock(Documented):
    """What the model thought before it answered, where its tokenizer tells it apart.

    Of the thoughts that a client sends back, the template decides what to show.
    """

    type: Literal["thinking"]
    thinking: str
    """The thoughts."""
    signature: str | None = ""
    """Empty in answers, and not read."""


class RedactedThinkingBlock(Documented):
    """What the assistant of another server thought; left out."""

    type: Literal["redacted_thinking"]


class ToolResultBlock(Documented):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=MAX_ID)
    """The id of the call."""
    content: Texts | None = None
    """What it returned."""
    is_error: bool | None = None
    """Whether the call failed; the text then begins with `Error:`."""

    @property
    def text(self) -> str:
        return f"Error: {plain(self.content)}".rstrip() if self.is_error else plain(self.content)


Block = Annotated[
    Annotated[TextPart, Tag("TextPart")]
    | Annotated[ToolUseBlock, Tag("ToolUseBlock")]
    | Annotated[ToolResultBlock, Tag("ToolResultBlock")]
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")]
    | Annotated[RedactedThinkingBlock, Tag("RedactedThinkingBlock")],
    by_type(TextPart, ToolUseBlock, ToolResultBlock, ThinkingBlock, RedactedThinkingBlock),
]


class Turn(Documented):
    """One turn of the chat."""

    role: Literal["user", "assistant", "system"]
    """Whose turn it is."""
    content: str | Annotated[list[Block], Field(fail_fast=True)]
    """The text, or blocks."""

    def plain(self) -> Iterable[dict[str, Any]]:
        """Yield the turns in the form that templates take: results of calls first, each its own."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                result = {"role": "tool", "tool_call_id": block.tool_use_id}
                yield {**result, "content": block.text}
        texts = [block for block in self.content if isinstance(block, TextPart)]
        used = [block for block in self.content if isinstance(block, ToolUseBlock)]
        thoughts = "".join(
            block.thinking for block in self.content if isinstance(block, ThinkingBlock)
        )
        if texts or used or thoughts or not self.content:
            turn: dict[str, Any] = {"role": self.role, "content": plain(texts)}
            if thoughts:
                turn["reasoning_content"] = thoughts
            if used:
                turn["tool_calls"] = [made_call(call.id, call.name, call.input) for call in used]
            yield turn


class Tool(Documented):
    """A function, with the JSON schema of its arguments; tools that run elsewhere have a type."""

    type: Literal["custom"] | None = None
    """`custom`, or left out."""
    name: Name
    """Its name."""
    description: str | None = None
    """What it is for."""
    input_schema: dict[str, Any]
    """The JSON schema of its arguments, an object."""
    strict: bool | None = None
    """Whether the arguments must be valid under the schema."""

    @property
    def function(self) -> Function:
        return Function(self.name, self.description, self.input_schema, bool(self.strict))


class ToolChoice(Documented):
    """Whether a function must be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    """`auto`: it may; `any`: it must call one; `tool`: this one; `none`: it calls none."""
    name: Name | None = None
    """The name of the function, for type `tool`."""
    disable_parallel_tool_use: bool = False
    """Whether it may have one call at most."""

    @model_validator(mode="after")
    def _has_its_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("type tool needs a name, and no other type has one")
        return self


class OutputFormat(Documented, extra="forbid"):
    """The form of the answer: a JSON schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    """The JSON schema."""


class OutputConfig(Documented, extra="forbid"):
    """How to answer; there is no effort to choose."""

    format: OutputFormat | None = None
    """The form of the answer."""
    effort: None = None
    """Not served."""


class CountRequest(ChatFields):
    """The body of POST /v1/messages/count_tokens."""

    not_served: ClassVar[Mapping[str, Unsupported]] = {
        "container": Unsupported(),
        "mcp_servers": Unsupported(harmless=([],)),
        "add_generation_prompt": Unsupported(OPEN_TURN, (True,)),
        "continue_final_message": Unsupported(OPEN_TURN),
    }

    messages: list[Turn] = Field(min_length=1, max_length=4096, fail_fast=True)
    """The turns of the chat."""
    system: Texts | None = None
    """What goes before them, as a turn of the system's."""
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    """The functions that the answer may call."""
    tool_choice: ToolChoice = ToolChoice(type="auto")
    """Whether it must call one, and which."""
    output_config: OutputConfig | None = None
    """How to answer."""
    output_format: OutputFormat | None = None
    """The form of the answer, as Anthropic's first clients for it have it."""

    def _given(self) -> dict[str, Structure]:
        given, asked = super()._given(), self.output_config
        if asked is not None and asked.format is not None:
            given["output_config.format"] = Structure.json_schema(asked.format.schema_)
        if self.output_format is not None:
            given["output_format"] = Structure.json_schema(self.output_format.schema_)
        return given

    def offer(self) -> Offer | None:
        asked = self.tool_choice
        modes: dict[str, Mode] = {"auto": "auto", "none": "none", "any": "required"}
        choice = modes.get(asked.type) or ItemToolChoice(type="function", name=asked.name or "")
        functions = [tool.function for tool in self.tools or ()]
        return offered(functions, choice, is_single=asked.disable_parallel_tool_use)

    def turns(self) -> list[dict[str, Any]]:
        turns = [plain_turn for turn in self.messages for plain_turn in turn.plain()]
        if self.system is not None:
            turns.insert(0, {"role": "system", "content": plain(self.system)})
        return with_one_system_turn(turns)

    def for_template(self) -> dict[str, Any]:
        is_open = self.messages[-1].role == "assistant"
        return {
            **super().for_template(),
            "add_generation_prompt": not is_open,
            "continue_final_message": is_open,
        }


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages; a last turn of the assistant's goes on."""

    max_tokens: int = Field(strict=True, ge=1, le=MAX_TOKENS)
    """The most new tokens."""
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], at_most(MAX_STOPS)] = (
        Field(default_factory=list)
    )
    """The answer ends before the first of these that occurs."""

    @model_validator(mode="after")
    def _settle(self) -> MessagesRequest:
        if self.n != 1:
            raise ValueError("a message is one answer; leave out n")
        if self.stop_sequences:
            self.stop = [*(self.stop or ()), *self.stop_sequences]
        return self


EVENTS = (
    "Anthropic's message, with `steering`. A stream has its events: `message_start`; for each "
    "block `content_block_start`, `content_block_delta` (`text_delta`, `thinking_delta` or "
    "`input_json_delta`) and `content_block_stop`; then `message_delta` with `stop_reason`, "
    "`usage` and `steering`, and `message_stop`, or `error`. No `[DONE]` follows."
)


class MessageUsage(Answer):
    """Prompt and generated tokens."""

    input_tokens: int
    """Tokens of the prompt, without those of `cache_read_input_tokens`."""
    output_tokens: int
    """Tokens of the answer, stop tokens included."""
    cache_creation_input_tokens: int = 0
    """Always 0."""
    cache_read_input_tokens: int = 0
    """Tokens of the prompt that vLLM's prefix cache had; known at the end."""


class MessageAnswer(Answer):
    """The answer of POST /v1/messages."""

    id: str
    """The id of the message."""
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    """The name of the model."""
    content: list[TextPart | ThinkingBlock | ToolUseBlock]
    """What the model thought, said and called, in order."""
    steering: SteeringReport
    """What was applied."""
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    """Why it ends."""
    stop_sequence: str | None
    """Which of the `stop_sequences` ended it; null where none did."""
    usage: MessageUsage
    """Tokens of the prompt and the answer."""


class CountAnswer(Answer):
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: int
    """How many tokens the chat has."""


router = APIRouter(route_class=StrictRoute)


@router.post("/v1/messages", response_model=MessageAnswer, responses=streamed(EVENTS))
async def messages(body: MessagesRequest, request: Request, service: AdmittingService) -> Response:
    """Answer a chat."""
    chat = await chat_of(service.translator, request, body)
    renderer = MessageRenderer(service, request, body, chat)
    return await renderer.answered(chat.requests, is_stream=body.stream)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request, service: ServiceOf) -> CountAnswer:
    """Return how many tokens a chat has."""
    offer = body.offer()
    translator = service.translator.trusting(request, body).offering(offer)

    def count() -> int:
        prompt = prompt_of(
            translator,
            body.turns(),
            body.for_template(),
            offer=offer,
            context=body.context,
            documents=body.documents,
        )
        ids = translator.tokens(prompt.text, add_special_tokens=False, is_to_fit=False)
        return len(ids)

    return CountAnswer(input_tokens=await translator.off_loop(request, count))


class MessageRenderer(Renderer):
    """Renders the answer to POST /v1/messages, or the events of a stream."""

    id_prefix, says_done = "msg_", False

    def __init__(
        self, service: Service, request: Request, body: MessagesRequest, chat: Chat
    ) -> None:
        super().__init__(service, request)
        self._body, self._reader, self._has_begun = body, chat.reader(), False
        self._kinds: list[type[Part]] = []  # of the blocks; the last is open while a stream runs

    def of(self, completions: list[Completion]) -> MessageAnswer:
        done = completions[0]
        blocks = [block_of(part) for part in whole(self._reader, done.text) or [Words("")]]
        has_calls = any(isinstance(block, ToolUseBlock) for block in blocks)
        return MessageAnswer(
            **self._frame(blocks),
            **self._stopped(done, has_calls=has_calls),
            usage=self._usage(self._trace.n_generated_tokens),
            steering=done.steering,
        )

    def events(self, update: Update) -> Iterable[Event]:
        """Yield the beginning of the message once, then the new parts of its blocks."""
        if not self._has_begun:
            self._has_begun = True
            begun = {**self._frame([]), "stop_reason": None, "stop_sequence": None}
            usage = self._usage(0).model_dump()
            yield {"type": "message_start", "message": {**begun, "usage": usage}}
        for part in self._reader.feed(update.text):
            yield from self._streamed(part)

    def closing(self, completions: list[Completion]) -> Iterable[Event]:
        """Yield the rest of the last block, why the message ends, and its end."""
        done = completions[0]
        for part in self._reader.finish():
            yield from self._streamed(part)
        if not self._kinds:
            yield from self._streamed(Words(""))
        yield {"type": "content_block_stop", "index": len(self._kinds) - 1}
        yield {
            "type": "message_delta",
            "delta": self._stopped(done, has_calls=Call in self._kinds),
            "usage": self._usage(self._trace.n_generated_tokens).model_dump(),
            "steering": done.steering.to_dict(),
        }
        yield {"type": "message_stop"}

    def failed(self, failure: Failure) -> Event:
        return in_anthropics_words(failure)

    def _streamed(self, part: Part) -> Iterable[Event]:
        """Yield the events of a part of the answer, and those of a new block if it begins one."""
        at = len(self._kinds) - 1
        is_new = isinstance(part, Call) or self._kinds[-1:] != [type(part)]
        if is_new and not isinstance(part, Arguments):
            if self._kinds:
                yield {"type": "content_block_stop", "index": at}
            self._kinds.append(type(part))
            at += 1
            block = block_of(part.emptied()).model_dump()
            yield {"type": "content_block_start", "index": at, "content_block": block}
        if delta := _delta(part):
            yield {"type": "content_block_delta", "index": at, "delta": delta}

    def _frame(self, content: Sequence[Documented]) -> Event:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model_name,
            "content": content,
        }

    def _stopped(self, done: Completion, *, has_calls: bool) -> Event:
        """Return why the answer ends: at its own end, at a stop sequence, or at the bound."""
        reason, first = "end_turn", None
        if done.finish_reason == "length":
            reason = "max_tokens"
        elif has_calls:
            reason = "tool_use"
        elif done.stop_string in self._body.stop_sequences:
            reason, first = "stop_sequence", done.stop_string
        return {"stop_reason": reason, "stop_sequence": first}

    def _usage(self, n_out: int) -> MessageUsage:
        n_cached = self._trace.n_cached_tokens
        return MessageUsage(
            input_tokens=self._trace.n_prompt_tokens - n_cached,
            output_tokens=n_out,
            cache_read_input_tokens=n_cached,
        )


def block_of(part: WholePart) -> TextPart | ThinkingBlock | ToolUseBlock:
    """Return a part of an answer as a block; arguments as far as they came.

    Those that are no JSON that can be sent, such as 1e999, become text.
    """
    if isinstance(part, Words):
        return TextPart(type="text", text=part.text)
    if isinstance(part, Thought):
        return ThinkingBlock(type="thinking", thinking=part.text)
    try:
        arguments = from_json(part.arguments or "{}", allow_partial=True)
        json.dumps(arguments, allow_nan=False)
    except ValueError:
        return TextPart(type="text", text=part.arguments)
    return ToolUseBlock(type="tool_use", id=part.id, name=part.name, input=arguments)


def _delta(part: Part) -> Event | None:
    if isinstance(part, Thought):
        return {"type": "thinking_delta", "thinking": part.text}
    if not part.text:
        return None
    if isinstance(part, Words):
        return {"type": "text_delta", "text": part.text}
    return {"type": "input_json_delta", "partial_json": part.text}
