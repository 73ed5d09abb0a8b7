"""What was said before, as OpenAI's responses write it: messages, calls, results and thoughts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from juice_server.schemas.documented import Documented
from juice_server.schemas.turns import (
    MAX_ID,
    CalledFunction,
    RefusalPart,
    arguments_of,
    made_call,
    plain,
)


class Text(Documented):
    """A part of an item; only text is served."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["input_text", "output_text", "text"]
    """The kind of part."""
    text: str
    """Its text."""


class Item(Documented):
    """A message of the input, given or answered before."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["message"] = "message"
    """The kind of item."""
    role: str = Field(max_length=64)
    """Whose turn it is."""
    content: (
        str
        | Annotated[
            list[Annotated[Text | RefusalPart, Discriminator("type")]], Field(fail_fast=True)
        ]
    )
    """The text, whole or in parts."""

    def plain(self) -> dict[str, Any]:
        """Return the turn in the form that templates take."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": plain(self.content)}


class ThoughtText(Documented):
    """A part of what the assistant thought."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning_text", "summary_text"]
    """The kind of part."""
    text: str
    """Its text."""


class ThoughtItem(Documented):
    """What the assistant thought, as it was answered before."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]
    """The kind of item."""
    content: Annotated[list[ThoughtText] | None, Field(fail_fast=True)] = None
    """The thoughts, which become the `reasoning_content` of the turn that follows."""

    def plain(self) -> dict[str, Any]:
        """Return the part of a turn in the form that templates take."""
        return {"role": "assistant", "content": "", "reasoning_content": plain(self.content)}


class CallItem(CalledFunction):
    """A call that was made."""

    type: Literal["function_call"]
    """The kind of item."""
    call_id: str = Field(max_length=MAX_ID)
    """The id of the call, which its result repeats."""

    def plain(self) -> dict[str, Any]:
        """Return the turn in the form that templates take."""
        call = made_call(self.call_id, self.name, arguments_of(self.arguments))
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class ResultItem(Documented):
    """What a call returned."""

    type: Literal["function_call_output"]
    """The kind of item."""
    call_id: str = Field(max_length=MAX_ID)
    """The id of the call."""
    output: str | Annotated[list[Text], Field(fail_fast=True)]
    """What it returned."""

    def plain(self) -> dict[str, Any]:
        """Return the turn in the form that templates take."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": plain(self.output)}


def _item_type(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    kinds = {
        "function_call": "CallItem",
        "function_call_output": "ResultItem",
        "reasoning": "ThoughtItem",
    }
    return kinds.get(str(kind), "Item")


AnyItem = Annotated[
    Annotated[Item, Tag("Item")]
    | Annotated[CallItem, Tag("CallItem")]
    | Annotated[ResultItem, Tag("ResultItem")]
    | Annotated[ThoughtItem, Tag("ThoughtItem")],
    Discriminator(_item_type),
]
