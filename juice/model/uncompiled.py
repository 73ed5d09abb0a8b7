"""A compiled model, run uncompiled.

`torch.compile` traces the hooks that exist at its first call and silently ignores later ones; and
every new set of rows that join and leave would be compiled again. So our forwards run the modules
themselves, whether they were compiled before the model was loaded or after, and restore the
compiled code afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


@contextmanager
def uncompiled(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Replace every compiled call or forward of these modules by the original, while within."""
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
