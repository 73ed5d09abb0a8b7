"""From the messages of a chat to one text, with its context apart, the same for every route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from juice.engine import GenerationRequest
from juice.errors import RequestError
from juice.steered_model import join_context
from juice_server.schemas.openai import ContextFields
from juice_server.translation import Prompt, Translator


def prompt_of(
    translator: Translator,
    messages: Sequence[dict[str, str]],
    given: ContextFields | None = None,
    **options: Any,
) -> Prompt:
    """Return a chat as one text.

    Args:
        translator: Has the model and its chat template.
        messages: The turns, which are not changed.
        given: The context, which goes before the last user's words, or documents, which go where
            the template puts them.
        **options: What else the template takes.

    Raises RequestError when there is no template, or when it refuses the messages or has no place
    for documents, or nobody speaks who could be given a context.
    """
    context = None if given is None else given.context
    documents = () if given is None else given.documents or ()
    prompts = translator.chat_model.prompts
    if prompts.chat_template is None:
        raise RequestError(
            f"{translator.model_name} has no chat template; use /v1/completions or /generate",
            param="messages",
        )
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


async def requests_of(
    translator: Translator,
    request: Request,
    body: ContextFields,
    messages: Sequence[dict[str, str]],
    *,
    top_logprobs: int = 0,
    **options: Any,
) -> list[GenerationRequest]:
    """Return what a chat asks the engine for; raises what `prompt_of` and the translator raise.

    Args:
        translator: Has the model.
        request: The HTTP request.
        body: Its fields.
        messages: Its turns.
        top_logprobs: How many alternatives to report for each token.
        **options: What else the template takes.
    """
    prompt = await translator.off_loop(
        request, lambda: prompt_of(translator, messages, body, **options)
    )
    return await translator.requests(
        request, [prompt], body, alias=body.model, is_chat=True, top_logprobs=top_logprobs
    )


def _is_user(message: dict[str, str]) -> bool:
    return message["role"] == "user"
