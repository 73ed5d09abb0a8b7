"""The answers of a model: asked in large batches, judged by the paper's rule.

Answers are greedy, so what a method says to a prompt does not change with the seed where its
steering does not: a request with the same tokens, steering, gate and contrast is asked once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from juice.data.example import ConflictExample
from juice.engine.request import Request
from juice.engine.steer import Steering
from juice.evaluation.methods import Treatment
from juice.evaluation.splits import domain_of
from juice.formula import ConflictType, Target
from juice.identification.outcomes import answer_tokens
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

N_GRAM = 3


# Texts and log-probabilities of watched tokens of one model, by what was asked.
Remembered = dict[bytes, tuple[str, tuple[float, ...]]]


def _key(request: Request) -> bytes:
    gate, contrast = request.gate, request.contrast
    what = (
        request.prompt_ids,
        request.options.max_tokens,
        request.options.watch,
        signature(request.steering),
        gate and (gate.signal, gate.threshold, gate.without_context),
        contrast and (contrast.prompt_ids, contrast.method, contrast.target, contrast.strength),
    )
    return hashlib.sha256(repr(what).encode()).digest()


def signature(steering: Steering) -> str:
    """Return a text that two ways of steering share when they do the same; empty for none."""
    if not steering.coefficients:
        return ""
    betas = {layer: of_heads.tolist() for layer, of_heads in sorted(steering.coefficients.items())}
    where = steering.first_position, steering.last_position, steering.schedule
    return f"{steering.report.method} {where} {betas}"


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN without values, which no table shows as a number."""
    return sum(values) / len(values) if values else math.nan


def context_reliance(p_context: float, p_parametric: float) -> float | None:
    """Return M_C = p_context / (p_context + p_parametric); None where both are 0.

    Source: Goyal et al., "Context-Parametric Inversion" (2024), equation 14.
    """
    total = p_context + p_parametric
    return p_context / total if total > 0 else None


def repetition(tokens: Sequence[int]) -> float:
    """Return the share of n-grams that occurred earlier; 0 for a text with fewer than two."""
    grams = list(zip(*(tokens[i:] for i in range(N_GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def overlap(one: Iterable[object], other: Iterable[object]) -> float | None:
    """Return the Jaccard index of two sets, |A and B| / |A or B|; None where both are empty."""
    a, b = set(one), set(other)
    return len(a & b) / len(a | b) if a | b else None


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
        both = self.p_parametric, self.p_context
        rounded = (None if p is None else float(f"{p:.6g}") for p in both)
        return [self.output, self.is_correct, *rounded]


def accuracy_of(answers: Iterable[Answer | None]) -> float:
    """Return the share of right answers; NaN without any."""
    return mean([float(answer.is_correct) for answer in answers if answer is not None])


def request_for(
    model: SteeredModel,
    example: ConflictExample,
    conflict_type: ConflictType,
    treatments: Mapping[str, Treatment],
    *,
    max_tokens: int,
) -> Request | None:
    """Return the request for one prompt under its domain's treatment; None where it has none.

    The example may lack the prompt, the method may not apply to it, or it may be too long.
    """
    treatment = treatments[domain_of(example)]
    if conflict_type not in example.prompts or not treatment.applies(example):
        return None
    request = treatment.request(model, example, conflict_type, max_tokens=max_tokens)
    return request if model.engine.fits(request) else None


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
    """Return the judged answers under each domain's treatment, by conflict type and example.

    None stands where `request_for` gives none.

    Args:
        model: The model to ask.
        examples: The examples.
        conflict_types: Which of their prompts to ask.
        treatments: The method's treatment in each domain.
        judged_by: The target whose answer counts as right.
        remembered: Answers that need not be asked for again; new ones are added.
        progress: Reports how many prompts are answered.
        description: What the progress is called.
    """
    room = [answer_tokens(model, e) for e in examples]
    requests = {
        (t, i): request
        for t in conflict_types
        for i, e in enumerate(examples)
        if (request := request_for(model, e, t, treatments, max_tokens=room[i])) is not None
    }
    said: Remembered = {} if remembered is None else remembered
    keys = {at: _key(request) for at, request in requests.items()}
    new = {keys[at]: request for at, request in requests.items() if keys[at] not in said}
    done = model.engine.generate(list(new.values()), progress=progress, description=description)
    said.update((key, (c.text, c.watched)) for key, c in zip(new, done, strict=True))
    answers = {}
    for (conflict_type, i), key in keys.items():
        text, watched = said[key]
        p_parametric, p_context = map(math.exp, watched) if watched else (None, None)
        is_right = examples[i].is_right(text, judged_by)
        answers[conflict_type, i] = Answer(text, is_right, p_parametric, p_context)
    return {t: [answers.get((t, i)) for i in range(len(examples))] for t in conflict_types}
