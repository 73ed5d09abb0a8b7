"""OpenAI's responses: their fields and defaults, without a memory, plus `steer`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from juice.engine import Structure
from juice_server.schemas.openai import ELSEWHERE, ContextFields
from juice_server.schemas.shared import MAX_TOKENS, TOP_LOGPROBS
from juice_server.schemas.structured import Schema

LOGPROBS = "message.output_text.logprobs"


class Text(BaseModel):
    """A part of an item; only text is served."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["input_text", "output_text", "text"]
    text: str


class Item(BaseModel):
    """A message of the input, given or answered before."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["message"] = "message"
    role: str = Field(max_length=64)
    content: str | Annotated[list[Text], Field(fail_fast=True)]

    def plain(self) -> dict[str, str]:
        """Return the turn in the form that templates take."""
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Format(BaseModel):
    """The form of the text: OpenAI's, in which a schema is not nested."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @property
    def structure(self) -> Structure | None:
        """The form that the answer must have; None: any."""
        if self.type == "text":
            return None
        is_any = self.type == "json_object" or self.schema_ is None
        return Structure.json_object() if is_any else Structure.json_schema(self.schema_ or {})


class TextOptions(BaseModel):
    """The options of the text."""

    model_config = ConfigDict(extra="forbid")

    format: Format = Format()
    verbosity: Literal["medium"] | None = None


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(ContextFields):
    """The body of POST /v1/responses; nothing is stored between requests."""

    default_max_tokens: ClassVar[int] = 512
    not_served: ClassVar[dict[str, tuple[Any, ...]]] = {
        **ELSEWHERE,
        "background": (False,),
        "conversation": (),
        "previous_response_id": (),
        "prompt": (),
        "reasoning": ({}, {"effort": None, "summary": None}),
        "store": (False,),
        "truncation": ("disabled",),
    }

    input: Annotated[
        list[Item],
        Field(min_length=1, max_length=4096, fail_fast=True),
        BeforeValidator(_as_items),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    text: TextOptions = TextOptions()
    top_logprobs: int | None = TOP_LOGPROBS
    include: tuple[str, ...] = ()
    metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def _settle(self) -> ResponsesRequest:
        if self.max_output_tokens is not None:
            self.max_tokens = self.max_output_tokens
        if self.n != 1:
            raise ValueError("a response is one answer; leave out n")
        if unknown := [own for own in self.include if own != LOGPROBS]:
            raise ValueError(f"include names {unknown[0]}; only {LOGPROBS} is served")
        if self.text.format.structure is not None and self._given():
            raise ValueError("text.format and another field each give the answer a form; keep one")
        return self

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

    def messages(self) -> list[dict[str, str]]:
        """Return the turns in the form that templates take."""
        own = [item.plain() for item in self.input]
        if self.instructions is None:
            return own
        return [{"role": "system", "content": self.instructions}, *own]
