"""Hooks on modules that are there for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Register hooks, which are removed at the end."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield
