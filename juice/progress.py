"""Progress of long work: the command line shows it, the library stays silent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Advance = Callable[[int], None]
"""Reports that this many more units are done."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Begins a piece of work, given its description and its total in units."""


def silent(_description: str, _total: int) -> AbstractContextManager[Advance]:
    """Report nothing."""
    return nullcontext(lambda _n: None)
