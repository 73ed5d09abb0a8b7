"""POST /v1/responses, as OpenAI's clients expect it, without a memory, plus `steer`."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field, model_validator

from juice.engine.answer import Completion, ScoredToken, Update
from juice.engine.steer import SteeringReport
from juice.engine.structure import Structure
from juice_server.chat import (
    MAX_TOOLS,
    AnyItem,
    ChatFields,
    ItemChoice,
    ItemTool,
    TemplateFields,
    ThoughtItem,
    ThoughtText,
    offered,
    plain,
    with_one_system_turn,
)
from juice_server.chat_prompt import Chat, chat_of
from juice_server.errors import Failure
from juice_server.fields import (
    ABSENT,
    MAX_TOKENS,
    TOP_LOGPROBS,
    Answer,
    Documented,
    Schema,
    Unsupported,
    is_none,
    streamed,
)
from juice_server.http import StrictRoute
from juice_server.routes.openai import ScoredPlace, scored_places
from juice_server.routes.stream import Event, Renderer
from juice_server.service import AdmittingService, Service
from juice_server.tool_parser import Arguments, Call, Part, Thought, WholePart, Words, whole
from juice_server.tools import Offer

LOGPROBS = "message.output_text.logprobs"
# What else `include` may ask for without a change: thoughts are never encrypted here.
NOTHING_TO_INCLUDE = "reasoning.encrypted_content"
NO_MEMORY = "nothing is stored between requests; send what was said as input"


class TextFormat(Documented, extra="forbid"):
    """The form of the text: OpenAI's, in which a schema is not nested."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    """Any text, any JSON object, or JSON that is valid under a schema."""
    name: str | None = ABSENT
    """The schema's name, for nobody but the reader."""
    description: str | None = ABSENT
    """What it is for."""
    schema_: Schema | None = Field(default=None, alias="schema", exclude_if=is_none)
    """The JSON schema, as an object or as text."""
    strict: bool | None = ABSENT
    """Accepted; answers always follow the schema."""

    @property
    def structure(self) -> Structure | None:
        """The form that the answer must have; None: any."""
        if self.type == "text":
            return None
        is_any = self.type == "json_object" or self.schema_ is None
        return Structure.json_object() if is_any else Structure.json_schema(self.schema_ or {})


class TextOptions(Documented, extra="forbid"):
    """The options of the text."""

    format: TextFormat = TextFormat()
    """The form of the text."""
    verbosity: Literal["medium"] | None = ABSENT
    """Accepted as it is by default."""


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(TemplateFields, ChatFields):
    """The body of POST /v1/responses; nothing is stored between requests."""

    default_max_tokens: ClassVar[int] = 512
    not_served: ClassVar[Mapping[str, Unsupported]] = {
        "background": Unsupported(harmless=(False,)),
        "conversation": Unsupported(NO_MEMORY),
        "previous_response_id": Unsupported(NO_MEMORY),
        "store": Unsupported(NO_MEMORY, (False,)),
    }

    input: Annotated[
        list[AnyItem],
        Field(min_length=1, max_length=4096, fail_fast=True),
        BeforeValidator(_as_items),
    ]
    """A text, or items: messages, calls and their results, and thoughts."""
    instructions: str | None = None
    """What goes before the input, as a turn of the system's."""
    tools: Annotated[list[ItemTool] | None, Field(max_length=MAX_TOOLS)] = None
    """The functions that the answer may call."""
    tool_choice: ItemChoice = "auto"
    """Whether it must call one, and which."""
    parallel_tool_calls: bool = True
    """Whether it may have several calls."""
    max_output_tokens: int | None = Field(strict=True, default=None, ge=1, le=MAX_TOKENS)
    """The most new tokens."""
    text: TextOptions = TextOptions()
    """The form of the text."""
    top_logprobs: int | None = TOP_LOGPROBS
    """How many alternatives to report for each token of the answer."""
    include: tuple[str, ...] = ()
    """`message.output_text.logprobs` lists the tokens of the answer."""
    metadata: dict[str, str] | None = None
    """Accepted, and not stored."""

    @model_validator(mode="after")
    def _settle(self) -> ResponsesRequest:
        if self.max_output_tokens is not None:
            self.max_tokens = self.max_output_tokens
        if self.n != 1:
            raise ValueError("a response is one answer; leave out n")
        if unknown := [name for name in self.include if name not in (LOGPROBS, NOTHING_TO_INCLUDE)]:
            raise ValueError(f"include names {unknown[0]}; only {LOGPROBS} is served")
        if self.text.format.structure is not None and self._given():
            raise ValueError("text.format and another field each give the answer a form; keep one")
        return self

    def offer(self) -> Offer | None:
        functions = [tool.function for tool in self.tools or ()]
        return offered(functions, self.tool_choice, is_single=not self.parallel_tool_calls)

    @property
    def structure(self) -> Structure | None:
        return self.text.format.structure or super().structure

    @property
    def structure_field(self) -> str | None:
        return "text.format" if self.text.format.structure else super().structure_field

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in self.include or self.top_logprobs is not None

    def turns(self) -> list[dict[str, Any]]:
        """Return the turns in the form that templates take.

        Thoughts, and calls in a row, are of one turn with what the assistant says next to them;
        thoughts that nothing follows are left out.
        """
        turns: list[dict[str, Any]] = []
        if self.instructions is not None:
            turns.append({"role": "system", "content": self.instructions})
        thoughts = ""
        for item in self.input:
            if isinstance(item, ThoughtItem):
                thoughts += plain(item.content)
                continue
            turn, last = item.plain(), turns[-1] if turns else {}
            if "tool_calls" in turn and last.get("role") == "assistant" and not thoughts:
                last["tool_calls"] = [*last.get("tool_calls", ()), *turn["tool_calls"]]
                continue
            if thoughts and turn["role"] == "assistant":
                turn["reasoning_content"] = thoughts
            thoughts = ""
            turns.append(turn)
        return with_one_system_turn(turns)


