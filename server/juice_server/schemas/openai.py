"""OpenAI's completions and chat: their fields and defaults, plus `steer`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from juice_server.schemas.documented import Documented
from juice_server.schemas.shared import (
    MAX_PROMPTS,
    MAX_TOKENS,
    TOP_LOGPROBS,
    Contexts,
    OpenAIFields,
    TokenId,
    as_list,
    at_most,
)
from juice_server.schemas.template import TemplateFields, TemplateOptions
from juice_server.schemas.tools import ToolFields
from juice_server.schemas.turns import Message
from juice_server.tools.offer import Offer


def _as_prompts(value: Any) -> Any:
    """Turn a string, tokens, or a list of either into a list of prompts."""
    if isinstance(value, list) and value and isinstance(value[0], int):
        return [value]
    return as_list(value)


class CompletionRequest(OpenAIFields):
    """The body of POST /v1/completions.

    `prompt` is text, tokens, or a list of either; `context` goes before it.
    """

    default_max_tokens: ClassVar[int] = 16

    prompt: Annotated[
        list[str | Annotated[list[TokenId], Field(fail_fast=True)]],
        Field(min_length=1, fail_fast=True),
        at_most(MAX_PROMPTS),
        BeforeValidator(_as_prompts),
    ]
    """A text, or a list of tokens, or a list of either."""
    context: Contexts = None
    """What goes before the prompt: one for all prompts, or one for each."""
    logprobs: int | None = TOP_LOGPROBS
    """How many alternatives to report for every token; without it, no tokens are listed."""
    add_special_tokens: bool = True
    """Whether a text gets the tokens with which the model's prompts begin."""
    echo: bool = False
    """Begin the answer with the prompt, and with `logprobs` score its tokens."""

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.stream and self.logprobs is not None:
            raise ValueError(
                "echo with logprobs is not served as a stream; drop stream, echo or logprobs"
            )
        if self.echo and self.context is not None:
            raise ValueError(
                "echo with a context apart is not served; put the context into the prompt"
            )
        return self


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

    @abstractmethod
    def offer(self) -> Offer | None:
        """Return the functions that the answer may call; None: none. Raises ValueError."""


class ChatRequest(ToolFields, TemplateFields, ChatFields):
    """The body of POST /v1/chat/completions.

    Without `max_tokens`, an answer has at most 512 tokens, or what the context leaves. `context`
    goes before the last user message, `documents` where the template puts them; the methods `cad`
    and `adacad` need one of them.
    """

    default_max_tokens: ClassVar[int] = 512

    messages: list[Message] = Field(min_length=1, max_length=4096, fail_fast=True)
    """The turns of the chat."""
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """The most new tokens; the same as `max_tokens`."""
    logprobs: bool = False
    """Whether to list the tokens of the answer."""
    top_logprobs: int | None = TOP_LOGPROBS
    """How many alternatives to report for each of them."""

    @model_validator(mode="after")
    def _settle(self) -> ChatRequest:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self
