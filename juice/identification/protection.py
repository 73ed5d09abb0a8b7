"""Prompts that steering should leave alone, made from the user's own examples.

    unknown   the context is all there is: a conflict's prompt about a subject that does not exist
    clean     there is no context: the clean prompt

Steering toward memory endangers the first, and when strong both; toward the context the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from juice.data.contexts import prompt_alone
from juice.data.controls import unknown_subjects
from juice.data.example import ConflictExample
from juice.errors import UsageError
from juice.identification.first_tokens import Asked
from juice.methods import CONFLICTS, Target
from juice.steered_model import SteeredModel

Protected = Literal["unknown", "clean"]
PROTECTED: tuple[Protected, ...] = ("unknown", "clean")
ENDANGERS: dict[Target, tuple[Protected, ...]] = {
    "parametric": ("unknown", "clean"),
    "context": ("clean",),
}
ACCEPTED_LOSS = 0.1


@dataclass(frozen=True, kw_only=True)
class Protection:
    """What steering should leave alone.

    Args:
        kinds: Which prompts.
        accepted: The share of them that steering may break at no cost, 0 to 1.

    Raises:
        UsageError: A kind is unknown, or the share out of range.
    """

    kinds: tuple[Protected, ...] = PROTECTED
    accepted: float = ACCEPTED_LOSS

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in PROTECTED:
                raise UsageError(f"protect names {kind!r}; expected {' or '.join(PROTECTED)}")
        if not 0 <= self.accepted <= 1:
            raise UsageError(f"the accepted loss is {self.accepted}; expected a share from 0 to 1")


DEFAULT = Protection()


def protected_prompts(
    model: SteeredModel,
    target: Target,
    examples: Sequence[ConflictExample],
    kinds: Sequence[Protected],
) -> dict[str, list[Asked]]:
    """Return the prompts that steering toward a target endangers, with their right answers.

    Args:
        model: The model.
        target: What is steered toward.
        examples: The examples that they are made from.
        kinds: Which prompts to protect, whatever the target.

    Returns:
        By kind, the tokens of each prompt and the first one of its answer; kinds that the target
        does not endanger, or that cannot be made of the examples, are left out.
    """
    asked = {
        kind: [
            (model.prompts.tokens(own.prompt, own.example.opening), token)
            for own in prompts
            if (
                token := model.first_token(
                    own.prompt, own.example.answer(own.answer), opening=own.example.opening
                )
            )
            is not None
        ]
        for kind, prompts in endangered_prompts(target, examples).items()
        if kind in kinds
    }
    return {kind: own for kind, own in asked.items() if own}


class Endangered(NamedTuple):
    """A prompt that steering should leave alone, without its context, and whose answer is right."""

    prompt: str
    alone: str | None
    example: ConflictExample
    answer: Target


def endangered_prompts(
    target: Target, examples: Sequence[ConflictExample]
) -> dict[str, list[Endangered]]:
    """Return the prompts that steering toward a target endangers, by kind; none for no prompt."""
    made = {"unknown": _about_nobody, "clean": _without_context}
    found = {kind: list(made[kind](examples)) for kind in ENDANGERS[target]}
    return {kind: own for kind, own in found.items() if own}


def _without_context(examples: Sequence[ConflictExample]) -> Iterator[Endangered]:
    for example in examples:
        if "clean" in example.prompts:
            clean = example.prompts["clean"]
            yield Endangered(clean, clean, example, "parametric")


def _about_nobody(examples: Sequence[ConflictExample]) -> Iterator[Endangered]:
    """Yield prompts about invented subjects, of the conflict types in turn."""
    for i, example in enumerate(unknown_subjects(examples, seed=0)):
        conflicts = [t for t in CONFLICTS if t in example.prompts]
        conflict = conflicts[i % len(conflicts)]
        alone = prompt_alone(example, conflict)
        yield Endangered(example.prompts[conflict], alone, example, "context")
