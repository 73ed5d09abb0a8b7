"""Logits only where they are needed: the vocabulary projection sees one position a row.

A vocabulary has up to 256,000 entries: projecting every position of a prompt would cost more than
the rest of its prefill. A permanent pre-hook on the projection gathers the positions that the
current forward needs, and only those become logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import nn

from juice.model.layout import Layout


class _Here(local):
    """The positions that one thread keeps, each with its row, and the positions of a row."""

    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    length = 0


class LogitPositions:
    """The hook of one model; within `keep` the logits are [rows kept, 1, vocabulary]."""

    def __init__(self, layout: Layout) -> None:
        self._here = _Here()
        self.handles = [layout.output.register_forward_pre_hook(self._gather)]

    @contextmanager
    def keep(self, rows: torch.Tensor, positions: torch.Tensor, length: int) -> Iterator[None]:
        """Project only position `positions[i]` of row `rows[i]`, both int64 [kept].

        This is for the forwards of this thread. `length` is the number of positions that each row
        of the batch has.
        """
        here = self._here
        here.kept, here.length = (rows, positions), length
        try:
            yield
        finally:
            here.kept = None

    def _gather(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._here.kept is None:
            return None
        rows, positions = self._here.kept
        hidden = args[0]
        # Probes add rows to those that the model was called with, and some models restore the
        # shape of the call.
        by_row = hidden.reshape(-1, self._here.length, hidden.shape[-1])
        return (by_row[rows.to(by_row.device), positions.to(by_row.device)].unsqueeze(1), *args[1:])
