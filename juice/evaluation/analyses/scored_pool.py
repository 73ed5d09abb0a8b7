"""Scores of many examples one by one, from which the scores of any set of them follow: a set's score is the mean of its examples'."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from juice.errors import ExampleError
from juice.evaluation.analyses.context import Context
from juice.evaluation.splits import domain_of
from juice.examples import ConflictExample
from juice.head_set import HeadScores
from juice.identification.scores import score_heads
from juice.identification.tuning import conflict_types_of


def pool_of(context: Context, n: int) -> list[ConflictExample]:
    """Return up to n examples that do not test, those that the heads were found on first, others of their domain next."""
    drawn = context.splits.identification[context.target]
    domains = {domain_of(e) for e in drawn}
    others = [*context.splits.validation, *context.splits.large]
    Random(context.seed).shuffle(others)
    others.sort(key=lambda e: domain_of(e) not in domains)
    types = set(drawn[0].prompts)
    return [*drawn, *(e for e in others if types <= e.prompts.keys())][:n]


def score_each(context: Context, examples: Sequence[ConflictExample]) -> list[HeadScores]:
    """Return the scores of every example alone; raises ExampleError for fewer than two examples."""
    if len(examples) < 2:
        raise ExampleError(f"{len(examples)} examples can be resampled; expected at least 2 that are not tested on")
    types = conflict_types_of(context.target, examples)
    settings = context.settings
    return [
        score_heads(
            context.model.loaded, [example], targets={context.target: types},
            alphas_plus=settings.alphas_plus, alphas_minus=settings.alphas_minus, progress=context.progress,
        )[context.target]
        for example in examples
    ]  # fmt: skip


def scores_of(scored: Sequence[HeadScores]) -> HeadScores:
    """Return the scores of a set of examples."""
    plus, minus = (torch.stack([getattr(one, sign) for one in scored]).mean(0) for sign in ("plus", "minus"))
    return HeadScores(target=scored[0].target, conflict_types=scored[0].conflict_types, plus=plus, minus=minus)
