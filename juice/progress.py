"""Progress of long work, reported without printing: the command line shows it, the library is silent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Advance = Callable[[int], None]
"""Says that so many more units are done."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Begins a piece of work: its description and its total in units."""


def silent(_description: str, _total: int) -> AbstractContextManager[Advance]:
    """Report nothing."""
    return nullcontext(lambda _n: None)