EVENTS = (
    "OpenAI's response, with `steering`. A stream has its events: `response.created` and "
    "`response.in_progress`; for each item `response.output_item.added`, its parts as they come "
    "(`response.output_text.delta`, `response.reasoning_text.delta`, "
    "`response.function_call_arguments.delta`, each with a `.done`) and "
    "`response.output_item.done`; at the end `response.completed` or `response.incomplete` with "
    "the whole response, or `error`. Each has a `sequence_number`; no `[DONE]` follows."
)
ItemStatus = Literal["in_progress", "completed", "incomplete"]
IN_PROGRESS: Any = Field(
    default="in_progress",
    description="`completed`, `incomplete` where the answer is cut, or `in_progress` while a "
    "stream runs.",
)
AS_ASKED: Any = Field(description="As in the request.")


class OutputText(Answer):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    """What the assistant says."""
    annotations: list[Any] = Field(default_factory=list)
    """Always empty."""
    logprobs: list[ScoredPlace] = Field(default_factory=list)
    """The tokens of the whole answer, where `include` or `top_logprobs` asks for them."""


class OutputMessage(Answer):
    """What the assistant says."""

    event: ClassVar = "output_text"

    id: str
    """The id of the item."""
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]
    """One part, the text."""
    status: ItemStatus = IN_PROGRESS


class OutputReasoning(Answer):
    """What the model thought first, where its tokenizer tells it apart."""

    event: ClassVar = "reasoning_text"

    id: str
    """The id of the item."""
    type: Literal["reasoning"] = "reasoning"
    summary: list[Any] = Field(default_factory=list)
    """Always empty."""
    content: list[ThoughtText]
    """One part, the thoughts."""
    status: ItemStatus = IN_PROGRESS


class OutputCall(Answer):
    """A call that the answer makes."""

    event: ClassVar = "function_call_arguments"

    id: str
    """The id of the item."""
    type: Literal["function_call"] = "function_call"
    call_id: str
    """The id of the call, which its result repeats."""
    name: str
    """The name of the function."""
    arguments: str
    """Its arguments: a JSON object, as text."""
    status: ItemStatus = IN_PROGRESS


OutputItem = OutputMessage | OutputReasoning | OutputCall


def item_of(part: WholePart) -> OutputItem:
    """Return a part of an answer as an item with a new id."""
    name = uuid.uuid4().hex
    if isinstance(part, Words):
        return OutputMessage(id=f"msg_{name}", content=[OutputText(text=part.text)])
    if isinstance(part, Thought):
        thought = ThoughtText(type="reasoning_text", text=part.text)
        return OutputReasoning(id=f"rs_{name}", content=[thought])
    return OutputCall(id=f"fc_{name}", call_id=part.id, name=part.name, arguments=part.arguments)


