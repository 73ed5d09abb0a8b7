"""Asking every prompt of every example in large batches, and judging by the paper's rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from juice.data.example import ConflictExample
from juice.engine import GenerationRequest
from juice.evaluation.methods import Treatment
from juice.evaluation.metrics import context_reliance
from juice.evaluation.remembered import Remembered, Said
from juice.evaluation.splits import domain_of
from juice.methods import ConflictType, Target
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel


@dataclass(frozen=True)
class Answer:
    """One method's answer to one prompt: its text, the verdict, p of both first tokens."""

    output: str
    is_correct: bool
    p_parametric: float | None
    p_context: float | None

    @property
    def context_reliance(self) -> float | None:
        """M_C of this prompt; None where an answer has no token of its own."""
        if self.p_context is None or self.p_parametric is None:
            return None
        return context_reliance(self.p_context, self.p_parametric)

    def to_list(self) -> list[Any]:
        """Return [output, is_correct, p_parametric, p_context], as results.json has it.

        Probabilities have six significant digits.
        """
        p_values = [
            None if p is None else float(f"{p:.6g}") for p in (self.p_parametric, self.p_context)
        ]
        return [self.output, self.is_correct, *p_values]


def ask(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    conflict_types: Sequence[ConflictType],
    treatments: Mapping[str, Treatment],
    judged_by: Target,
    *,
    remembered: Remembered | None = None,
    progress: Progress = silent,
    description: str = "asking",
) -> dict[ConflictType, list[Answer | None]]:
    """Ask every example under its domain's treatment, and judge the answers.

    Args:
        model: The model to ask.
        examples: The examples.
        conflict_types: Which of their prompts to ask.
        treatments: The method's treatment in each domain.
        judged_by: The target whose answer counts as right.
        remembered: Answers that need not be asked for again.
        progress: Reports how many prompts are answered.
        description: What the progress is called.

    Returns:
        By conflict type, an answer for each example; None where an example has no such prompt, the
        method cannot be used on it, or the prompt is too long.
    """
    requests: dict[tuple[ConflictType, int], GenerationRequest] = {}
    for conflict_type in conflict_types:
        for i, example in enumerate(examples):
            treatment = treatments[domain_of(example)]
            if conflict_type in example.prompts and treatment.applies(example):
                request = treatment.request(
                    model, example, conflict_type, max_tokens=example.max_tokens
                )
                if model.engine.fits(request):
                    requests[conflict_type, i] = request
    answers: dict[ConflictType, list[Answer | None]] = {
        t: [None] * len(examples) for t in conflict_types
    }
    asked = list(requests.values())
    said = (remembered or Remembered()).ask(
        model, asked, progress=progress, description=description
    )
    for (conflict_type, i), own in zip(requests, said, strict=True):
        answers[conflict_type][i] = verdict(own, examples[i], judged_by)
    return answers


def verdict(said: Said, example: ConflictExample, judged_by: Target) -> Answer:
    """Judge the answer to a request that `Treatment.request` made."""
    p_parametric, p_context = map(math.exp, said.watched) if said.watched else (None, None)
    is_right = example.is_right(said.text, judged_by)
    return Answer(said.text, is_right, p_parametric, p_context)
