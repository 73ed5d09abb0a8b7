"""Scores of single examples; the scores of any set of them are the mean of these."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from juice.data.example import ConflictExample, judged_types
from juice.errors import ExampleError
from juice.evaluation.analyses.inputs import AnalysisInputs
from juice.evaluation.splits import domain_of
from juice.head_set import HeadScores
from juice.identification.probing import score_heads


def pool_of(inputs: AnalysisInputs, n: int) -> list[ConflictExample]:
    """Return up to n examples that are not tested on.

    Those that the heads were found on come first, then others of their domains, then the rest.
    """
    drawn = inputs.splits.identification[inputs.target]
    domains = {domain_of(e) for e in drawn}
    others = [*inputs.splits.validation, *inputs.splits.large]
    Random(inputs.seed).shuffle(others)
    others.sort(key=lambda e: domain_of(e) not in domains)
    types = set(drawn[0].prompts)
    return [*drawn, *(e for e in others if types <= e.prompts.keys())][:n]


def score_each(inputs: AnalysisInputs, examples: Sequence[ConflictExample]) -> list[HeadScores]:
    """Return the scores of each example. Raises ExampleError for fewer than two examples."""
    if len(examples) < 2:
        raise ExampleError(
            f"{len(examples)} examples can be resampled; expected at least 2 that are not tested on"
        )
    types = judged_types(inputs.target, examples)
    settings = inputs.options
    return [
        score_heads(
            inputs.model,
            [example],
            targets={inputs.target: types},
            alphas_plus=settings.alphas_plus,
            alphas_minus=settings.alphas_minus,
            progress=inputs.progress,
        )[inputs.target]
        for example in examples
    ]


def scores_of(scored: Sequence[HeadScores]) -> HeadScores:
    """Return the scores of a set of examples."""
    plus, minus = (
        torch.stack([getattr(one, sign) for one in scored]).mean(0) for sign in ("plus", "minus")
    )
    return HeadScores(
        target=scored[0].target, conflict_types=scored[0].conflict_types, plus=plus, minus=minus
    )
