"""OpenAI's completions and chat: their fields and defaults, plus `steer`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from juice_server.schemas.shared import (
    MAX_KEYS,
    MAX_PROMPTS,
    MAX_TOKENS,
    TOP_LOGPROBS,
    Contexts,
    OpenAIFields,
    TokenId,
    as_list,
    at_most,
)

# Fields of OpenAI or of other servers that are not served, with the values that are harmless.
ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "skip_special_tokens": (True,),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "prompt_logprobs": (0,),
    "tools": ([],),
    "functions": ([],),
    "best_of": (1,),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
}


# Of `apply_chat_template`, what is not a template's.
TAKEN = frozenset(
    {"conversation", "messages", "documents", "tools", "chat_template", "tokenize", "padding"}
    | {"add_generation_prompt", "continue_final_message", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)


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
    not_served: ClassVar[dict[str, tuple[Any, ...]]] = {**ELSEWHERE, "suffix": ("",)}

    prompt: Annotated[
        list[str | Annotated[list[TokenId], Field(fail_fast=True)]],
        Field(min_length=1, fail_fast=True),
        at_most(MAX_PROMPTS),
        BeforeValidator(_as_prompts),
    ]
    context: Contexts = None
    logprobs: int | None = TOP_LOGPROBS
    echo: bool = False

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


class TextPart(BaseModel):
    """A part of a message; only text is served."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="ignore")

    role: str = Field(max_length=64)
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    def plain(self) -> dict[str, str]:
        """Return the turn in the form that templates take."""
        text = (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )
        return {"role": self.role, "content": text}


class Document(BaseModel):
    """A document, in the form that templates take."""

    model_config = ConfigDict(extra="allow")

    text: str
    title: str | None = None


class ContextFields(OpenAIFields):
    """What a chat may be given beside its messages."""

    context: str | None = None
    documents: Annotated[list[Document] | None, Field(max_length=MAX_PROMPTS)] = None

    @model_validator(mode="after")
    def _one_context(self) -> ContextFields:
        if self.context is not None and self.documents is not None:
            raise ValueError("context and documents are two ways to give the same; keep one")
        return self


class ChatRequest(ContextFields):
    """The body of POST /v1/chat/completions.

    Without `max_tokens`, an answer has at most 512 tokens, or what the context leaves. `context`
    goes before the last user message, `documents` where the template puts them; the methods `cad`
    and `adacad` need one of them.
    """

    default_max_tokens: ClassVar[int] = 512
    not_served: ClassVar[dict[str, tuple[Any, ...]]] = {
        **ELSEWHERE,
        "audio": (),
        "modalities": (["text"],),
        "web_search_options": (),
        "prediction": (),
        "chat_template": (),
        "echo": (False,),
        "reasoning": (),
        "reasoning_effort": ("none",),
        "thinking": (),
        "verbosity": ("medium",),
    }

    messages: list[Message] = Field(min_length=1, max_length=4096, fail_fast=True)
    chat_template_kwargs: Annotated[dict[str, Any] | None, at_most(MAX_KEYS)] = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = TOP_LOGPROBS

    @model_validator(mode="after")
    def _settle(self) -> ChatRequest:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if taken := sorted(TAKEN & (self.chat_template_kwargs or {}).keys()):
            raise ValueError(f"chat_template_kwargs names {taken[0]}, which has another field")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return what the chat template is given beside messages and documents."""
        return {
            **(self.chat_template_kwargs or {}),
            # A turn that goes on is not begun.
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
        }