class WhyIncomplete(Answer):
    """Why the answer is cut: it has as many tokens as were asked for."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class NoReasoning(Answer):
    """What was asked of the model's thoughts: nothing."""

    effort: None = None
    summary: None = None


class InputDetails(Answer):
    """More about the prompt's tokens."""

    cached_tokens: int = 0
    """Those that vLLM's prefix cache had."""
    cache_write_tokens: int = 0
    """Always 0."""


class OutputDetails(Answer):
    """More about the answer's tokens."""

    reasoning_tokens: int = 0
    """Always 0: those of thoughts are not counted apart."""


class ResponseUsage(Answer):
    """Prompt and generated tokens."""

    input_tokens: int
    """Tokens of the prompt."""
    input_tokens_details: InputDetails = Field(default_factory=InputDetails)
    """More about the tokens of the prompt."""
    output_tokens: int
    """Tokens of the answer, stop tokens included."""
    output_tokens_details: OutputDetails = Field(default_factory=OutputDetails)
    """More about the tokens of the answer."""
    total_tokens: int
    """Tokens of prompt and answer."""


class ResponseInProgress(Answer):
    """A response as its stream begins."""

    id: str
    """The id of the response, under which nothing is stored."""
    object: Literal["response"] = "response"
    created_at: int
    """When it was begun, in seconds since 1970."""
    status: ItemStatus = "in_progress"
    error: None = None
    """Always null: an error has an answer of its own."""
    incomplete_details: WhyIncomplete | None = None
    """Why it is cut; null where it is not."""
    instructions: str | None = AS_ASKED
    max_output_tokens: int | None = AS_ASKED
    metadata: dict[str, str] = AS_ASKED
    model: str
    """The name of the model."""
    output: list[OutputItem] = Field(default_factory=list)
    """What the model thought, said and called, in order."""
    parallel_tool_calls: bool = AS_ASKED
    previous_response_id: None = None
    reasoning: NoReasoning = Field(default_factory=NoReasoning)
    """What was asked of the model's thoughts."""
    store: Literal[False] = False
    temperature: float = AS_ASKED
    text: TextOptions = AS_ASKED
    tool_choice: ItemChoice = AS_ASKED
    tools: list[ItemTool] = AS_ASKED
    top_logprobs: int = AS_ASKED
    top_p: float = AS_ASKED
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: None = None


class ResponseAnswer(ResponseInProgress):
    """The answer of POST /v1/responses."""

    status: Literal["completed", "incomplete"]
    """`completed`, or `incomplete` after `max_output_tokens`."""
    usage: ResponseUsage
    """Tokens of the prompt and the answer."""
    steering: SteeringReport
    """What was applied."""


router = APIRouter(route_class=StrictRoute)


@router.post("/v1/responses", response_model=ResponseAnswer, responses=streamed(EVENTS))
async def responses(
    body: ResponsesRequest, request: Request, service: AdmittingService
) -> Response:
    """Answer a chat."""
    n_top = body.top_logprobs or 0
    chat = await chat_of(service.translator, request, body, top_logprobs=n_top)
    renderer = ResponseRenderer(service, request, body, chat)
    return await renderer.answered(chat.requests, is_stream=body.stream)


