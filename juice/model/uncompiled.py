"""A compiled model, run as it was written.

`torch.compile` traces hooks that are there at its first call and silently ignores those that come
later; and every new set of rows, joins and leaves would be compiled anew. So a forward of ours runs
the modules themselves, whether somebody compiled them before the model was loaded or after; what
they compiled is theirs again behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


@contextmanager
def uncompiled(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put what was compiled in place, a module's call or its forward, back to what it was, while within."""
    compiled = [
        (module.__dict__, name, module.__dict__[name], plain)
        for module in modules
        for name in ("_compiled_call_impl", "forward")
        if (plain := getattr(module.__dict__.get(name), "_torchdynamo_orig_callable", None))
        is not None
    ]
    for own, name, _, plain in compiled:
        own[name] = plain
    try:
        yield
    finally:
        for own, name, before, _ in compiled:
            own[name] = before
