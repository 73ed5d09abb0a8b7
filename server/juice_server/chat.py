"""Chats as OpenAI's clients send them, and what every chat may be given beside its turns.

Turns come as messages (chats) or as items (responses); `plain` gives the form that chat templates
take.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AliasChoices,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from juice_server.fields import ABSENT, MAX_KEYS, MAX_PROMPTS, Documented, OpenAIFields, at_most
from juice_server.tools import Function, Offer

# The arguments of transformers' `apply_chat_template`, which are not options of a template.
RESERVED = frozenset(
    {"self", "conversation", "conversations", "messages", "documents", "tools", "chat_template"}
    | {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"}
    | {"add_generation_prompt", "continue_final_message"}
)


class TemplateOptions(Documented):
    """The template's own options."""

    chat_template_kwargs: Annotated[dict[str, Any] | None, at_most(MAX_KEYS)] = Field(default=None)
    """Options of the chat template's own."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_the_templates(cls, options: dict[str, Any] | None) -> dict[str, Any] | None:
        if taken := sorted(RESERVED & (options or {}).keys()):
            raise ValueError(
                f"names {taken[0]}, which is no option of the template's own; leave it out"
            )
        return options

    def for_template(self) -> dict[str, Any]:
        """Return what the chat template is given beside messages, documents and functions."""
        return dict(self.chat_template_kwargs or {})


class TemplateFields(TemplateOptions):
    """The template's own options, and how the text ends."""

    add_generation_prompt: bool = True
    """Whether the template begins the assistant's turn."""
    continue_final_message: bool = False
    """Whether the answer goes on with the last turn."""

    def for_template(self) -> dict[str, Any]:
        return {
            **super().for_template(),
            # A turn that goes on is not begun.
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
        }


MAX_CALLS = 128
MAX_ID = 256


class TextPart(Documented):
    """A part of a message; only text is served."""

    type: Literal["text"]
    text: str
    """Its text."""


class RefusalPart(Documented):
    """A part of a message in which the assistant refused to answer."""

    type: Literal["refusal"]
    refusal: str
    """Its text."""

    @property
    def text(self) -> str:
        return self.refusal


Texts = str | Annotated[list[TextPart], Field(fail_fast=True)]


def plain(
    text: str | Sequence[TextPart | RefusalPart | ItemText | ThoughtText] | None,
) -> str:
    """Return a text that may come in parts, or not at all, as one."""
    return text if isinstance(text, str) else "".join(part.text for part in text or ())


def turn_of(
    role: str, text: str | Sequence[TextPart | RefusalPart | ItemText] | None
) -> dict[str, Any]:
    """Return a turn in the form that templates take; a developer is the system."""
    return {"role": "system" if role == "developer" else role, "content": plain(text)}