class ResponseRenderer(Renderer):
    """Renders the answer to POST /v1/responses, or the events of a stream: its items, the whole."""

    id_prefix, says_done = "resp_", False

    def __init__(
        self, service: Service, request: Request, body: ResponsesRequest, chat: Chat
    ) -> None:
        super().__init__(service, request)
        self._body, self._reader, self._n_events = body, chat.reader(), 0
        self._chat = chat
        self._items: list[OutputItem] = []  # the last of them is open while a stream runs
        self._open: type[Part] | None = None  # the kind of its parts

    def of(self, completions: list[Completion]) -> ResponseAnswer:
        done = completions[0]
        parts = whole(self._reader, done.text) or [Words("")]
        self._items = [item_of(part) for part in parts]
        return self._whole(done)

    def events(self, update: Update) -> Iterable[Event]:
        """Yield the beginning of the response once, then the new parts of its items."""
        if not self._n_events:
            begun = ResponseInProgress(**self._frame()).model_dump(by_alias=True)
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
        """Yield the rest of the last item, its end, and the whole response."""
        for part in self._reader.finish():
            yield from self._streamed(part, [])
        if not self._items:
            yield from self._streamed(Words(""), [])
        response = self._whole(completions[0]).model_dump(by_alias=True)
        yield from self._item_done()
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, failure: Failure) -> Event:
        return self._event("error", code=failure.code, message=failure.message, param=failure.param)

    def _streamed(self, part: Part, logprobs: Sequence[ScoredPlace]) -> Iterable[Event]:
        """Yield the events of a part of the answer, and those of a new item if it begins one."""
        is_new = isinstance(part, Call) or type(part) is not self._open
        if is_new and not isinstance(part, Arguments):
            yield from self._begun(part)
        item = self._items[-1]
        fields: Event = {"delta": part.text}
        if isinstance(item, OutputCall):
            item.arguments += part.text
        else:
            item.content[0].text += part.text
            fields["content_index"] = 0
        if isinstance(item, OutputMessage):
            fields["logprobs"] = [place.model_dump() for place in logprobs]
        if part.text or logprobs:
            yield self._item_event(f"response.{item.event}.delta", **fields)

    def _begun(self, part: WholePart) -> Iterable[Event]:
        """Yield the end of the open item, and the beginning of one for a part."""
        if self._items:
            self._items[-1].status = "completed"
            yield from self._item_done()
        self._open, item = type(part), item_of(part.emptied())
        self._items.append(item)
        begun = item.model_dump() | ({} if isinstance(item, OutputCall) else {"content": []})
        yield self._item_event("response.output_item.added", item=begun)
        if isinstance(item, OutputMessage):
            text = item.content[0].model_dump()
            yield self._item_event("response.content_part.added", content_index=0, part=text)

    def _item_done(self) -> Iterable[Event]:
        """Yield the last events of the open item."""
        item = self._items[-1]
        whole_item, kind = item.model_dump(), f"response.{item.event}.done"
        if isinstance(item, OutputCall):
            yield self._item_event(kind, name=item.name, arguments=item.arguments)
        elif isinstance(item, OutputReasoning):
            yield self._item_event(kind, content_index=0, text=item.content[0].text)
        else:
            part = whole_item["content"][0]
            said = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._item_event(kind, content_index=0, **said)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        yield self._item_event("response.output_item.done", item=whole_item)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _item_event(self, kind: str, **fields: Any) -> Event:
        """Return an event of the open item."""
        place = {} if "item" in fields else {"item_id": self._items[-1].id}
        return self._event(kind, output_index=len(self._items) - 1, **place, **fields)

    def _whole(self, completion: Completion) -> ResponseAnswer:
        is_cut = completion.finish_reason == "length"
        for item in self._items:
            item.status = "completed"
        status = self._items[-1].status = "incomplete" if is_cut else "completed"
        first = next((item for item in self._items if isinstance(item, OutputMessage)), None)
        if first is not None:  # a response lists its tokens once
            first.content[0].logprobs = self._logprobs(completion.tokens)
        n_in, n_out = self._trace.n_prompt_tokens, self._trace.n_generated_tokens
        return ResponseAnswer(
            **self._frame(),
            status=status,
            incomplete_details=WhyIncomplete() if is_cut else None,
            output=self._items,
            usage=ResponseUsage(
                input_tokens=n_in,
                input_tokens_details=InputDetails(cached_tokens=self._trace.n_cached_tokens),
                output_tokens=n_out,
                total_tokens=n_in + n_out,
            ),
            steering=completion.steering,
        )

    def _frame(self) -> Event:
        """Return what is known of a response before it is complete."""
        body = self._body
        return {
            "id": self._id,
            "created_at": self._created,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model_name,
            "parallel_tool_calls": body.parallel_tool_calls,
            "temperature": body.temperature,
            "text": body.text,
            "tool_choice": body.tool_choice,
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
        }

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> list[ScoredPlace]:
        if not self._body.has_logprobs:
            return []
        return scored_places(self._texts, tokens, self._chat.left_out(self._texts))
