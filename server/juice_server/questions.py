"""From a question with its context apart to the engine's requests."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from juice.engine import GenerationRequest
from juice_server.chats import prompt_of
from juice_server.prompts import Prompt, joined
from juice_server.schemas.question import Question
from juice_server.schemas.shared import GenerationFields
from juice_server.translation import Translator


async def prompt_asked(translator: Translator, request: Request, question: Question) -> Prompt:
    """Return the prompt of a question, made in its client's turn.

    Raises what `prompt_of` and `joined` raise.
    """

    def read() -> Prompt:
        if question.messages is not None:
            turns = [message.plain() for message in question.messages]
            return prompt_of(translator, turns, question)
        contexts = None if question.context is None else [question.context]
        return joined([question.prompt or ""], contexts)[0]

    return await translator.off_loop(request, read)


async def asked(
    translator: Translator,
    request: Request,
    question: Question,
    fields: GenerationFields,
    **options: Any,
) -> GenerationRequest:
    """Return what one answer to a question asks the engine for.

    Args:
        translator: Has the model.
        request: The HTTP request.
        question: The question.
        fields: How to steer, sample and stop.
        **options: Further arguments of `SteeredModel.request`.

    Raises RequestError for what the settings or the model do not allow.
    """
    prompt = await prompt_asked(translator, request, question)
    made = await translator.requests(request, [prompt], fields, is_chat=question.is_chat, **options)
    return made[0]
