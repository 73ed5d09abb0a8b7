"""A chat as one prompt: its template, functions, documents and context, for every protocol."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from fastapi import Request as HttpRequest

from juice.engine.request import Request
from juice.errors import RequestError
from juice.steered_model import SteeredModel
from juice_server.chat import ChatFields, Document
from juice_server.requests import Prompt, TokenTexts, Translator
from juice_server.tool_parser import Reader, ToolUse, use_of
from juice_server.tools import Offer


@dataclass(frozen=True, eq=False)
class Chat:
    """The requests of a chat, one for each answer, and the way to read these after its prompt."""

    requests: list[Request]
    prompt: str
    tools: ToolUse | None

    def left_out(self, texts: TokenTexts) -> Collection[int]:
        """Return the special tokens that the texts of its answers leave out."""
        return texts.special if self.requests[0].options.skip_special_tokens else ()

    def reader(self) -> Reader:
        return Reader() if self.tools is None else self.tools.reader(self.prompt)


def prompt_of(
    translator: Translator,
    messages: Sequence[dict[str, Any]],
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    offer: Offer | None = None,
    context: str | None = None,
    documents: Sequence[Document] | None = None,
    finds_question: bool = False,
) -> Prompt:
    """Return a chat as one guarded text.

    A context goes before the last user's words, documents where the template puts them. `options`
    are its other arguments. The messages are not changed.

    Raises RequestError when there is no template, or when it refuses the messages or has no place
    for functions or documents, or nobody speaks who could be given a context, or the last user's
    words cannot be found.
    """
    if translator.chat_model.prompts.chat_template is None:
        raise RequestError(
            f"{translator.model_name} {translator.why_no_chat}; use /v1/completions or /generate",
            param="messages",
        )
    chat, before = _Turns(translator.chat_model, messages, options), ""
    if offer is not None:
        remedy = "serve the model with one that has (--chat-template FILE)"
        # Compared with an empty list: templates for functions may not take none.
        chat = replace(chat, options={**options, "tools": []})
        chat = chat.with_option("tools", offer.for_template(), remedy)
    alone = chat.text
    if context is not None:
        if chat.last is None:
            raise RequestError(
                "a context goes before the last user message, but there is none", param="context"
            )
        before = chat.model.prompts.join_context(context, chat.question).removesuffix(chat.question)
    if documents:
        listed = [document.model_dump() for document in documents]
        chat = chat.with_option("documents", listed, "send them as context")
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
            found = self.model.prompts.data(words).join(pieces).rstrip()
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
    offer = body.offer()
    translator = translator.trusting(request, body).offering(offer)

    def read() -> tuple[Prompt, ToolUse | None]:
        prompt = prompt_of(
            translator,
            body.turns(),
            body.for_template(),
            offer=offer,
            context=body.context,
            documents=body.documents,
            finds_question=body.steer is not None and body.steer.positions == "question",
        )
        if offer is None:
            return prompt, None
        form, structures = translator.tool_format, translator.model.engine.structures
        return prompt, use_of(offer, form, structures, body.structure, body.structure_field)

    prompt, tools = await translator.off_loop(request, read)
    asked: dict[str, Any] = {"top_logprobs": top_logprobs}
    if tools is not None:  # calls may begin with a special token
        asked |= {"structure": tools.structure, "skip_special_tokens": False}
    requests = await translator.requests(
        request, [prompt], body, alias=body.model, is_chat=True, **asked
    )
    return Chat(requests, translator.model.prompts.shown(str(prompt.text)), tools)
