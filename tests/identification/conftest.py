"""The bundled model, for tests that need one that knows facts, and little text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import juice
from juice.identification import learned
from tests.support import little


@pytest.fixture(scope="module")
def mini() -> Iterator[juice.SteeredModel]:
    with juice.load("mini") as model:
        yield model


@pytest.fixture(autouse=True)
def _few_open_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    little.few_open_prompts(monkeypatch)


@pytest.fixture
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    little.little_text(monkeypatch)


@pytest.fixture
def few_betas(monkeypatch: pytest.MonkeyPatch) -> None:
    little.few_betas(monkeypatch)


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