def with_one_system_turn(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns whose first ones of the system are joined: templates take no second."""
    n = next((i for i, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
    if n < 2:
        return [*turns]
    text = "\n\n".join(turn["content"] for turn in turns[:n] if turn["content"])
    return [{**turns[0], "content": text}, *turns[n:]]


class CalledFunction(Documented):
    """A function that was called."""

    name: str = Field(max_length=MAX_ID)
    """Its name."""
    arguments: str = "{}"
    """Its arguments: a JSON object, as text."""

    @field_validator("arguments")
    @classmethod
    def _are_an_object(cls, arguments: str) -> str:
        arguments_of(arguments)
        return arguments

    def called(self, call_id: str) -> dict[str, Any]:
        """Return the call in the form that templates take."""
        return made_call(call_id, self.name, arguments_of(self.arguments))


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call; raises ValueError."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments of a call are no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("the arguments of a call are a JSON object as text; this is another value")
    return found


class MadeCall(Documented):
    """A call that the assistant made."""

    id: str = Field(max_length=MAX_ID)
    """The id of the call, which its result repeats."""
    type: Literal["function"] = "function"
    function: CalledFunction
    """What was called, and with what."""


class Message(Documented):
    """One turn of a chat."""

    role: str = Field(max_length=64)
    """Whose turn it is: `system` or `developer`, which is the same, `user`, `assistant`, `tool`,
    or what the template knows.
    """
    tool_calls: Annotated[list[MadeCall] | None, Field(max_length=MAX_CALLS)] = None
    """The calls that the assistant made."""
    refusal: str | None = None
    """The words with which the assistant refused to answer, in place of `content`."""
    content: Annotated[
        str
        | Annotated[
            list[Annotated[TextPart | RefusalPart, Discriminator("type")]], Field(fail_fast=True)
        ]
        | None,
        Field(validate_default=True),
    ] = None
    """The text, whole or in parts."""
    name: str | None = Field(default=None, max_length=MAX_ID)
    """Who speaks, where the template has names."""
    tool_call_id: str | None = Field(default=None, max_length=MAX_ID)
    """The id of the call whose result this is."""
    reasoning_content: Annotated[
        str | None, Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))
    ] = None
    """What the assistant thought before its answer; the template decides what of it to show."""
    function_call: None = None
    """Not served: an older form of `tool_calls`."""
    prefix: bool | None = None
    """Not served: `continue_final_message` lets the answer go on with the last turn."""
    audio: None = None
    """Not served: only text is."""

    @field_validator("tool_calls")
    @classmethod
    def _are_the_assistants(
        cls, calls: list[MadeCall] | None, info: ValidationInfo
    ) -> list[MadeCall] | None:
        if calls and info.data.get("role") != "assistant":
            raise ValueError("only a message of the assistant has tool_calls")
        return calls

    @field_validator("prefix")
    @classmethod
    def _is_whole(cls, is_open: bool | None) -> bool | None:
        if is_open:
            raise ValueError("not served; continue_final_message lets the last turn go on")
        return is_open

    @field_validator("content")
    @classmethod
    def _is_there(cls, content: Any, info: ValidationInfo) -> Any:
        given = info.data
        said = (given.get("tool_calls"), given.get("refusal"))
        may_be_missing = given.get("role") == "tool" or (
            given.get("role") == "assistant" and any(one is not None for one in said)
        )
        if content is None and not may_be_missing:
            raise ValueError(
                "expected text; only results of tools, and an assistant that calls some or refuses,"
                " may have none"
            )
        return content

    def plain(self) -> dict[str, Any]:
        """Return the turn in the form that templates take."""
        turn = turn_of(self.role, self.refusal if self.content is None else self.content)
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                turn[name] = value
        if self.tool_calls:
            turn["tool_calls"] = [call.function.called(call.id) for call in self.tool_calls]
        return turn


def made_call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call that was made in the form that templates take."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


class ItemText(Documented):
    """A part of an item; only text is served."""

    type: Literal["input_text", "output_text", "text"]
    """Who said it, `text` for anybody."""
    text: str
    """Its text."""


class MessageItem(Documented):
    """A message of the input, given or answered before."""

    type: Literal["message"] = "message"
    role: str = Field(max_length=64)
    """Whose turn it is."""
    content: (
        str
        | Annotated[
            list[Annotated[ItemText | RefusalPart, Discriminator("type")]], Field(fail_fast=True)
        ]
    )
    """The text, whole or in parts."""

    def plain(self) -> dict[str, Any]:
        return turn_of(self.role, self.content)


class ThoughtText(Documented):
    """A part of what the assistant thought."""

    type: Literal["reasoning_text", "summary_text"]
    """A thought, or a summary of some."""
    text: str
    """Its text."""


class ThoughtItem(Documented):
    """What the assistant thought, as it was answered before."""

    type: Literal["reasoning"]
    content: Annotated[list[ThoughtText] | None, Field(fail_fast=True)] = None
    """The thoughts, which become the `reasoning_content` of the turn that follows."""


class CallItem(CalledFunction):
    """A call that was made."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=MAX_ID)
    """The id of the call, which its result repeats."""

    def plain(self) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "tool_calls": [self.called(self.call_id)]}


