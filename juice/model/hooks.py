"""Hooks on modules that are there for a while, for the calls of one thread.

A model may belong to somebody who calls it in another thread while the engine runs; such calls are
not ours to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Let hooks act on the calls of this thread alone; remove them at the end."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
            hooks = handle.hooks_dict_ref()
            assert hooks is not None, "the module has gone, though its layout is held"
            hooks[handle.id] = _in_this_thread(hooks[handle.id])
        yield


def _in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    own = get_ident()

    def act(*args: Any) -> Any:
        return hook(*args) if get_ident() == own else None

    return act
