"""From the messages of a chat to one text, with its context apart, the same for every route."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol
from uuid import uuid4

from starlette.requests import Request

from juice.engine import GenerationRequest
from juice.errors import RequestError
from juice.steered_model import join_context
from juice_server.prompts import Prompt
from juice_server.schemas.openai import ChatFields, Document
from juice_server.tools.offer import Offer
from juice_server.tools.reading import PlainReader, Reader
from juice_server.tools.use import ToolUse, use_of
from juice_server.translation import Translator


@dataclass(frozen=True, eq=False)
class Chat:
    """What a chat asks the engine for, and how its answers are read.

    Args:
        requests: One for each answer.
        prompt: The text before them.
        tools: How they call functions; None: they do not.
    """

    requests: list[GenerationRequest]
    prompt: str
    tools: ToolUse | None

    def reader(self) -> Reader:
        """Return what reads one answer."""
        return PlainReader() if self.tools is None else self.tools.reader(self.prompt)


class Given(Protocol):
    """What a chat may be given beside its messages."""

    context: str | None
    documents: list[Document] | None

    def offer(self) -> Offer | None:
        """Return the functions that the answer may call."""


def prompt_of(
    translator: Translator,
    messages: Sequence[dict[str, Any]],
    given: Given | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    finds_question: bool = False,
) -> Prompt:
    """Return a chat as one text.

    Args:
        translator: Has the model and its chat template.
        messages: The turns, which are not changed.
        given: The functions; the context, which goes before the last user's words, or documents,
            which go where the template puts them.
        options: What else the template takes.
        finds_question: Whether to look for the last user's words in the text.

    Raises RequestError when there is no template, or when it refuses the messages or has no place
    for functions or documents, or nobody speaks who could be given a context, or the last user's
    words cannot be found.
    """
    context = None if given is None else given.context
    documents = () if given is None else given.documents or ()
    offer = None if given is None else given.offer()
    prompts = translator.chat_model.prompts
    if prompts.chat_template is None:
        raise RequestError(
            f"{translator.model_name} has no chat template; use /v1/completions or /generate",
            param="messages",
        )
    if offer is not None:
        _check_place(translator, messages, offer, options)
        options = {**options, "tools": offer.for_template()}
    last = next((i for i in reversed(range(len(messages))) if _is_user(messages[i])), None)
    if context is not None and last is None:
        raise RequestError(
            "a context goes before the last user message, but there is none", param="context"
        )
    text = alone = prompts.rendered(messages, options)
    question = "" if last is None else str(messages[last]["content"])
    before = "" if context is None else join_context(context, question).removesuffix(question)
    if documents:
        options = {**options, "documents": [own.model_dump() for own in documents]}

    def asking(words: str) -> str:
        """Return the text with other words in the place of the last user's."""
        turns = [*messages]
        if last is not None:
            turns[last] = {**messages[last], "content": words}
        return prompts.rendered(turns, options)

    if context is not None or documents:
        text = asking(before + question)
    if documents and text == alone:
        raise RequestError(
            "the chat template has no place for documents; send them as context",
            param="documents",
        )
    start = None
    if finds_question and last is not None:
        start = _question_start(text, before, question, asking)
    return Prompt(
        text=text,
        without_context=alone if text != alone else None,
        question_start=start,
    )


def _question_start(text: str, before: str, question: str, asking: Callable[[str], str]) -> int:
    """Return the character from which on a text is the question, white space not counted.

    Other text may say the same, so its place is that of a word that stands nowhere else.

    Args:
        text: The rendered chat.
        before: What goes before the question in its turn.
        question: The last user's words.
        asking: Renders the chat with other words in the place of the last user's.

    Raises RequestError where the template changes with the words.
    """
    word = uuid4().hex
    *pieces, _ = asking(before + word).split(word)
    for words in (question, question.strip(), question.rstrip()):
        # A template may repeat the question; it is the last one that is answered.
        found = words.join(pieces).rstrip()
        if pieces and text.startswith(found):
            return len(found)
    raise RequestError(
        "the chat template changes the last user's words or what stands before them, so they cannot"
        " be found; steer all positions",
        param="steer.positions",
    )


def _check_place(
    translator: Translator,
    messages: Sequence[dict[str, Any]],
    offer: Offer,
    options: Mapping[str, Any],
) -> None:
    """Raise RequestError where the template has no place for functions."""
    prompts = translator.chat_model.prompts
    with_them = prompts.rendered(messages, {**options, "tools": offer.for_template()})
    if with_them == prompts.rendered(messages, options):
        raise RequestError(
            f"the chat template of {translator.model_name} has no place for tools; serve it with"
            " one that has (--chat-template FILE)",
            param="tools",
        )


async def chat_of(
    translator: Translator,
    request: Request,
    body: ChatFields,
    messages: Sequence[dict[str, Any]],
    options: Mapping[str, Any],
    *,
    top_logprobs: int = 0,
) -> Chat:
    """Return what a chat asks the engine for; raises what `prompt_of` and the translator raise.

    Args:
        translator: Has the model.
        request: The HTTP request.
        body: Its fields.
        messages: Its turns.
        options: What else the template takes.
        top_logprobs: How many alternatives to report for each token.
    """

    def read() -> tuple[Prompt, ToolUse | None]:
        finds_question = body.steer is not None and body.steer.positions == "question"
        prompt = prompt_of(translator, messages, body, options, finds_question=finds_question)
        offer, form = body.offer(), translator.tool_format
        if offer is None:
            return prompt, None
        structures = translator.model.engine.structures
        return prompt, use_of(offer, form, structures, body.structure, body.structure_field)

    prompt, tools = await translator.off_loop(request, read)
    asked: dict[str, Any] = {}
    if tools is not None:  # calls may begin with a special token
        asked = {"structure": tools.structure, "skip_special_tokens": False}
    requests = await translator.requests(
        request,
        [prompt],
        body,
        alias=body.model,
        is_chat=True,
        top_logprobs=top_logprobs,
        **asked,
    )
    return Chat(requests, str(prompt.text), tools)


def _is_user(message: dict[str, Any]) -> bool:
    return str(message["role"]) == "user"
