"""The prompts of a request, with what is known of their contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from juice.errors import RequestError
from juice.steered_model import join_context


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt, and what is known of its context where that is given apart.

    Args:
        text: The whole prompt, or its tokens.
        without_context: The prompt without its context.
        question_start: The character of the text from which on it is the question.
    """

    text: str | Sequence[int]
    without_context: str | None = None
    question_start: int | None = None


def joined(prompts: Sequence[str | Sequence[int]], contexts: Sequence[str] | None) -> list[Prompt]:
    """Put each prompt's context before it: one for all, or one for each.

    Raises RequestError where they do not match.
    """
    if contexts is None:
        return [Prompt(text=prompt) for prompt in prompts]
    if len(contexts) not in (1, len(prompts)):
        raise RequestError(
            f"there are {len(contexts)} contexts for {len(prompts)} prompts; "
            "give one, or one for each prompt",
            param="context",
        )
    each = contexts if len(contexts) == len(prompts) else [contexts[0]] * len(prompts)
    made: list[Prompt] = []
    for prompt, context in zip(prompts, each, strict=True):
        if not isinstance(prompt, str):
            raise RequestError(
                "a context goes before a prompt of text, but this one is tokens; "
                "put both into the prompt",
                param="context",
            )
        text = join_context(context, prompt)
        start = len(text) - len(prompt)
        made.append(Prompt(text=text, without_context=prompt, question_start=start))
    return made
