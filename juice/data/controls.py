"""Controls: examples that need no steering, made from the given ones. What does it break there?

    true context       the conflict prompts are true: the parametric answer replaces the context
                       answer
    unknown subject    the conflict prompts are about a subject that does not exist: the context is
                       all there is to know

In the first the parametric answer is right, in the second the context answer. Examples whose
subject is their question, or whose context is an instruction (MemoTrap), give neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from juice.data.example import ConflictExample
from juice.data.passage import swapped

ONSETS = "b br ch d f g gr h k l m n p qu r s st t tr v w z".split()  # noqa: SIM905
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "oo")
CODAS = ("", "n", "r", "l", "s", "m", "th", "nd")


def true_contexts(examples: Sequence[ConflictExample]) -> list[ConflictExample]:
    """Return true versions of the examples whose conflict prompts can be made true."""
    made = []
    for example in filter(_is_about_something, examples):
        changed = _replaced(
            example, dict.fromkeys(example.context_answer, example.parametric_answer[0])
        )
        if changed is not None:
            made.append(changed)
    return made


def unknown_subjects(examples: Sequence[ConflictExample], seed: int) -> list[ConflictExample]:
    """Return the examples whose conflict prompts name their subject, with an invented one.

    Of several words the longest is invented: New Zealand becomes New Quailoth.
    """
    rng, made = Random(seed), []
    for example in filter(_is_about_something, examples):
        longest = max(example.subject.split(), key=len, default="")
        name = example.subject.replace(longest, invented_name(rng), 1)
        changed = _replaced(example, {example.subject: name})
        if changed is not None:
            made.append(changed)
    return made


def invented_name(rng: Random) -> str:
    """Return a word of two or three syllables that is nobody's name."""
    syllables = (rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.choice((2, 2, 3))))
    return ("".join(syllables) + rng.choice(CODAS)).capitalize()


def _is_about_something(example: ConflictExample) -> bool:
    asked = (example.question or "").removeprefix("Question:").strip()
    is_question = example.subject.endswith("?") or asked.startswith(example.subject)
    return example.match != "begins" and not is_question


def _replaced(example: ConflictExample, new: dict[str, str]) -> ConflictExample | None:
    """Replace whole words in every prompt; None where a conflict prompt has none of them."""
    prompts = {t: swapped(prompt, new) for t, prompt in example.prompts.items()}
    conflicts = [t for t in prompts if t != "clean"]
    if not conflicts or any(prompts[t] == example.prompts[t] for t in conflicts):
        return None
    apart = {
        name: swapped(text, new)
        for name in ("context", "question", "opening")
        if (text := getattr(example, name))
    }
    return example.model_copy(update={"prompts": prompts, **apart})
