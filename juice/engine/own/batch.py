"""A forward of our engine: rows in, logits out; the runs of every request share it.

What `arrange` says of rows and slots stays the same while the same sequences decode;
`forward_batch` adds the next tokens, and `Runner` runs them through the model. Rows are padded on
the right: token t of a row has position n_cached + t, and the keys of padding go where nothing
reads them.
"""

from __future__ import annotations

import time
from collections import abc
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from juice.engine.own.cache import Access, SlotCache, Span
from juice.engine.own.rows import Shelf
from juice.engine.own.sequence import Sequence
from juice.model.loaded import LoadedModel
from juice.model.masks import narrow_sliding_windows
from juice.model.steering_hooks import LayerRows, SteeringPlan


@dataclass(frozen=True, eq=False)
class ForwardRows:
    """The rows of a forward, whose main rows are those of the sequences, in this order.

    Rows (`routing`) and slots (`access`) are given by layer; without a plan no row is steered.
    """

    cache: SlotCache
    sequences: tuple[Sequence, ...]
    routing: tuple[LayerRows, ...]
    access: tuple[Access, ...]
    steering_plan: SteeringPlan | None


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """One forward: the next tokens of some rows.

    `n_tokens` are each sequence's real ones, the rest is padding; `n_kept` says of how many the
    logits are kept, and `kept_rows` and `kept_tokens` where they are, int64 [kept]. Tokens and
    positions of the main rows are int64 [sequences, tokens]; spans are given by layer.
    """

    rows: ForwardRows
    n_tokens: tuple[int, ...]
    input_ids: torch.Tensor
    positions: torch.Tensor
    kept_rows: torch.Tensor
    kept_tokens: torch.Tensor
    n_kept: tuple[int, ...]
    spans: tuple[Span, ...]
    steering_plan: SteeringPlan | None


def arrange(
    sequences: abc.Sequence[Sequence],
    shelf: Shelf,
    loaded: LoadedModel,
    *,
    as_copies: bool = False,
) -> ForwardRows:
    """Arrange the rows of sequences on a shelf, in the order of their slots.

    `as_copies` reads keys and values as copies, whose strides do not depend on the slots'.
    """
    inside, table, device = set(sequences), shelf.table, loaded.device
    # The newest main row has the lowest slot.
    mains = [(index, s) for index, s in reversed(list(enumerate(table.mains.rows))) if s in inside]
    main_indices, ordered = [index for index, _ in mains], tuple(s for _, s in mains)
    companions = [
        [(index, s) for index, s in enumerate(row_list.rows) if s in inside]
        for row_list in table.companions
    ]
    access: list[Access] = []
    for layer, members in enumerate(companions):
        if layer > 0 and members == companions[layer - 1]:
            access.append(access[-1])
            continue
        slots = shelf.cache.access(layer, main_indices, [index for index, _ in members], device)
        access.append(replace(slots, view=None) if as_copies else slots)
    by_layer = [tuple(s for _, s in members) for members in companions]
    n_heads = [layer.n_heads for layer in loaded.layout.layers]
    return ForwardRows(
        shelf.cache,
        ordered,
        _routing(ordered, by_layer, device),
        tuple(access),
        _steering_plan(ordered, by_layer, n_heads, device),
    )


