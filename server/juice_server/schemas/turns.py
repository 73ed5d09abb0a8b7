"""The turns of a chat as OpenAI's clients send them, calls of functions and their results too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    AliasChoices,
    ConfigDict,
    Discriminator,
    Field,
    ValidationInfo,
    field_validator,
)

from juice_server.schemas.documented import Documented

MAX_CALLS = 128
MAX_ID = 256


class TextPart(Documented):
    """A part of a message; only text is served."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    """The kind of part."""
    text: str
    """Its text."""


class RefusalPart(Documented):
    """A part of a message in which the assistant refused to answer."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["refusal"]
    """The kind of part."""
    refusal: str
    """Its text."""

    @property
    def text(self) -> str:
        """The same for every kind of part."""
        return self.refusal


Texts = str | Annotated[list[TextPart], Field(fail_fast=True)]


class HasText(Protocol):
    """A part that has a text."""

    @property
    def text(self) -> str:
        """Its text."""


def plain(text: str | Sequence[HasText] | None) -> str:
    """Return a text that may come in parts, or not at all, as one."""
    if text is None or isinstance(text, str):
        return text or ""
    return "".join(part.text for part in text)


def opened(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns in which what the system says first is one turn: templates take no second."""
    n = next((i for i, own in enumerate(turns) if own["role"] != "system"), len(turns))
    if n < 2:
        return [*turns]
    text = "\n\n".join(own["content"] for own in turns[:n] if own["content"])
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


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call; raises ValueError."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"the arguments of a call are no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("the arguments of a call are a JSON object as text; this is another value")
    return found


class MadeCall(Documented):
    """A call that the assistant made."""

    id: str = Field(max_length=MAX_ID)
    """The id of the call, which its result repeats."""
    type: Literal["function"] = "function"
    """The kind of tool."""
    function: CalledFunction
    """What was called, and with what."""


class Message(Documented):
    """One turn of a chat."""

    model_config = ConfigDict(extra="ignore")

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
        may_be_missing = (
            given.get("tool_calls")
            or given.get("role") == "tool"
            or (given.get("refusal") is not None and given.get("role") == "assistant")
        )
        if content is None and not may_be_missing:
            raise ValueError(
                "expected text; only results of tools, and an assistant that calls some or refuses,"
                " may have none"
            )
        return content

    def plain(self) -> dict[str, Any]:
        """Return the turn in the form that templates take."""
        role = "system" if self.role == "developer" else self.role
        text = self.refusal if self.content is None else self.content
        own: dict[str, Any] = {"role": role, "content": plain(text)}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                own[name] = value
        if self.tool_calls:
            calls = self.tool_calls
            own["tool_calls"] = [
                made_call(one.id, one.function.name, arguments_of(one.function.arguments))
                for one in calls
            ]
        return own


def made_call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call that was made in the form that templates take."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
