"""A chat as one prompt: its template, functions, documents and context, for every protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol
from uuid import uuid4

from fastapi import Request as HttpRequest

from juice.engine.request import Request
from juice.errors import RequestError
from juice.steered_model import SteeredModel, join_context
from juice_server.chat import ChatFields, Document
from juice_server.requests import Prompt, Translator
from juice_server.tool_parser import PlainReader, Reader, ToolUse, use_of
from juice_server.tools import Offer


@dataclass(frozen=True, eq=False)
class Chat:
    """The requests of a chat, one for each answer, and the way to read these.

    Args:
        requests: The requests.
        prompt: The text before the answers.
        tools: The way in which they call functions; None: they do not.
    """

    requests: list[Request]
    prompt: str
    tools: ToolUse | None

    def reader(self) -> Reader:
        """Return a reader for one answer."""
        return PlainReader() if self.tools is None else self.tools.reader(self.prompt)


class Given(Protocol):
    """A body that may give a chat more than its messages."""

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
        options: Other arguments of the template.
        finds_question: Whether to look for the last user's words in the text.

    Raises RequestError when there is no template, or when it refuses the messages or has no place
    for functions or documents, or nobody speaks who could be given a context, or the last user's
    words cannot be found.
    """
    if translator.chat_model.prompts.chat_template is None:
        raise RequestError(
            f"{translator.model_name} has no chat template; use /v1/completions or /generate",
            param="messages",
        )
    chat, before = _Turns(translator.chat_model, messages, options), ""
    if given is not None and (offer := given.offer()) is not None:
        remedy = "serve the model with one that has (--chat-template FILE)"
        chat = chat.with_option("tools", offer.for_template(), remedy)
    alone = chat.text
    if given is not None and given.context is not None:
        if chat.last is None:
            raise RequestError(
                "a context goes before the last user message, but there is none", param="context"
            )
        before = join_context(given.context, chat.question).removesuffix(chat.question)
    if given is not None and given.documents:
        documents = [document.model_dump() for document in given.documents]
        chat = chat.with_option("documents", documents, "send them as context")
    text = chat.asking(before + chat.question) if before else chat.text
    return Prompt(
        text=text,
        without_context=alone if text != alone else None,
        question_start=chat.question_start(text, before) if finds_question else None,
    )


@dataclass(frozen=True)
class _Turns:
    """The turns of a chat and what else its template takes."""

    model: SteeredModel
    messages: Sequence[dict[str, Any]]
    options: Mapping[str, Any]

    @cached_property
    def last(self) -> int | None:
        """The number of the last user's turn."""
        numbers = reversed(range(len(self.messages)))
        return next((i for i in numbers if str(self.messages[i]["role"]) == "user"), None)

    @cached_property
    def question(self) -> str:
        """The last user's words."""
        return "" if self.last is None else str(self.messages[self.last]["content"])

    @cached_property
    def text(self) -> str:
        return self.asking(self.question)

    def with_option(self, name: str, value: Any, remedy: str) -> _Turns:
        """Return the same with another option; raises RequestError where it changes no text."""
        other = replace(self, options={**self.options, name: value})
        if other.text == self.text:
            raise RequestError(f"the chat template has no place for {name}; {remedy}", param=name)
        return other

    def asking(self, words: str) -> str:
        """Return the text with other words in the place of the last user's."""
        turns = [*self.messages]
        if self.last is not None and words != self.question:
            turns[self.last] = {**turns[self.last], "content": words}
        return self.model.prompts.rendered(turns, self.options)

    def question_start(self, text: str, before: str) -> int | None:
        """Return the character at which the question begins in a text, white space not counted.

        Other text may say the same, so its place is that of a word that stands nowhere else.
        `before` stands before the question in its turn. None where no user speaks; raises
        RequestError where the template changes with the words.
        """
        if self.last is None:
            return None
        word = uuid4().hex
        *pieces, _ = self.asking(before + word).split(word)
        for words in (self.question, self.question.strip(), self.question.rstrip()):
            # A template may repeat the question; it is the last one that is answered.
            found = words.join(pieces).rstrip()
            if pieces and text.startswith(found):
                return len(found)
        raise RequestError(
            "the chat template changes the last user's words or what stands before them, so they"
            " cannot be found; steer all positions",
            param="steer.positions",
        )


async def chat_of(
    translator: Translator, request: HttpRequest, body: ChatFields, *, top_logprobs: int = 0
) -> Chat:
    """Return the requests of a chat; raises what `prompt_of` and the translator raise."""

    def read() -> tuple[Prompt, ToolUse | None]:
        finds_question = body.steer is not None and body.steer.positions == "question"
        options = body.for_template()
        prompt = prompt_of(translator, body.turns(), body, options, finds_question=finds_question)
        offer, structures = body.offer(), translator.model.engine.structures
        if offer is None:
            return prompt, None
        form, structure, field = translator.tool_format, body.structure, body.structure_field
        return prompt, use_of(offer, form, structures, structure, field)

    prompt, tools = await translator.off_loop(request, read)
    asked: dict[str, Any] = {"top_logprobs": top_logprobs}
    if tools is not None:  # calls may begin with a special token
        asked |= {"structure": tools.structure, "skip_special_tokens": False}
    requests = await translator.requests(
        request, [prompt], body, alias=body.model, is_chat=True, **asked
    )
    return Chat(requests, str(prompt.text), tools)
