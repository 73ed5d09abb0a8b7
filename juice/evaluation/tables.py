"""From answers to the report's tables, by method, domain and conflict type.

A cell is {n, accuracy, interval, p_parametric, p_context, context_reliance}. `average` is the mean
over the domains' cells, as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from juice.data.example import ConflictExample
from juice.evaluation.answers import Answer
from juice.evaluation.metrics import mean
from juice.evaluation.splits import domain_of
from juice.identification.intervals import share_interval
from juice.methods import ConflictType

AVERAGE = "average"
N_POPULARITY_BINS = 3
Cell = dict[str, Any]


def table(
    examples: Sequence[ConflictExample],
    answers: Mapping[ConflictType, Sequence[Answer | None]],
) -> dict[str, dict[str, Cell]]:
    """Return one method's table, {domain: {conflict type: cell}}, with `average` last."""
    rows: dict[str, dict[str, Cell]] = {}
    for domain in sorted({domain_of(e) for e in examples}):
        own = {
            t: [a for e, a in zip(examples, given, strict=True) if a and domain_of(e) == domain]
            for t, given in answers.items()
        }
        rows[domain] = {t: cell(given) for t, given in own.items() if given}
    for conflict_type, given in answers.items():
        if any(given):
            groups = [
                [a for e, a in zip(examples, given, strict=True) if a and domain_of(e) == d]
                for d in rows
                if d != AVERAGE
            ]
            rows.setdefault(AVERAGE, {})[conflict_type] = _average(conflict_type, rows, groups)
    rows.setdefault(AVERAGE, {})
    return rows


def cell(answers: Sequence[Answer]) -> Cell:
    """Return the cell of some answers."""
    right = [float(a.is_correct) for a in answers]
    return {
        "n": len(answers),
        "accuracy": mean(right),
        "interval": share_interval(right),
        **_probabilities(answers),
    }


def _average(
    conflict_type: str,
    rows: Mapping[str, Mapping[str, Cell]],
    groups: Sequence[Sequence[Answer]],
) -> Cell:
    own = [
        row[conflict_type]
        for domain, row in rows.items()
        if domain != AVERAGE and conflict_type in row
    ]
    everything = cell([a for group in groups for a in group])
    everything["interval"] = share_interval(
        *([float(a.is_correct) for a in group] for group in groups)
    )
    for name in ("accuracy", "p_parametric", "p_context", "context_reliance"):
        values = [c[name] for c in own if c[name] is not None]
        everything[name] = mean(values) if values else None
    return everything


def _probabilities(answers: Sequence[Answer]) -> Cell:
    columns = {
        "p_parametric": [a.p_parametric for a in answers],
        "p_context": [a.p_context for a in answers],
        "context_reliance": [a.context_reliance for a in answers],
    }
    known = {name: [v for v in values if v is not None] for name, values in columns.items()}
    return {name: mean(values) if values else None for name, values in known.items()}


def by_popularity(
    examples: Sequence[ConflictExample],
    answers: Mapping[ConflictType, Sequence[Answer | None]],
) -> list[dict[str, Any]] | None:
    """Return accuracy by tercile of popularity, least popular first.

    None where fewer than three examples have a popularity.
    """
    known = sorted((e.popularity, i) for i, e in enumerate(examples) if e.popularity is not None)
    if len(known) < N_POPULARITY_BINS:
        return None
    bounds = [round(k * len(known) / N_POPULARITY_BINS) for k in range(N_POPULARITY_BINS + 1)]
    bins = []
    for start, end in pairwise(bounds):
        own = known[start:end]
        cells = {
            t: cell(given)
            for t, rows in answers.items()
            if (given := [a for _, i in own if (a := rows[i])])
        }
        bins.append({"from": own[0][0], "to": own[-1][0], "n": len(own), "cells": cells})
    return bins
