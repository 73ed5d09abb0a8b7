"""The first new tokens of prompts under any steering: a prefill each, outside the engine.

Of each group of prompts it gives how often the likeliest token is the right answer's first, and how
far that one leads: its probability against that of the likeliest other token, p / (p + other),
which is one half at a tie. The second moves with every step of a search, the first seldom.

Among the prompts are those that steering should leave alone, made from the user's examples:

    unknown   the context is all there is: a conflict's prompt about a subject that does not exist
    clean     there is no context: the clean prompt

Steering toward memory endangers the first, and when strong both; toward the context the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from juice.data.example import ConflictExample, prompt_alone, unknown_subjects
from juice.engine.steer import Steering
from juice.formula import CONFLICTS, Method, Target
from juice.identification.attribution import DualRun, micro_batches
from juice.identification.options import Protected
from juice.model.loaded import LoadedModel
from juice.progress import Progress
from juice.steered_model import SteeredModel

# Tokens times layers whose clean z is kept between readings: 2 GiB at a width of 4096 in float16.
MOST_KEPT = 250_000
ENDANGERS: dict[Target, tuple[Protected, ...]] = {
    "parametric": ("unknown", "clean"),
    "context": ("clean",),
}
# The tokens of a prompt, and the first token of its right answer.
Asked = tuple[tuple[int, ...], int]


@dataclass(frozen=True)
class Reading:
    """The mean over the prompts of each group: whether the answer is right, and its lead."""

    right: dict[str, float]
    lead: dict[str, float]

    def score(self, group: str) -> float:
        """Return the mean of the two: what counts, and what moves with every step."""
        return (self.right[group] + self.lead[group]) / 2


class FirstTokens:
    """Prompts that are read under many ways of steering; their clean runs are kept if small.

    Args:
        loaded: The model.
        groups: The prompts, by group.
        method: `juice` for two runs, `june` for one.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        groups: Mapping[str, Sequence[Asked]],
        method: Method = "juice",
    ) -> None:
        self._loaded = loaded
        self._asked = [(name, *asked) for name, prompts in groups.items() for asked in prompts]
        lengths = [len(ids) for _, ids, _ in self._asked]
        self._runs = [
            (batch, DualRun(loaded, [self._asked[i][1] for i in batch], method))
            for batch in micro_batches(lengths, loaded.rope_switch)
        ]
        self._keeps = sum(lengths) * loaded.layout.n_layers <= MOST_KEPT

    def read(
        self, steerings: Sequence[Steering], progress: Progress, description: str
    ) -> list[Reading]:
        """Read all prompts under each way of steering.

        Args:
            steerings: The ways of steering, all of the method.
            progress: Reports how many prompts are read.
            description: What the progress is called.
        """
        loaded, n = self._loaded, len(self._asked)
        tables = [table_of(loaded, steering).to(loaded.device) for steering in steerings]
        answers = torch.tensor([token for *_, token in self._asked], device=loaded.device)
        right, lead = torch.zeros(2, len(tables), n, dtype=torch.float64)  # [steering, prompt]
        with torch.inference_mode(), progress(description, len(tables) * n) as advance:
            for batch, run in self._runs:
                with loaded.turn:
                    run.record()
                    for i, table in enumerate(tables):
                        with run.steered(table):
                            logits = run.logits()
                        tokens = answers[batch][:, None]
                        answer = logits.gather(1, tokens)
                        other = logits.scatter(1, tokens, -torch.inf).amax(1, keepdim=True)
                        right[i, batch] = (answer > other)[:, 0].double().cpu()
                        lead[i, batch] = (answer - other).sigmoid()[:, 0].double().cpu()
                        advance(len(batch))
                    if not self._keeps:
                        run.forget()
        places: dict[str, list[int]] = {}
        for i, (name, *_) in enumerate(self._asked):
            places.setdefault(name, []).append(i)
        return [
            Reading(
                {name: float(right[i, at].mean()) for name, at in places.items()},
                {name: float(lead[i, at].mean()) for name, at in places.items()},
            )
            for i in range(len(tables))
        ]


def table_of(loaded: LoadedModel, steering: Steering) -> torch.Tensor:
    """Return the coefficients of a way of steering, float32 [n_layers, n_heads]."""
    table = torch.zeros(loaded.layout.n_layers, loaded.layout.n_heads)
    for layer, of_heads in steering.coefficients.items():
        table[layer, : len(of_heads)] = of_heads
    return table


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
    return asked_of(
        model,
        {
            kind: [(one.example, one.prompt, one.answer) for one in prompts]
            for kind, prompts in endangered_prompts(target, examples).items()
            if kind in kinds
        },
    )


def asked_of(
    model: SteeredModel, groups: Mapping[str, Sequence[tuple[ConflictExample, str, Target]]]
) -> dict[str, list[Asked]]:
    """Return the tokens of each prompt and the first one of its answer, by group.

    Answers without a token of their own are left out, and groups without a prompt.

    Args:
        model: The model.
        groups: Examples, each with the prompt to ask and whose answer is right.
    """
    asked = {
        group: [
            (model.prompts.tokens(prompt, example.opening), token)
            for example, prompt, answer in prompts
            if (token := model.first_token(prompt, example.answer(answer), opening=example.opening))
            is not None
        ]
        for group, prompts in groups.items()
    }
    return {group: found for group, found in asked.items() if found}


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
    return {kind: prompts for kind, prompts in found.items() if prompts}


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
