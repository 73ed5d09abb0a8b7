"""The answers of OpenAI's completions and chat, for the document: routes make them as they are."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from juice.engine import FinishReason, SteeringReport
from juice_server.schemas.documented import Documented
from juice_server.schemas.shared import Usage

COMPLETION_EVENTS = (
    "OpenAI's completion, with `steering`. A stream has an event for each piece of text: the same "
    "object with one choice, whose `finish_reason` is null until its last piece, which has "
    "`steering`; after them one without choices and with `usage`, where "
    "`stream_options.include_usage` asks for it, and `[DONE]`."
)
CHAT_EVENTS = (
    "OpenAI's chat completion, with `steering`. A stream has chunks (`chat.completion.chunk`) with "
    "one choice, whose `delta` has the role first, then pieces of `content`, of "
    "`reasoning_content`, or whole `tool_calls`; the last one of a choice has its `finish_reason` "
    "and `steering`. Then one without choices and with `usage`, where "
    "`stream_options.include_usage` asks for it, and `[DONE]`."
)


class AnswerFrame(Documented):
    """What both answers have."""

    id: str
    """The id of the answer."""
    created: int
    """When it was begun, in seconds since 1970."""
    model: str
    """The name of the model."""
    system_fingerprint: str
    """A name for all that decides a request's bits alone: model, dtype, engine, versions, flags."""
    usage: Usage
    """Tokens of prompts and answers."""
    steering: SteeringReport
    """What was applied."""


class CompletionLogprobs(Documented):
    """The tokens of a choice; those of the prompt first, where it is echoed."""

    tokens: list[str]
    """The text of each."""
    token_logprobs: list[float | None]
    """The log-probability of each; null for the first of a prompt."""
    top_logprobs: list[dict[str, float] | None]
    """The likeliest tokens in its place and itself, by text; null for the first of a prompt."""
    text_offset: list[int]
    """The character of the text at which each begins."""


class CompletionChoice(Documented):
    """One text; choice i of prompt p has the index p * n + i."""

    index: int
    """Its number."""
    text: str
    """The new text, after the prompt where it is echoed."""
    finish_reason: FinishReason
    """`stop`, or `length` after `max_tokens`."""
    logprobs: CompletionLogprobs | None
    """Its tokens, where `logprobs` was asked for."""


class CompletionAnswer(AnswerFrame):
    """The answer of POST /v1/completions."""

    object: Literal["text_completion"]
    """The kind of answer."""
    choices: list[CompletionChoice]
    """The texts."""


class ScoredText(Documented):
    """A token and how likely it was."""

    token: str
    """Its text."""
    logprob: float
    """Its log-probability, that of the steered model before sampling."""
    bytes: list[int]
    """Its text in UTF-8."""


class ScoredPlace(ScoredText):
    """A token of the answer and its alternatives."""

    top_logprobs: list[ScoredText]
    """The likeliest tokens in its place and itself, best first."""


class ChatLogprobs(Documented):
    """The tokens of a chat's answer."""

    content: list[ScoredPlace]
    """Each of them, those of calls and thoughts too."""
    refusal: None
    """Always null."""


class AnsweredFunction(Documented):
    """The function that the answer calls."""

    name: str
    """Its name."""
    arguments: str
    """Its arguments: a JSON object, as text."""


class AnsweredCall(Documented):
    """A call that the answer makes."""

    id: str
    """The id of the call, which its result repeats."""
    type: Literal["function"]
    """The kind of tool."""
    function: AnsweredFunction
    """What is called, and with what."""


class AnsweredMessage(Documented):
    """The assistant's turn."""

    role: Literal["assistant"]
    """Whose turn it is."""
    content: str | None
    """The text; null where there are calls alone."""
    refusal: None
    """Always null."""
    reasoning_content: str = ""
    """What the model thought first; absent where its tokenizer does not tell it apart."""
    tool_calls: list[AnsweredCall] = Field(default_factory=list)
    """The calls; absent where there are none."""


class ChatChoice(Documented):
    """One answer."""

    index: int
    """Its number."""
    message: AnsweredMessage
    """What the assistant says and calls."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    """`stop`, `length` after `max_tokens`, or `tool_calls` where it ends with calls."""
    logprobs: ChatLogprobs | None
    """Its tokens, where `logprobs` was asked for."""


class ChatAnswer(AnswerFrame):
    """The answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    """The kind of answer."""
    choices: list[ChatChoice]
    """The answers."""