def forward_batch(
    rows: ForwardRows,
    n_tokens: abc.Sequence[int],
    device: torch.device,
    *,
    reach: int | None = None,
) -> ForwardBatch:
    """Build the forward of the next `n_tokens` of each sequence.

    It must reach the position `reach`: where no token does, one of padding is added.
    """
    pending = [s.pending(n) for s, n in zip(rows.sequences, n_tokens, strict=True)]
    width = max(map(len, pending))
    nowhere = rows.cache.n_positions  # the position of a slot that takes what padding writes
    # Padding repeats the last token at the last position: what it computes is finite if the row is.
    input_ids = torch.tensor(
        [[*tokens, *[tokens[-1]] * (width - len(tokens))] for tokens in pending]
    )
    starts = torch.tensor([s.n_cached for s in rows.sequences])
    lengths = torch.tensor([len(tokens) for tokens in pending])
    steps = torch.arange(width)
    positions = starts[:, None] + torch.minimum(steps, lengths[:, None] - 1)
    writes = positions.masked_fill(steps >= lengths[:, None], nowhere)
    if reach is not None and int(positions.max()) < reach:
        input_ids = torch.cat([input_ids, input_ids[:, -1:]], 1)
        positions = torch.cat([positions, torch.full_like(positions[:, -1:], reach)], 1)
        writes = torch.cat([writes, torch.full_like(writes[:, -1:], nowhere)], 1)
        width += 1
    n_keys = int((starts + lengths).max())
    is_fresh = not starts.any()
    n_kept = [
        n if s.request.options.prompt_logprobs and s.is_prefilling else 1
        for s, n in zip(rows.sequences, map(len, pending), strict=True)
    ]
    kept = [
        (row, t)
        for row, (n, length) in enumerate(zip(n_kept, map(len, pending), strict=True))
        for t in range(length - n, length)
    ]
    kept_rows, kept_tokens = torch.tensor(kept, device=device).T
    return ForwardBatch(
        rows=rows,
        n_tokens=tuple(map(len, pending)),
        input_ids=input_ids.to(device),
        positions=positions.to(device),
        kept_rows=kept_rows,
        kept_tokens=kept_tokens,
        n_kept=tuple(n_kept),
        spans=_spans(rows, writes.to(device), width if is_fresh else n_keys, is_fresh=is_fresh),
        steering_plan=_at_tokens(rows, positions, device),
    )


def _at_tokens(
    rows: ForwardRows, positions: torch.Tensor, device: torch.device
) -> SteeringPlan | None:
    """Return the steering of the rows at these positions, int64 [sequences, tokens]."""
    requests = [sequence.request for sequence in rows.sequences]
    if rows.steering_plan is None or all(r.steering.is_constant for r in requests):
        return rows.steering_plan
    pairs = zip(requests, positions, strict=True)
    factors = torch.stack([r.steering.factors(at, len(r.prompt_ids)) for r, at in pairs])
    if bool((factors == 1).all()):
        return rows.steering_plan
    return replace(rows.steering_plan, factors=factors.to(device))


def _spans(
    rows: ForwardRows, writes: torch.Tensor, n_keys: int, *, is_fresh: bool
) -> tuple[Span, ...]:
    """Return the span of each layer; writes: int64 [sequences, tokens]."""
    spans: list[Span] = []
    for layer, here in enumerate(rows.routing):
        if layer and here.origins is rows.routing[layer - 1].origins:
            spans.append(spans[-1])
            continue
        writes_here = writes if here.origins is None else writes[here.origins]
        spans.append(Span(writes_here, n_keys, is_fresh))
    return tuple(spans)


def _routing(
    mains: tuple[Sequence, ...],
    companions: abc.Sequence[tuple[Sequence, ...]],
    device: torch.device,
) -> tuple[LayerRows, ...]:
    n, below = len(mains), tuple[Sequence, ...]()
    row_of = {sequence: row for row, sequence in enumerate(mains)}
    routing: list[LayerRows] = []
    for here in companions:
        if here == below:
            # The rows are those of the layer below, and so are their tensors.
            routing.append(LayerRows(None, routing[-1].origins if routing else None))
            continue
        companion_row = {sequence: n + i for i, sequence in enumerate(below)}
        taken = [*range(n), *(companion_row.get(sequence, row_of[sequence]) for sequence in here)]
        origins = [*range(n), *(row_of[sequence] for sequence in here)] if here else None
        routing.append(
            LayerRows(
                torch.tensor(taken, device=device),
                None if origins is None else torch.tensor(origins, device=device),
            )
        )
        below = here
    return tuple(routing)


