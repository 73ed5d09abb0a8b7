"""The answers of Anthropic's messages, for the document: the routes make them as they are."""

from __future__ import annotations

from typing import Any, Literal

from juice.engine import SteeringReport
from juice_server.schemas.documented import Documented

EVENTS = (
    "Anthropic's message, with `steering`. A stream has its events: `message_start`; for each "
    "block `content_block_start`, `content_block_delta` (`text_delta`, `thinking_delta` or "
    "`input_json_delta`) and `content_block_stop`; then `message_delta` with `stop_reason`, "
    "`usage` and `steering`, and `message_stop`, or `error`. No `[DONE]` follows."
)


class TextBlock(Documented):
    """What the assistant says."""

    type: Literal["text"]
    """The kind of block."""
    text: str
    """Its text."""


class ThinkingBlock(Documented):
    """What the model thought first, where its tokenizer tells it apart."""

    type: Literal["thinking"]
    """The kind of block."""
    thinking: str
    """Its text."""
    signature: str
    """Always empty."""


class CallBlock(Documented):
    """A call that the answer makes."""

    type: Literal["tool_use"]
    """The kind of block."""
    id: str
    """The id of the call, which its result repeats."""
    name: str
    """The name of the function."""
    input: dict[str, Any]
    """Its arguments."""


class MessageUsage(Documented):
    """Prompt and generated tokens."""

    input_tokens: int
    """Tokens of the prompt."""
    output_tokens: int
    """Tokens of the answer, stop tokens included."""
    cache_creation_input_tokens: int
    """Always 0."""
    cache_read_input_tokens: int
    """Always 0."""


class MessageAnswer(Documented):
    """The answer of POST /v1/messages."""

    id: str
    """The id of the message."""
    type: Literal["message"]
    """The kind of answer."""
    role: Literal["assistant"]
    """Whose turn it is."""
    model: str
    """The name of the model."""
    content: list[TextBlock | ThinkingBlock | CallBlock]
    """What the model thought, said and called, in order."""
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    """Why it ends."""
    stop_sequence: str | None
    """Which of the `stop_sequences` ended it; null where none did."""
    usage: MessageUsage
    """Tokens of the prompt and the answer."""
    steering: SteeringReport
    """What was applied."""


class CountAnswer(Documented):
    """The answer of POST /v1/messages/count_tokens."""

    input_tokens: int
    """How many tokens the chat has."""
