"""Anthropic's messages: their fields and defaults, plus `steer`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from juice.engine.request import MAX_STOPS
from juice_server.schemas.openai import ELSEWHERE, Document, TextPart
from juice_server.schemas.shared import MAX_PROMPTS, MAX_TOKENS, OpenAIFields, at_most

Texts = str | Annotated[list[TextPart], Field(fail_fast=True)]


def _plain(text: Texts) -> str:
    return text if isinstance(text, str) else "".join(part.text for part in text)


class Turn(BaseModel):
    """One turn of the chat."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["user", "assistant", "system"]
    content: Texts


class CountRequest(OpenAIFields):
    """The body of POST /v1/messages/count_tokens."""

    not_served: ClassVar[dict[str, tuple[Any, ...]]] = {
        **ELSEWHERE,
        "tool_choice": ({"type": "auto"}, {"type": "none"}),
        "thinking": ({"type": "disabled"},),
        "container": (),
        "mcp_servers": ([],),
        "output_config": (),
    }

    messages: list[Turn] = Field(min_length=1, max_length=4096, fail_fast=True)
    system: Texts | None = None
    context: str | None = None
    documents: Annotated[list[Document] | None, Field(max_length=MAX_PROMPTS)] = None

    @model_validator(mode="after")
    def _one_context(self) -> CountRequest:
        if self.context is not None and self.documents is not None:
            raise ValueError("context and documents are two ways to give the same; keep one")
        return self

    def turns(self) -> list[dict[str, str]]:
        """Return the turns in the form that templates take."""
        own = [{"role": turn.role, "content": _plain(turn.content)} for turn in self.messages]
        if self.system is None:
            return own
        return [{"role": "system", "content": _plain(self.system)}, *own]

    @property
    def is_open(self) -> bool:
        """Whether the last turn is the assistant's, which then goes on."""
        return self.messages[-1].role == "assistant"


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages; a last turn of the assistant's goes on."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    temperature: float = Field(default=1.0, ge=0, le=2)
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], at_most(MAX_STOPS)] = (
        Field(default_factory=list)
    )

    @model_validator(mode="after")
    def _settle(self) -> MessagesRequest:
        if self.n != 1:
            raise ValueError("a message is one answer; leave out n")
        if self.stop_sequences:
            self.stop = [*(self.stop or ()), *self.stop_sequences]
        return self
