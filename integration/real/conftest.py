"""Servers of real models, started once for all tests of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from integration.real.models import fetch
from tests.support.serving import Server, serving

KEPT_IN = Path(os.environ.get("JUICE_TEST_MODELS", Path.home() / ".cache" / "juice" / "models"))


@pytest.fixture(scope="session")
def file_of() -> Callable[[str], Path]:
    """Return what fetches a model's file."""
    return cache(lambda name: fetch(name, KEPT_IN))


@pytest.fixture(scope="session")
def server_of(file_of: Callable[[str], Path]) -> Iterator[Callable[[str], Server]]:
    """Return what serves a model by its name."""
    with ExitStack() as running:

        def serve(name: str) -> Server:
            return running.enter_context(serving("--model", str(file_of(name)), "--threads", "1"))

        yield cache(serve)
