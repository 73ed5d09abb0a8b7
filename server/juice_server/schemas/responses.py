"""OpenAI's responses: their fields and defaults, without a memory, plus `steer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from juice.engine import Structure
from juice_server.schemas.documented import Documented
from juice_server.schemas.elsewhere import Elsewhere
from juice_server.schemas.items import AnyItem, ThoughtItem
from juice_server.schemas.openai import ChatFields
from juice_server.schemas.shared import MAX_TOKENS, TOP_LOGPROBS
from juice_server.schemas.structured import Schema
from juice_server.schemas.template import TemplateFields
from juice_server.schemas.tools import MAX_TOOLS, FunctionTool, NamedFunction, offered
from juice_server.schemas.turns import opened
from juice_server.tools.offer import Offer

LOGPROBS = "message.output_text.logprobs"
# What else `include` may ask for without a change: thoughts are never encrypted here.
NOTHING_TO_INCLUDE = "reasoning.encrypted_content"
NO_MEMORY = "nothing is stored between requests; send what was said as input"


class FlatTool(FunctionTool):
    """A function as responses write it; tools that run elsewhere are not served."""

    type: Literal["function"]
    """The kind of tool."""


class FlatChoice(NamedFunction):
    """A tool by its name, as responses write it."""

    type: Literal["function"]
    """The kind of tool."""


class FlatAllowed(Documented):
    """The choice of some tools, as responses write it."""

    type: Literal["allowed_tools"]
    """The kind of choice."""
    mode: Literal["auto", "required"]
    """Whether one of them must be called."""
    tools: list[FlatChoice] = Field(min_length=1, max_length=MAX_TOOLS)
    """Their names."""


class Format(Documented):
    """The form of the text: OpenAI's, in which a schema is not nested."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"] = "text"
    """Any text, any JSON object, or JSON that is valid under a schema."""
    name: str | None = None
    """The schema's name, for nobody but the reader."""
    description: str | None = None
    """What it is for."""
    schema_: Schema | None = Field(default=None, alias="schema")
    """The JSON schema, as an object or as text."""
    strict: bool | None = None
    """Accepted; answers always follow the schema."""

    @property
    def structure(self) -> Structure | None:
        """The form that the answer must have; None: any."""
        if self.type == "text":
            return None
        is_any = self.type == "json_object" or self.schema_ is None
        return Structure.json_object() if is_any else Structure.json_schema(self.schema_ or {})


class TextOptions(Documented):
    """The options of the text."""

    model_config = ConfigDict(extra="forbid")

    format: Format = Format()
    """The form of the text."""
    verbosity: Literal["medium"] | None = None
    """Accepted as it is by default."""


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(TemplateFields, ChatFields):
    """The body of POST /v1/responses; nothing is stored between requests."""

    default_max_tokens: ClassVar[int] = 512
    not_served: ClassVar[Mapping[str, Elsewhere]] = {
        "background": Elsewhere((False,)),
        "conversation": Elsewhere((), NO_MEMORY),
        "previous_response_id": Elsewhere((), NO_MEMORY),
        "store": Elsewhere((False,), NO_MEMORY),
    }

    input: Annotated[
        list[AnyItem],
        Field(min_length=1, max_length=4096, fail_fast=True),
        BeforeValidator(_as_items),
    ]
    """A text, or items: messages, calls and their results, and thoughts."""
    instructions: str | None = None
    """What goes before the input, as a turn of the system's."""
    tools: Annotated[list[FlatTool] | None, Field(max_length=MAX_TOOLS)] = None
    """The functions that the answer may call."""
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | FlatAllowed = "auto"
    """Whether it must call one, and which."""
    parallel_tool_calls: bool = True
    """Whether it may have several calls."""
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
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
        if unknown := [own for own in self.include if own not in (LOGPROBS, NOTHING_TO_INCLUDE)]:
            raise ValueError(f"include names {unknown[0]}; only {LOGPROBS} is served")
        if self.text.format.structure is not None and self._given():
            raise ValueError("text.format and another field each give the answer a form; keep one")
        self.offer()
        return self

    def offer(self) -> Offer | None:
        """Return the functions that the answer may call; None: none. Raises ValueError."""
        choice, single = self.tool_choice, not self.parallel_tool_calls
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(choice, FlatChoice):
            return offered(functions, "required", [choice.name], is_single=True)
        if isinstance(choice, FlatAllowed):
            names = [tool.name for tool in choice.tools]
            return offered(functions, choice.mode, names, is_single=single)
        return offered(functions, choice, is_single=single)

    @property
    def structure(self) -> Structure | None:
        """The form of the answer; None: any."""
        return self.text.format.structure or super().structure

    @property
    def structure_field(self) -> str | None:
        """The field that gives it."""
        return "text.format" if self.text.format.structure else super().structure_field

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer lists its tokens."""
        return LOGPROBS in self.include or self.top_logprobs is not None

    def messages(self) -> list[dict[str, Any]]:
        """Return the turns in the form that templates take.

        Thoughts, and calls in a row, are of one turn with what the assistant says next to them;
        thoughts that nothing follows are left out.
        """
        own: list[dict[str, Any]] = []
        if self.instructions is not None:
            own.append({"role": "system", "content": self.instructions})
        thoughts = ""
        for item in self.input:
            turn, last = item.plain(), own[-1] if own else {}
            if isinstance(item, ThoughtItem):
                thoughts += turn["reasoning_content"]
                continue
            if "tool_calls" in turn and last.get("role") == "assistant" and not thoughts:
                calls = [*last.get("tool_calls", ()), *turn["tool_calls"]]
                own[-1] = {**last, "tool_calls": calls}
                continue
            if thoughts and turn["role"] == "assistant":
                turn["reasoning_content"] = thoughts
            thoughts = ""
            own.append(turn)
        return opened(own)
