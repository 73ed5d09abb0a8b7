"""Who occupies which row of the batch, layer by layer, and what one forward feeds each row.

A sequence has a main row in every layer. A dual run also has a companion, its clean run, but only in the layers from its
lowest to its highest steered one: below they are the same, above nothing reads it, and with one steered layer z of the
clean run is the main row's own. In every layer the main rows come first, companions follow. A sequence joins
at the end, and the last row moves into the place of one that leaves.

Rows are right-ragged: token t of a row has position n_cached + t, and what a shorter row gets beyond its tokens is padding
that no query sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from juice.engine.request import Sequence as Generation
from juice.model.routing import LayerRows
from juice.model.steering import SteeringPlan


class RowTable:
    """The occupied rows: `mains`, and the `companions` of every layer.

    A row that changes its place is reported: `move_main(source, destination)`, `move_companion(layer, source, destination)`.
    """

    def __init__(self, n_layers: int, move_main: Callable[[int, int], None], move_companion: Callable[[int, int, int], None]) -> None:
        self.mains: list[Generation] = []
        self.companions: list[list[Generation]] = [[] for _ in range(n_layers)]
        self._move_main = move_main
        self._move_companion = move_companion

    @property
    def n_rows(self) -> int:
        """Rows of the widest layer."""
        return len(self.mains) + max(map(len, self.companions), default=0)

    def join(self, sequence: Generation) -> None:
        """Give a sequence its rows, at the end."""
        self.mains.append(sequence)
        for layer in sequence.request.steering.window:
            self.companions[layer].append(sequence)

    def leave(self, sequence: Generation) -> None:
        """Free the rows of a sequence; the last rows take their places."""
        for layer in sequence.request.steering.window:
            _free(self.companions[layer], sequence, partial(self._move_companion, layer))
        _free(self.mains, sequence, self._move_main)

    def clear(self) -> None:
        """Free every row."""
        self.mains.clear()
        for companions in self.companions:
            companions.clear()

    def span(self, first: int, last: int) -> RowSpan:
        """Return the rows of the sequences whose main rows are first ... last - 1, all of which joined one after the other."""
        inside = set(self.mains[first:last])
        starts = [next((i for i, s in enumerate(own) if s in inside), 0) for own in self.companions]
        return RowSpan(first, tuple(reversed(self.mains[first:last])), tuple(
            (start, tuple(s for s in own if s in inside)) for start, own in zip(starts, self.companions, strict=True)
        ))  # fmt: skip


def _free(rows: list[Generation], sequence: Generation, move: Callable[[int, int], None]) -> None:
    place, last = rows.index(sequence), len(rows) - 1
    rows[place] = rows[last]
    rows.pop()
    if place != last:
        move(last, place)


@dataclass(frozen=True)
class RowSpan:
    """Adjacent rows, in the order of the batch.

    Main rows from place `first` on, the newest first as their slots lie; per layer the place of the first companion and the
    companions.
    """

    first: int
    mains: tuple[Generation, ...]
    companions: tuple[tuple[int, tuple[Generation, ...]], ...]


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """One forward over a span of rows.

    `input_ids` and `positions` are int64 [n main rows, n_tokens]; row i reads its logits at token `last_tokens[i]`.
    `routing` and `layer_positions` (int64 [rows of the layer, n_tokens]) say which rows enter each layer, `steering` is None
    where nothing is steered.
    """

    span: RowSpan
    input_ids: torch.Tensor
    positions: torch.Tensor
    n_keys: int
    last_tokens: torch.Tensor
    routing: tuple[LayerRows, ...]
    layer_positions: tuple[torch.Tensor, ...]
    steering: SteeringPlan | None


def forward_batch(span: RowSpan, n_heads: Sequence[int], device: torch.device) -> ForwardBatch:
    """Lay out the pending tokens of a span of rows."""
    pending = [sequence.pending for sequence in span.mains]
    n_tokens = max(map(len, pending))
    starts = torch.tensor([sequence.n_cached for sequence in span.mains])
    input_ids = torch.tensor([[*tokens, *[0] * (n_tokens - len(tokens))] for tokens in pending])
    positions = (starts[:, None] + torch.arange(n_tokens)).to(device)
    routing = _routing(span, device)
    return ForwardBatch(
        span=span,
        input_ids=input_ids.to(device),
        positions=positions,
        n_keys=int(starts.max()) + n_tokens,
        last_tokens=torch.tensor([len(tokens) - 1 for tokens in pending], device=device),
        routing=routing,
        layer_positions=tuple(positions if rows.origins is None else positions[rows.origins] for rows in routing),
        steering=_steering_plan(span, n_heads, device),
    )


def _routing(span: RowSpan, device: torch.device) -> tuple[LayerRows, ...]:
    n, below = len(span.mains), tuple[Generation, ...]()
    row_of = {sequence: row for row, sequence in enumerate(span.mains)}
    routing: list[LayerRows] = []
    for _, here in span.companions:
        if here == below:
            # The same rows go on; their tensors are shared with the layer below.
            routing.append(LayerRows(None, routing[-1].origins if routing else None))
            continue
        place = {sequence: n + i for i, sequence in enumerate(below)}
        taken = [*range(n), *(place.get(sequence, row_of[sequence]) for sequence in here)]
        origins = [*range(n), *(row_of[sequence] for sequence in here)] if here else None
        routing.append(LayerRows(
            torch.tensor(taken, device=device), None if origins is None else torch.tensor(origins, device=device)
        ))  # fmt: skip
        below = here
    return tuple(routing)


def _steering_plan(span: RowSpan, n_heads: Sequence[int], device: torch.device) -> SteeringPlan | None:
    """Return each row's source and coefficients, layer by layer; a row without a companion there is its own source."""
    steered = sorted({layer for sequence in span.mains for layer in sequence.request.steering.coefficients})
    sources, coefficients = {}, {}
    n = len(span.mains)
    for layer in steered:
        companions = span.companions[layer][1]
        place = {sequence: n + i for i, sequence in enumerate(companions)}
        table = torch.zeros(n + len(companions), n_heads[layer])
        for row, sequence in enumerate(span.mains):
            own = sequence.request.steering.coefficients.get(layer)
            if own is not None:
                table[row] = own[: n_heads[layer]]
        source = [*(place.get(s, row) for row, s in enumerate(span.mains)), *range(n, n + len(companions))]
        sources[layer], coefficients[layer] = torch.tensor(source, device=device), table.to(device)
    return SteeringPlan(sources, coefficients) if steered else None
