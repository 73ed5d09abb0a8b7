"""The bodies of the routes that do not generate."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, Field, model_validator

from juice_server.schemas.documented import Documented
from juice_server.schemas.shared import Body, TokenId, at_most
from juice_server.schemas.turns import Message


class TokenizeRequest(Body):
    """The body of POST /tokenize: a text (vLLM calls it `prompt`), or the messages of a chat."""

    text: Annotated[str | None, Field(validation_alias=AliasChoices("text", "prompt"))] = None
    """The text; `prompt` is vLLM's name for it."""
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=4096)
    """The turns of a chat, in place of a text."""
    add_special_tokens: bool = True
    """Whether a text gets the tokens with which the model's prompts begin."""
    model: str | None = None
    """The name of the model; there is one."""

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.text is None) == (self.messages is None):
            raise ValueError("give a text (or prompt), or messages")
        return self


class TokenizeResponse(Documented):
    """Tokens as ids, and the text of each."""

    tokens: list[int]
    """The ids."""
    texts: list[str]
    """The text of each."""
    count: int
    """How many there are."""
    max_model_len: int | None
    """The most tokens of a request; null for no limit."""


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    """The name of the model; there is one."""
    tokens: Annotated[list[TokenId], Field(fail_fast=True), at_most(1_000_000)]
    """The ids."""


class DetokenizeResponse(Documented):
    """The text of tokens; `prompt` is vLLM's name for it."""

    text: str
    """The text."""
    prompt: str
    """The same."""
