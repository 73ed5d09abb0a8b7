"""Anthropic's messages: their fields and defaults, plus `steer`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from juice.engine import Structure
from juice.engine.request import MAX_STOPS
from juice_server.schemas.documented import Documented
from juice_server.schemas.elsewhere import Elsewhere
from juice_server.schemas.openai import ChatFields
from juice_server.schemas.shared import MAX_TOKENS, at_most
from juice_server.schemas.tools import MAX_TOOLS, Name, offered
from juice_server.schemas.turns import MAX_ID, TextPart, Texts, made_call, opened, plain
from juice_server.tools.offer import Function, Offer

OPEN_TURN = "a last turn of the assistant's goes on by itself"


class UsedTool(Documented):
    """A call that the assistant made."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["tool_use"]
    """The kind of block."""
    id: str = Field(max_length=MAX_ID)
    """The id of the call, which its result repeats."""
    name: str = Field(max_length=MAX_ID)
    """The name of the function."""
    input: dict[str, Any]
    """Its arguments."""


class ToolResult(Documented):
    """What a call returned."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["tool_result"]
    """The kind of block."""
    tool_use_id: str = Field(max_length=MAX_ID)
    """The id of the call."""
    content: Texts | None = None
    """What it returned."""
    is_error: bool | None = None
    """Whether the call failed; the text then begins with `Error:`."""

    @property
    def text(self) -> str:
        """What the template is given."""
        return f"Error: {plain(self.content)}".rstrip() if self.is_error else plain(self.content)


class ThoughtBlock(Documented):
    """What the assistant thought, as it was answered before."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["thinking"]
    """The kind of block."""
    thinking: str
    """The thoughts; the template decides what of them to show."""


class HiddenThought(Documented):
    """What the assistant of another server thought; left out."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["redacted_thinking"]
    """The kind of block."""


BLOCKS = {
    "tool_use": "UsedTool",
    "tool_result": "ToolResult",
    "thinking": "ThoughtBlock",
    "redacted_thinking": "HiddenThought",
}


def _block_type(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return BLOCKS.get(str(kind), "TextPart")


Block = Annotated[
    Annotated[TextPart, Tag("TextPart")]
    | Annotated[UsedTool, Tag("UsedTool")]
    | Annotated[ToolResult, Tag("ToolResult")]
    | Annotated[ThoughtBlock, Tag("ThoughtBlock")]
    | Annotated[HiddenThought, Tag("HiddenThought")],
    Discriminator(_block_type),
]


class Turn(Documented):
    """One turn of the chat."""

    model_config = ConfigDict(extra="ignore")

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
            if isinstance(block, ToolResult):
                result = {"role": "tool", "tool_call_id": block.tool_use_id}
                yield {**result, "content": block.text}
        texts = [block for block in self.content if isinstance(block, TextPart)]
        used = [block for block in self.content if isinstance(block, UsedTool)]
        thoughts = "".join(own.thinking for own in self.content if isinstance(own, ThoughtBlock))
        if texts or used or thoughts or not self.content:
            turn: dict[str, Any] = {"role": self.role, "content": plain(texts)}
            if thoughts:
                turn["reasoning_content"] = thoughts
            if used:
                turn["tool_calls"] = [made_call(one.id, one.name, one.input) for one in used]
            yield turn


class Tool(Documented):
    """A function, with the JSON schema of its arguments; tools that run elsewhere have a type."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["custom"] | None = None
    """The kind of tool."""
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
        """The same for every protocol."""
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


class OutputFormat(Documented):
    """The form of the answer: a JSON schema."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    """The kind of form."""
    schema_: dict[str, Any] = Field(alias="schema")
    """The JSON schema."""


class OutputConfig(Documented):
    """How to answer; there is no effort to choose."""

    model_config = ConfigDict(extra="forbid")

    format: OutputFormat | None = None
    """The form of the answer."""
    effort: None = None
    """Not served."""


class CountRequest(ChatFields):
    """The body of POST /v1/messages/count_tokens."""

    not_served: ClassVar[Mapping[str, Elsewhere]] = {
        "container": Elsewhere(),
        "mcp_servers": Elsewhere(([],)),
        "add_generation_prompt": Elsewhere((True,), OPEN_TURN),
        "continue_final_message": Elsewhere((), OPEN_TURN),
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

    @model_validator(mode="after")
    def _offers(self) -> CountRequest:
        self.offer()
        return self

    def _given(self) -> dict[str, Structure]:
        given, asked = super()._given(), self.output_config
        if asked is not None and asked.format is not None:
            given["output_config.format"] = Structure.json_schema(asked.format.schema_)
        if self.output_format is not None:
            given["output_format"] = Structure.json_schema(self.output_format.schema_)
        return given

    def offer(self) -> Offer | None:
        """Return the functions that the answer may call; None: none. Raises ValueError."""
        choice = self.tool_choice
        functions = [tool.function for tool in self.tools or ()]
        if choice.name is not None:
            return offered(functions, "required", [choice.name], is_single=True)
        modes: dict[str, Literal["none", "auto", "required"]] = {"none": "none", "any": "required"}
        mode = modes.get(choice.type, "auto")
        return offered(functions, mode, is_single=choice.disable_parallel_tool_use)

    def turns(self) -> list[dict[str, Any]]:
        """Return the turns in the form that templates take."""
        own = [plain_turn for turn in self.messages for plain_turn in turn.plain()]
        if self.system is not None:
            own.insert(0, {"role": "system", "content": plain(self.system)})
        return opened(own)

    def for_template(self) -> dict[str, Any]:
        """Return what the chat template is given: a last turn of the assistant's goes on."""
        is_open = self.messages[-1].role == "assistant"
        return {
            **super().for_template(),
            "add_generation_prompt": not is_open,
            "continue_final_message": is_open,
        }


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages; a last turn of the assistant's goes on."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
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
