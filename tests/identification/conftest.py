"""The bundled model, for tests that need one that knows facts, and little text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import juice
from juice.data import memory
from juice.identification import learned, lessons, ordinary, tune


@pytest.fixture(scope="module")
def mini() -> Iterator[juice.SteeredModel]:
    with juice.load("mini") as model:
        yield model


@pytest.fixture(autouse=True)
def _few_open_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a few of them, in a step and to measure on: small models have little to say there."""
    monkeypatch.setattr(lessons, "N_OPEN", 4)
    monkeypatch.setattr(memory, "N_HELD_OUT", 1)


@pytest.fixture
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure harm on the first piece of prose, all of it; learn from the other prose."""
    monkeypatch.setattr(ordinary, "KINDS", ("prose",))
    monkeypatch.setattr(ordinary, "HELD_OUT_EVERY", 1000)
    monkeypatch.setattr(tune, "N_PIECES", 1000)


@pytest.fixture
def few_stages(little_text: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learn in two short stages of long steps: models without a memory have little to learn.

    However little they win is enough.
    """
    monkeypatch.setattr(learned, "N_STAGES", 2)
    monkeypatch.setattr(learned, "N_FIRST_STEPS", 12)
    monkeypatch.setattr(learned, "N_STEPS", 4)
    monkeypatch.setattr(learned, "FIRST_REACH", 0.1)
    monkeypatch.setattr(learned, "REACH", 0.05)
    monkeypatch.setattr(learned, "ENOUGH", -10.0)
    monkeypatch.setattr(learned, "LITTLE", -10.0)
