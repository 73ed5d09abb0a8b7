"""The bodies of the routes that do not generate."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, BaseModel, Field, model_validator

from juice_server.schemas.openai import Message
from juice_server.schemas.shared import Body, TokenId, at_most


class TokenizeRequest(Body):
    """The body of POST /tokenize: a text (vLLM calls it `prompt`), or the messages of a chat."""

    text: Annotated[str | None, Field(validation_alias=AliasChoices("text", "prompt"))] = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=4096)
    add_special_tokens: bool = True
    model: str | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.text is None) == (self.messages is None):
            raise ValueError("give a text (or prompt), or messages")
        return self


class TokenizeResponse(BaseModel):
    """Tokens as ids, and the text of each."""

    tokens: list[int]
    texts: list[str]
    count: int
    max_model_len: int | None


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True), at_most(1_000_000)]


class DetokenizeResponse(BaseModel):
    """The text of tokens; `prompt` is vLLM's name for it."""

    text: str
    prompt: str
