"""On how many threads the checks at a load run.

An operator of a small model is over before the threads of PyTorch have agreed on its parts; on a
busy machine they wait for one another many times as long as they work. The results are those of
the same operators: what is checked does not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Of more weights than these, a prompt of a few tokens is worth several threads.
N_SMALL = 50_000_000


@contextmanager
def one_if_small(model: nn.Module) -> Iterator[None]:
    """Run operators on one thread while within, if the model is small."""
    n_threads = torch.get_num_threads()
    is_small = sum(own.numel() for own in model.parameters()) <= N_SMALL
    if is_small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if is_small:
            torch.set_num_threads(n_threads)
