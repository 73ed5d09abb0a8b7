"""The bodies of the routes that do not generate."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, Field, model_validator

from juice_server.schemas.documented import Documented
from juice_server.schemas.shared import Body, TokenId, at_most
from juice_server.schemas.template import TemplateFields
from juice_server.schemas.tools import MAX_TOOLS, Tool
from juice_server.schemas.turns import Message


class TokenizeRequest(TemplateFields, Body):
    """The body of POST /tokenize: a text (vLLM calls it `prompt`), or the messages of a chat."""

    text: Annotated[str | None, Field(validation_alias=AliasChoices("text", "prompt"))] = None
    """The text; `prompt` is vLLM's name for it."""
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=4096)
    """The turns of a chat, in place of a text."""
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    """The functions that the chat offers."""
    add_special_tokens: bool | None = None
    """Whether a text gets the tokens with which the model's prompts begin; it does by default. In
    a chat the template writes them.
    """
    return_token_strs: bool | None = None
    """Whether the answer has `token_strs`."""
    model: str | None = None
    """The name of the model; there is one."""

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.text is None) == (self.messages is None):
            raise ValueError("give a text (or prompt), or messages")
        of_chats = {"tools", *TemplateFields.model_fields}
        if self.messages is None and (given := sorted(self.model_fields_set & of_chats)):
            raise ValueError(f"{given[0]} goes with messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens goes with a text; a chat template writes them")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return what the chat template is given beside messages."""
        own = super().for_template()
        if self.tools:
            own["tools"] = [tool.function.function.for_template() for tool in self.tools]
        return own


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
    token_strs: list[str] | None
    """The tokens as the vocabulary has them, where `return_token_strs` asks for them."""


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
