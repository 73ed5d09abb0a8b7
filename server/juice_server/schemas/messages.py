"""Anthropic's messages: their fields and defaults, plus `steer`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from juice.engine.request import MAX_STOPS
from juice_server.schemas.openai import ELSEWHERE, ContextFields, TextPart
from juice_server.schemas.shared import MAX_TOKENS, at_most

Texts = str | Annotated[list[TextPart], Field(fail_fast=True)]


def _plain(text: Texts) -> str:
    return text if isinstance(text, str) else "".join(part.text for part in text)


class Turn(BaseModel):
    """One turn of the chat."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["user", "assistant", "system"]
    content: Texts


class CountRequest(ContextFields):
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

    def turns(self) -> list[dict[str, str]]:
        """Return the turns in the form that templates take."""
        own = [{"role": turn.role, "content": _plain(turn.content)} for turn in self.messages]
        if self.system is None:
            return own
        return [{"role": "system", "content": _plain(self.system)}, *own]

    def for_template(self) -> dict[str, bool]:
        """Return what the chat template is given: a last turn of the assistant's goes on."""
        is_open = self.messages[-1].role == "assistant"
        return {"add_generation_prompt": not is_open, "continue_final_message": is_open}


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages; a last turn of the assistant's goes on."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
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
