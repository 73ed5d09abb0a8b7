"""Where the context of a conflict prompt ends, and the prompt without it."""

from __future__ import annotations

import re

from juice.data.example import ConflictExample
from juice.methods import ConflictType

QUESTION = re.compile(r"question:", re.IGNORECASE)


def without_context(example: ConflictExample, conflict_type: ConflictType) -> str:
    """Return a conflict prompt without its context.

    That is its last `Question: ...`, or the example's question or clean prompt if the prompt ends
    with it and it begins before that. Where the prompt has none of these, it is the example's
    question, else its clean prompt, else the prompt unchanged.
    """
    prompt, apart = (
        example.prompts[conflict_type],
        [text for text in (example.question, example.prompts.get("clean")) if text],
    )
    questions = list(QUESTION.finditer(prompt))
    start = questions[-1].start() if questions else 0
    for text in apart:
        if prompt.endswith(text) and (start == 0 or len(text) >= len(prompt) - start):
            return text
    if start > 0:
        return prompt[start:]
    return apart[0] if apart else prompt


def prompt_alone(example: ConflictExample, conflict_type: ConflictType) -> str | None:
    """Return a prompt without its context; None where it cannot be parted from it."""
    prompt, alone = example.prompts[conflict_type], without_context(example, conflict_type)
    return None if conflict_type != "clean" and alone == prompt else alone


def context_end(example: ConflictExample, conflict_type: ConflictType) -> int | None:
    """Return how many characters of a conflict prompt are its context; None where unknown."""
    prompt, rest = example.prompts[conflict_type], without_context(example, conflict_type)
    return len(prompt) - len(rest) if prompt.endswith(rest) and rest != prompt else None


def has_context_apart(example: ConflictExample) -> bool:
    """Return whether every conflict prompt of an example can be parted from its context."""
    return all(
        without_context(example, t) != prompt
        for t, prompt in example.prompts.items()
        if t != "clean"
    )
