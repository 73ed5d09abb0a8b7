"""The threads of the checks at a load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from threading import Thread

import pytest
import torch
from torch import nn

from juice.checks import at_load
from juice.checks.at_load import one_if_small


@pytest.fixture
def two() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two")
def test_a_small_model_is_checked_on_one_thread_and_runs_on_as_many_as_before() -> None:
    seen: list[int] = []

    def look() -> None:
        seen.append(torch.get_num_threads())

    with suppress(RuntimeError), one_if_small(nn.Linear(2, 2)):
        look()
        raise RuntimeError
    engine = Thread(target=look)  # the one that serves starts after the check
    engine.start()
    engine.join()
    assert [*seen, torch.get_num_threads()] == [1, 2, 2]


@pytest.mark.usefixtures("two")
def test_a_large_model_is_checked_on_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_load, "N_SMALL", 5)
    with one_if_small(nn.Linear(2, 2)):  # 6 weights
        assert torch.get_num_threads() == 2
