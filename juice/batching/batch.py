"""What each row gets in a forward: tokens, positions, slots, and the layers it goes through.

Rows are padded on the right: token t of a row has position n_cached + t, and the keys of padding go
where nothing reads them. The rows of a batch stay the same while the same generations decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from juice.batching.generation import Generation
from juice.batching.rows import RowTable
from juice.batching.slot_layer import Access, Span
from juice.batching.slots import SlotCache
from juice.model.row_routing import LayerRows
from juice.model.steering_hooks import SteeringPlan


@dataclass(frozen=True, eq=False)
class ForwardRows:
    """The rows of a forward.

    Args:
        cache: The slots that they are in.
        generations: The generations that the main rows belong to, in row order.
        routing: The rows of each layer.
        access: The slots of each layer.
        steering_plan: What steers the rows, at all tokens; None where nothing does.
    """

    cache: SlotCache
    generations: tuple[Generation, ...]
    routing: tuple[LayerRows, ...]
    access: tuple[Access, ...]
    steering_plan: SteeringPlan | None


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """One forward.

    Args:
        rows: The rows that go through it.
        n_tokens: How many of each generation's tokens are real; the rest is padding.
        input_ids: The tokens of the main rows, int64 [generations, tokens].
        positions: Their positions, int64 [generations, tokens].
        kept_rows: The row of each position whose logits are kept, int64 [kept].
        kept_tokens: Its token within that row, int64 [kept].
        n_kept: How many logits each generation keeps, in the order of the generations.
        spans: The span of each layer.
        steering_plan: What steers the rows, and at which tokens; None where nothing does.
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
    generations: Sequence[Generation],
    table: RowTable,
    cache: SlotCache,
    n_heads: Sequence[int],
    device: torch.device,
    *,
    as_copies: bool = False,
) -> ForwardRows:
    """Arrange the rows of some generations, in the order of their slots.

    Args:
        generations: The generations to run.
        table: The rows that they occupy.
        cache: The cache that holds their slots.
        n_heads: The query heads of each layer.
        device: Where the index tensors go.
        as_copies: Read keys and values as copies, whose strides do not depend on the slots'.
    """
    inside = set(generations)
    # The newest main row has the lowest slot.
    mains = [(place, s) for place, s in reversed(list(enumerate(table.mains.rows))) if s in inside]
    places, ordered = [place for place, _ in mains], tuple(s for _, s in mains)
    companions = [
        [(place, s) for place, s in enumerate(lane.rows) if s in inside]
        for lane in table.companions
    ]
    access: list[Access] = []
    for layer, own in enumerate(companions):
        is_same = layer > 0 and own == companions[layer - 1]
        if is_same:
            access.append(access[-1])
            continue
        slots = cache.access(layer, places, [place for place, _ in own], device)
        access.append(replace(slots, view=None) if as_copies else slots)
    by_layer = [tuple(s for _, s in own) for own in companions]
    return ForwardRows(
        cache,
        ordered,
        _routing(ordered, by_layer, device),
        tuple(access),
        _steering_plan(ordered, by_layer, n_heads, device),
    )


def forward_batch(
    rows: ForwardRows,
    n_tokens: Sequence[int],
    device: torch.device,
    *,
    reach: int | None = None,
) -> ForwardBatch:
    """Build the forward of the next tokens of some generations.

    Args:
        rows: The rows of these generations.
        n_tokens: How many tokens each generation gets.
        device: Where the tensors go.
        reach: A position that the forward must reach: where no token does, one of padding is added.
    """
    pending = [s.pending(n) for s, n in zip(rows.generations, n_tokens, strict=True)]
    width = max(map(len, pending))
    nowhere = rows.cache.n_positions  # the position of a slot that takes what padding writes
    # Padding repeats the last token at the last position: what it computes is finite if the row is.
    input_ids = torch.tensor(
        [[*tokens, *[tokens[-1]] * (width - len(tokens))] for tokens in pending]
    )
    starts = torch.tensor([s.n_cached for s in rows.generations])
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
        n if s.request.prompt_logprobs and s.is_prefilling else 1
        for s, n in zip(rows.generations, map(len, pending), strict=True)
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
    """Return what steers the rows at these positions."""
    firsts = torch.tensor([s.request.steering.first_position for s in rows.generations])
    steered = positions >= firsts[:, None]
    if rows.steering_plan is None or bool(steered.all()):
        return rows.steering_plan
    return replace(rows.steering_plan, tokens=steered.to(device))


def _spans(
    rows: ForwardRows, writes: torch.Tensor, n_keys: int, *, is_fresh: bool
) -> tuple[Span, ...]:
    spans: list[Span] = []
    for layer, here in enumerate(rows.routing):
        if layer and here.origins is rows.routing[layer - 1].origins:
            spans.append(spans[-1])
        else:
            spans.append(
                Span(writes if here.origins is None else writes[here.origins], n_keys, is_fresh)
            )
    return tuple(spans)


def _routing(
    mains: tuple[Generation, ...],
    companions: Sequence[tuple[Generation, ...]],
    device: torch.device,
) -> tuple[LayerRows, ...]:
    n, below = len(mains), tuple[Generation, ...]()
    row_of = {generation: row for row, generation in enumerate(mains)}
    routing: list[LayerRows] = []
    for here in companions:
        if here == below:
            # The rows are those of the layer below, and so are their tensors.
            routing.append(LayerRows(None, routing[-1].origins if routing else None))
            continue
        place = {generation: n + i for i, generation in enumerate(below)}
        taken = [*range(n), *(place.get(generation, row_of[generation]) for generation in here)]
        origins = [*range(n), *(row_of[generation] for generation in here)] if here else None
        routing.append(
            LayerRows(
                torch.tensor(taken, device=device),
                None if origins is None else torch.tensor(origins, device=device),
            )
        )
        below = here
    return tuple(routing)


def _steering_plan(
    mains: tuple[Generation, ...],
    companions: Sequence[tuple[Generation, ...]],
    n_heads: Sequence[int],
    device: torch.device,
) -> SteeringPlan | None:
    """Return each row's source and coefficients by layer.

    A row without a companion in a layer is its own source there.
    """
    steered = sorted(
        {layer for generation in mains for layer in generation.request.steering.coefficients}
    )
    sources, coefficients = {}, {}
    n = len(mains)
    for layer in steered:
        place = {generation: n + i for i, generation in enumerate(companions[layer])}
        table = torch.zeros(n + len(place), n_heads[layer])
        for row, generation in enumerate(mains):
            own = generation.request.steering.coefficients.get(layer)
            if own is not None:
                table[row] = own[: n_heads[layer]]
        source = [*(place.get(s, row) for row, s in enumerate(mains)), *range(n, n + len(place))]
        sources[layer], coefficients[layer] = torch.tensor(source, device=device), table.to(device)
    return SteeringPlan(sources, coefficients) if steered else None
