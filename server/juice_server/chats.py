"""From the messages of a chat to one text, with its context apart, the same for every route."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request

from juice.engine import GenerationRequest
from juice.errors import RequestError
from juice.steered_model import join_context
from juice_server.schemas.openai import ChatFields, Document
from juice_server.tools.offer import Offer
from juice_server.tools.reading import CallReader, PlainReader, Reader
from juice_server.tools.use import ToolUse, use_of
from juice_server.translation import Prompt, Translator


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
        if self.tools is None:
            return PlainReader()
        return CallReader(self.tools.form, self.tools.offer, self.prompt)


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
    **options: Any,
) -> Prompt:
    """Return a chat as one text.

    Args:
        translator: Has the model and its chat template.
        messages: The turns, which are not changed.
        given: The functions; the context, which goes before the last user's words, or documents,
            which go where the template puts them.
        **options: What else the template takes.

    Raises RequestError when there is no template, or when it refuses the messages or has no place
    for functions or documents, or nobody speaks who could be given a context.
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
        options["tools"] = offer.for_template()
    last = next((i for i in reversed(range(len(messages))) if _is_user(messages[i])), None)
    question = None if last is None else messages[last]["content"]
    alone = text = prompts.rendered(messages, **options)
    if context is not None:
        if last is None or question is None:
            raise RequestError(
                "a context goes before the last user message, but there is none", param="context"
            )
        joined = {**messages[last], "content": join_context(context, question)}
        text = prompts.rendered([*messages[:last], joined, *messages[last + 1 :]], **options)
    if documents:
        plain = [own.model_dump() for own in documents]
        text = prompts.rendered(messages, documents=plain, **options)
        if text == alone:
            raise RequestError(
                "the chat template has no place for documents; send them as context",
                param="documents",
            )
    start = -1 if question is None else text.rfind(question.strip())
    return Prompt(
        text=text,
        without_context=alone if text != alone else None,
        question_start=start if start >= 0 else None,
    )


def _check_place(
    translator: Translator,
    messages: Sequence[dict[str, Any]],
    offer: Offer,
    options: dict[str, Any],
) -> None:
    """Raise RequestError where the template has no place for functions."""
    prompts = translator.chat_model.prompts
    with_them = prompts.rendered(messages, tools=offer.for_template(), **options)
    if with_them == prompts.rendered(messages, **options):
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
    *,
    top_logprobs: int = 0,
    **options: Any,
) -> Chat:
    """Return what a chat asks the engine for; raises what `prompt_of` and the translator raise.

    Args:
        translator: Has the model.
        request: The HTTP request.
        body: Its fields.
        messages: Its turns.
        top_logprobs: How many alternatives to report for each token.
        **options: What else the template takes.
    """

    def read() -> tuple[Prompt, ToolUse | None]:
        prompt = prompt_of(translator, messages, body, **options)
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
