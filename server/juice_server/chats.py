"""From the messages of a chat to one text, with its context apart, the same for every route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from juice.errors import RequestError
from juice.steered_model import join_context
from juice_server.translation import Prompt, Translator


def prompt_of(
    translator: Translator,
    messages: Sequence[dict[str, str]],
    *,
    context: str | None = None,
    documents: Sequence[dict[str, Any]] = (),
    **options: Any,
) -> Prompt:
    """Return a chat as one text.

    Args:
        translator: Has the model and its chat template.
        messages: The turns, which are not changed.
        context: Goes before the last user's words.
        documents: Go where the template puts them.
        **options: What else the template takes.

    Raises RequestError when there is no template, or when it refuses the messages or has no place
    for documents, or nobody speaks who could be given a context.
    """
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
        text = prompts.rendered(messages, documents=list(documents), **options)
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


def _is_user(message: dict[str, str]) -> bool:
    return message["role"] == "user"
