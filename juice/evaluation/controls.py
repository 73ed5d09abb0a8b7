"""Controls: examples in which steering is not needed, made from those that are given. What does it break there?

    true context       the conflict prompts tell the truth: the context answer is replaced by the parametric one
    unknown subject    the conflict prompts are about a subject that does not exist: the context is all there is to know

In the first the parametric answer is right, in the second the context answer. Examples whose
subject is their question, or whose context is an instruction (MemoTrap), have neither.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from juice.data.example import ConflictExample

ONSETS = (
    "b",
    "br",
    "ch",
    "d",
    "f",
    "g",
    "gr",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "qu",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "z",
)
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "oo")
CODAS = ("", "n", "r", "l", "s", "m", "th", "nd")


def true_contexts(examples: Sequence[ConflictExample]) -> list[ConflictExample]:
    """Return those examples whose conflict prompts can be made to tell the truth."""
    made = []
    for example in filter(_is_about_something, examples):
        told = _replaced(
            example, dict.fromkeys(example.context_answer, example.parametric_answer[0])
        )
        if told is not None:
            made.append(told)
    return made


def unknown_subjects(examples: Sequence[ConflictExample], seed: int) -> list[ConflictExample]:
    """Return those examples whose prompts name their subject, about an invented one each."""
    rng, made = Random(seed), []
    for example in filter(_is_about_something, examples):
        told = _replaced(example, {example.subject: invented_name(rng)})
        if told is not None:
            made.append(told)
    return made


def invented_name(rng: Random) -> str:
    """Return a name of two or three syllables that nobody has."""
    syllables = (rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.choice((2, 2, 3))))
    return ("".join(syllables) + rng.choice(CODAS)).capitalize()


def _is_about_something(example: ConflictExample) -> bool:
    asked = (example.question or "").removeprefix("Question:").strip()
    return example.match == "contains" and not asked.startswith(example.subject)


def _replaced(example: ConflictExample, new: dict[str, str]) -> ConflictExample | None:
    """Replace whole words in every prompt; None where a conflict prompt has none of these."""
    old = re.compile(
        "|".join(rf"(?<!\w){re.escape(text)}(?!\w)" for text in sorted(new, key=len, reverse=True))
    )
    prompts = {
        t: old.sub(lambda match: new[match.group()], prompt)
        for t, prompt in example.prompts.items()
    }
    conflicts = [t for t in prompts if t != "clean"]
    if not conflicts or any(prompts[t] == example.prompts[t] for t in conflicts):
        return None
    apart = {
        name: old.sub(lambda match: new[match.group()], text)
        for name in ("context", "question")
        if (text := getattr(example, name))
    }
    return example.model_copy(update={"prompts": prompts, **apart})
