"""Who occupies which row of the batch, and what one forward feeds each row.

A sequence has a main row and, for a dual run, a clean row that holds the same tokens unsteered. Occupied rows are always
0 ... n - 1: a sequence joins at the end, and the last row moves into the place of one that leaves. Rows are right-ragged:
token t of a row has position n_cached + t, and what a shorter row gets beyond its tokens is padding that no query sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from juice.engine.request import Sequence as Generation
from juice.model.steering import SteeringPlan


@dataclass(frozen=True)
class Row:
    """One row of the batch: whose it is, and whether it is the clean one of a dual run."""

    owner: Generation
    is_clean: bool


class RowTable:
    """The occupied rows; `move(source, destination)` is called when a row changes its place."""

    def __init__(self, move: Callable[[int, int], None]) -> None:
        self.rows: list[Row] = []
        self._move = move

    def join(self, sequence: Generation) -> None:
        """Give a sequence its rows, at the end."""
        sequence.row = len(self.rows)
        self.rows.append(Row(sequence, is_clean=False))
        if sequence.request.steering.needs_clean_row:
            sequence.clean_row = len(self.rows)
            self.rows.append(Row(sequence, is_clean=True))

    def leave(self, sequence: Generation) -> None:
        """Free the rows of a sequence; the last rows take their places."""
        if sequence.clean_row is not None:
            self._free(sequence.clean_row)
        self._free(sequence.row)
        sequence.row, sequence.clean_row = -1, None

    def _free(self, place: int) -> None:
        last = len(self.rows) - 1
        moved = self.rows.pop()
        if place == last:
            return
        self._move(last, place)
        self.rows[place] = moved
        if moved.is_clean:
            moved.owner.clean_row = place
        else:
            moved.owner.row = place


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """One forward over the rows first ... first + n_rows - 1.

    `input_ids` and `positions` are int64 [n_rows, n_tokens]; `sequences[i]` reads its logits at row `output_rows[i]`,
    token `output_tokens[i]` of the batch; `steering` is None where nothing is steered.
    """

    first: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    n_keys: int
    sequences: tuple[Generation, ...]
    output_rows: torch.Tensor
    output_tokens: torch.Tensor
    steering: SteeringPlan | None


def forward_batch(rows: Sequence[Row], first: int, n_heads: Sequence[int], device: torch.device) -> ForwardBatch:
    """Lay out the pending tokens of adjacent rows, the first of which is row `first` of the table."""
    pending = [row.owner.pending for row in rows]
    n_tokens = max(map(len, pending))
    starts = torch.tensor([row.owner.n_cached for row in rows])
    input_ids = torch.tensor([[*tokens, *[0] * (n_tokens - len(tokens))] for tokens in pending])
    positions = starts[:, None] + torch.arange(n_tokens)
    main = [i for i, row in enumerate(rows) if not row.is_clean]
    return ForwardBatch(
        first=first,
        input_ids=input_ids.to(device),
        positions=positions.to(device),
        n_keys=int(positions.max()) + 1,
        sequences=tuple(rows[i].owner for i in main),
        output_rows=torch.tensor(main, device=device),
        output_tokens=torch.tensor([len(pending[i]) - 1 for i in main], device=device),
        steering=_steering_plan(rows, first, n_heads, device),
    )


def _steering_plan(rows: Sequence[Row], first: int, n_heads: Sequence[int], device: torch.device) -> SteeringPlan | None:
    """Return each row's source and coefficients; a row that is not steered is its own source with coefficients of zero."""
    source = list(range(len(rows)))
    coefficients: dict[int, torch.Tensor] = {}
    for i, row in enumerate(rows):
        if row.is_clean:
            continue
        if row.owner.clean_row is not None:
            source[i] = row.owner.clean_row - first
        for layer, values in row.owner.request.steering.coefficients.items():
            table = coefficients.setdefault(layer, torch.zeros(len(rows), n_heads[layer]))
            table[i] = values[: n_heads[layer]]
    if not coefficients:
        return None
    return SteeringPlan(torch.tensor(source, device=device), {layer: table.to(device) for layer, table in coefficients.items()})