def _steering_plan(
    mains: tuple[Sequence, ...],
    companions: abc.Sequence[tuple[Sequence, ...]],
    n_heads: abc.Sequence[int],
    device: torch.device,
) -> SteeringPlan | None:
    """Return the plan; a row without a companion in a layer is its own source there."""
    by_row = [sequence.request.steering.coefficients for sequence in mains]
    sources, coefficients = {}, {}
    n = len(mains)
    for layer in sorted({layer for by_layer in by_row for layer in by_layer}):
        companion_row = {sequence: n + i for i, sequence in enumerate(companions[layer])}
        table = torch.zeros(n + len(companion_row), n_heads[layer])
        for row, by_layer in enumerate(by_row):
            if layer in by_layer:
                table[row] = by_layer[layer][: n_heads[layer]]
        source = [
            *(companion_row.get(s, row) for row, s in enumerate(mains)),
            *range(n, n + len(companion_row)),
        ]
        sources[layer], coefficients[layer] = torch.tensor(source, device=device), table.to(device)
    return SteeringPlan(sources, coefficients) if sources else None


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The way that rows must take through a model, as the check at load finds out.

    Args:
        full_rows: All layers must see the same rows, so companions go through every layer.
        own_masks: The model makes its own masks: only rows with equal `n_cached` share a forward.
        sliding_window: For the check: replaces the size of every sliding window, in tokens.
    """

    full_rows: bool = False
    own_masks: bool = False
    sliding_window: int | None = None

    def in_words(self) -> str:
        """Return what it asks of batches."""
        demands = {"rows of one length": self.own_masks, "clean runs in full rows": self.full_rows}
        return " and ".join(words for words, asked in demands.items() if asked)


class Runner:
    """Runs batches of rows through one model.

    With full rows the model is called with every row, companions included; otherwise with the main
    rows alone, and companions enter and leave between its layers. `beat` is the time of its last
    sign of life, which every layer gives: a whole forward may take minutes.
    """

    def __init__(self, loaded: LoadedModel, mode: Mode) -> None:
        self.beat = time.monotonic()
        self._mode = mode
        self._pattern = None if mode.own_masks else loaded.mask_pattern
        if mode.sliding_window is not None and self._pattern is not None:
            self._pattern = self._pattern.narrowed(mode.sliding_window)
        self._loaded = loaded

    def get_on(self) -> None:
        """Move the heartbeat."""
        self.beat = time.monotonic()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a batch and cache its keys and values; return logits, float32 [kept, vocabulary]."""
        loaded, n, cache = self._loaded, len(batch.input_ids), batch.rows.cache
        for layer, access, span in zip(
            cache.slot_layers, batch.rows.access, batch.spans, strict=True
        ):
            layer.access, layer.span = access, span
        input_ids, positions = batch.input_ids, batch.positions
        # With full rows every layer has the same ones.
        if self._mode.full_rows and (origins := batch.rows.routing[0].origins) is not None:
            input_ids, positions = input_ids[origins], positions[origins]
        pattern, masks = self._pattern, None
        if pattern and not (batch.spans[0].is_fresh and pattern.is_causal_alone):
            masks = pattern.masks(positions, batch.spans[0].n_keys, loaded.dtype)
        with ExitStack() as stack:
            stack.enter_context(loaded.turn)
            stack.enter_context(loaded.hooks.at_layers(self.get_on))
            stack.enter_context(narrow_sliding_windows(loaded.model, self._mode.sliding_window))
            if not self._mode.full_rows:
                stack.enter_context(loaded.hooks.route(batch.rows.routing, n))
            if batch.steering_plan is not None:
                stack.enter_context(loaded.hooks.steer(batch.steering_plan))
            kept = batch.kept_rows, batch.kept_tokens
            stack.enter_context(loaded.hooks.keep_logits(*kept, batch.input_ids.shape[1]))
            logits: torch.Tensor = loaded.run(
                input_ids=input_ids,
                position_ids=positions,
                attention_mask=masks,
                past_key_values=cache,
                use_cache=True,
            ).logits
        return logits[:, 0].float()
