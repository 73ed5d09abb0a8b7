"""The answer of OpenAI's responses, for the document: the route makes it as it is."""

from __future__ import annotations

from typing import Any, Literal

from juice.engine import SteeringReport
from juice_server.schemas.documented import Documented
from juice_server.schemas.openai_answers import ScoredPlace
from juice_server.schemas.responses import FlatAllowed, FlatChoice, FlatTool, TextOptions

EVENTS = (
    "OpenAI's response, with `steering`. A stream has its events: `response.created` and "
    "`response.in_progress`; for each item `response.output_item.added`, its parts as they come "
    "(`response.output_text.delta`, `response.reasoning_text.delta`, "
    "`response.function_call_arguments.delta`, each with a `.done`) and "
    "`response.output_item.done`; at the end `response.completed` or `response.incomplete` with "
    "the whole response, or `error`. Each has a `sequence_number`; no `[DONE]` follows."
)
ItemStatus = Literal["completed", "incomplete"]


class OutputText(Documented):
    """The text of a message."""

    type: Literal["output_text"]
    """The kind of part."""
    text: str
    """Its text."""
    annotations: list[Any]
    """Always empty."""
    logprobs: list[ScoredPlace]
    """The tokens of the whole answer, where `include` or `top_logprobs` asks for them."""


class OutputMessage(Documented):
    """What the assistant says."""

    type: Literal["message"]
    """The kind of item."""
    id: str
    """The id of the item."""
    role: Literal["assistant"]
    """Whose turn it is."""
    status: ItemStatus
    """`completed`, or `incomplete` where the answer is cut."""
    content: list[OutputText]
    """Its text."""


class OutputThought(Documented):
    """A part of what the model thought."""

    type: Literal["reasoning_text"]
    """The kind of part."""
    text: str
    """Its text."""


class OutputReasoning(Documented):
    """What the model thought first, where its tokenizer tells it apart."""

    type: Literal["reasoning"]
    """The kind of item."""
    id: str
    """The id of the item."""
    status: ItemStatus
    """`completed`, or `incomplete` where the answer is cut."""
    summary: list[Any]
    """Always empty."""
    content: list[OutputThought]
    """Its text."""


class OutputCall(Documented):
    """A call that the answer makes."""

    type: Literal["function_call"]
    """The kind of item."""
    id: str
    """The id of the item."""
    status: ItemStatus
    """`completed`, or `incomplete` where the answer is cut."""
    call_id: str
    """The id of the call, which its result repeats."""
    name: str
    """The name of the function."""
    arguments: str
    """Its arguments: a JSON object, as text."""


class WhyIncomplete(Documented):
    """Why the answer is cut."""

    reason: Literal["max_output_tokens"]
    """It has as many tokens as were asked for."""


class NoReasoning(Documented):
    """What was asked of the model's thoughts: nothing."""

    effort: None
    """Always null."""
    summary: None
    """Always null."""


class InputDetails(Documented):
    """More about the prompt's tokens."""

    cached_tokens: int
    """Always 0."""
    cache_write_tokens: int
    """Always 0."""


class OutputDetails(Documented):
    """More about the answer's tokens."""

    reasoning_tokens: int
    """Always 0: those of thoughts are not counted apart."""


class ResponseUsage(Documented):
    """Prompt and generated tokens."""

    input_tokens: int
    """Tokens of the prompt."""
    input_tokens_details: InputDetails
    """More about them."""
    output_tokens: int
    """Tokens of the answer, stop tokens included."""
    output_tokens_details: OutputDetails
    """More about them."""
    total_tokens: int
    """Both."""


class ResponseAnswer(Documented):
    """The answer of POST /v1/responses."""

    id: str
    """The id of the response, under which nothing is stored."""
    object: Literal["response"]
    """The kind of answer."""
    created_at: int
    """When it was begun, in seconds since 1970."""
    status: Literal["completed", "incomplete"]
    """`completed`, or `incomplete` after `max_output_tokens`."""
    error: None
    """Always null: an error has an answer of its own."""
    incomplete_details: WhyIncomplete | None
    """Why it is cut; null where it is not."""
    instructions: str | None
    """As in the request."""
    max_output_tokens: int | None
    """As in the request."""
    metadata: dict[str, str]
    """As in the request."""
    model: str
    """The name of the model."""
    output: list[OutputMessage | OutputReasoning | OutputCall]
    """What the model thought, said and called, in order."""
    parallel_tool_calls: bool
    """As in the request."""
    previous_response_id: None
    """Always null."""
    reasoning: NoReasoning
    """What was asked of the model's thoughts."""
    store: Literal[False]
    """Always false."""
    temperature: float
    """As in the request."""
    text: TextOptions
    """As in the request."""
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | FlatAllowed
    """As in the request."""
    tools: list[FlatTool]
    """As in the request."""
    top_logprobs: int
    """As in the request."""
    top_p: float
    """As in the request."""
    truncation: Literal["disabled"]
    """Always `disabled`."""
    usage: ResponseUsage
    """Tokens of the prompt and the answer."""
    user: None
    """Always null."""
    steering: SteeringReport
    """What was applied."""
