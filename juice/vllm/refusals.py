"""Why a model is refused, from vLLM's worker processes to ours: vLLM says only that it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

VARIABLE = "_JUICE_REFUSAL"


@contextmanager
def refusals() -> Iterator[Callable[[], str]]:
    """Let workers that start within say why they refuse a model; yields what returns the reason."""
    with TemporaryDirectory(prefix="juice-") as folder:
        file = Path(folder) / "reason"
        os.environ[VARIABLE] = str(file)
        try:
            yield lambda: file.read_text(encoding="utf-8") if file.exists() else ""
        finally:
            del os.environ[VARIABLE]


@contextmanager
def told() -> Iterator[None]:
    """Pass on the first line of what is raised within, if another process waits for it."""
    try:
        yield
    except Exception as error:
        if file := os.environ.get(VARIABLE):
            Path(file).write_text(str(error).partition("\n")[0], encoding="utf-8")
        raise
