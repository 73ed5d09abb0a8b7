"""The bundled model with the shipped head sets, and facts of two domains."""

from __future__ import annotations

import pytest

import juice


@pytest.fixture(scope="module")
def model() -> juice.SteeredModel:
    return juice.load("mini", head_sets="head_sets")


@pytest.fixture(scope="module")
def pool() -> list[juice.ConflictExample]:
    """Return sixty facts each about capitals and authors."""
    every = juice.read_examples("mini")
    return [
        e
        for relation in ("world_capital", "book_author")
        for e in [e for e in every if e.relation == relation][:60]
    ]