class ResultItem(Documented):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=MAX_ID)
    """The id of the call."""
    output: str | Annotated[list[ItemText], Field(fail_fast=True)]
    """What it returned."""

    def plain(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": plain(self.output)}


def by_type(other: type[Documented], *members: type[Documented]) -> Discriminator:
    """Return what tells the members of a union apart by their `type`; other types are the first's.

    Their tags are their names.
    """
    tags = {
        kind: member.__name__
        for member in members
        for kind in get_args(member.model_fields["type"].annotation)
    }

    def tag_of(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return tags.get(str(kind), other.__name__)

    return Discriminator(tag_of)


AnyItem = Annotated[
    Annotated[MessageItem, Tag("MessageItem")]
    | Annotated[CallItem, Tag("CallItem")]
    | Annotated[ResultItem, Tag("ResultItem")]
    | Annotated[ThoughtItem, Tag("ThoughtItem")],
    by_type(MessageItem, CallItem, ResultItem, ThoughtItem),
]


MAX_TOOLS = 128
# A name stands in grammars and between markers.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class NamedFunction(Documented):
    """The name of a function."""

    name: Name
    """Its name."""


class FunctionTool(NamedFunction):
    """A function, with the JSON schema of its arguments."""

    description: str | None = ABSENT
    """What it is for."""
    parameters: dict[str, Any] | None = ABSENT
    """The JSON schema of its arguments, an object; without it, it takes none."""
    strict: bool | None = ABSENT
    """Whether the arguments must be valid under the schema."""

    @property
    def function(self) -> Function:
        return Function(self.name, self.description, self.parameters, bool(self.strict))


class Tool(Documented):
    """A tool of chats; only functions are served."""

    type: Literal["function"]
    function: FunctionTool
    """The function."""


Tools = Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)]
Mode = Literal["none", "auto", "required"]


class NamedTool(Documented):
    """A tool by its name, as chats write it."""

    type: Literal["function"]
    function: NamedFunction
    """The function."""

    @property
    def name(self) -> str:
        return self.function.name


class AllowedTools(Documented):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    """Whether one of the tools must be called."""
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)
    """The names of the tools."""


class AllowedChoice(Documented):
    """The choice of some tools, as chats write it."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
    """The tools."""


class ItemTool(FunctionTool):
    """A function as responses write it; tools that run elsewhere are not served."""

    type: Literal["function"]


class ItemToolChoice(NamedFunction):
    """A tool by its name, as responses write it."""

    type: Literal["function"]


class ItemAllowedTools(Documented):
    """The choice of some tools, as responses write it."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    """Whether one of the tools must be called."""
    tools: list[ItemToolChoice] = Field(min_length=1, max_length=MAX_TOOLS)
    """The names of the tools."""


ToolChoice = Mode | NamedTool | AllowedChoice
ItemChoice = Mode | ItemToolChoice | ItemAllowedTools


def offered(
    functions: Sequence[Function], choice: ToolChoice | ItemChoice, *, is_single: bool
) -> Offer | None:
    """Return what is offered of some functions; None: nothing.

    Raises ValueError where functions are named that are not listed, or have a name in common.
    """
    mode: Mode = "required"
    allowed = None
    if isinstance(choice, str):
        mode = choice
    elif isinstance(choice, NamedTool | ItemToolChoice):
        allowed, is_single = [choice.name], True
    else:
        some = choice.allowed_tools if isinstance(choice, AllowedChoice) else choice
        mode, allowed = some.mode, [tool.name for tool in some.tools]
    names = [function.name for function in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two tools are named {twice}")
    if unknown := [name for name in allowed or () if name not in names]:
        raise ValueError(f"tool_choice names {unknown[0]}, which is not among the tools")
    if mode == "required" and not functions:
        raise ValueError("tool_choice asks for a call, but there are no tools")
    if mode == "none" or not functions:
        return None
    only = None if allowed is None else frozenset(allowed)
    return Offer(tuple(functions), only, mode == "required", is_single)


class Document(Documented):
    """A document, in the form that templates take."""

    model_config = ConfigDict(extra="allow")

    text: str
    """The document."""
    title: str | None = None
    """Its title."""


class ChatFields(TemplateOptions, OpenAIFields):
    """What a chat may be given beside its messages."""

    context: str | None = None
    """What goes before the last user's message."""
    documents: Annotated[list[Document] | None, Field(max_length=MAX_PROMPTS)] = None
    """Documents, which go where the template puts them."""

    @model_validator(mode="after")
    def _one_context(self) -> ChatFields:
        if self.context is not None and self.documents is not None:
            raise ValueError("context and documents are two ways to give the same; keep one")
        return self

    @model_validator(mode="after")
    def _offers(self) -> ChatFields:
        self.offer()
        return self

    @abstractmethod
    def offer(self) -> Offer | None:
        """Return the functions that the answer may call; None: none. Raises ValueError."""

    @abstractmethod
    def turns(self) -> list[dict[str, Any]]:
        """Return the turns in the form that templates take."""
