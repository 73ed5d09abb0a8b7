"""What a forward says of each of its generations: scores of the prompt, and the next token.

Everything is computed for all rows at once on the model's device, and read in one transfer: in it
the host waits for the device, nowhere else in a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

import torch

from juice.batching.batch import ForwardBatch
from juice.batching.sampling import Draw, choose, on_device
from juice.engine import ScoredToken


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a forward says of one generation.

    Args:
        is_finite: Whether its logits are numbers.
        prompt: The tokens of its prompt that were scored.
        token: The next token; None while its prompt, or that of its other row, goes on.
        watched: The log-probabilities of the tokens that it watches, with its first token.
    """

    is_finite: bool
    prompt: tuple[ScoredToken, ...] = ()
    token: ScoredToken | None = None
    watched: tuple[float, ...] = ()


class _Place(NamedTuple):
    """A token whose score is read from a row of the logits.

    `token` is None for the one that is chosen there; `watch` are more tokens to read.
    """

    row: int
    token: int | None
    n_top: int
    watch: tuple[int, ...] = ()


def outcomes(batch: ForwardBatch, logits: torch.Tensor) -> list[Outcome]:
    """Return what a forward says of its generations, in their order.

    logits: float32 [kept, vocabulary].
    """
    ends = list(accumulate(batch.n_kept))
    combined, places, draws = list[torch.Tensor](), list[list[_Place]](), list[Draw]()
    for own, n_new, n, end in zip(
        batch.rows.generations, batch.n_tokens, batch.n_kept, ends, strict=True
    ):
        n_top = min(own.request.top_logprobs, logits.shape[-1])
        scored = own.to_score(n)
        places.append([_Place(end - n + i, token, n_top) for i, token in enumerate(scored)])
        if own.n_cached + n_new < own.length:
            continue  # its prompt goes on
        row = end - 1
        if own.owner.without is not None:
            both = own.owner.contrasted(own, logits[row])
            if both is None:
                continue
            row = len(logits) + len(combined)
            combined.append(both)
        draws.append(own.owner.draw())
        places[-1].append(_Place(row, None, n_top, own.owner.to_watch))
    table = torch.cat([logits, torch.stack(combined)]) if combined else logits
    normalizers, read = _read(table, [place for own in places for place in own], draws)
    results = iter(read)
    return [
        _outcome(
            [*range(end - n, end), *(place.row for place in own)],
            normalizers,
            [(place, *next(results)) for place in own],
        )
        for n, end, own in zip(batch.n_kept, ends, places, strict=True)
    ]


def _outcome(
    rows: Sequence[int],
    normalizers: Sequence[float],
    read: Sequence[tuple[_Place, ScoredToken, tuple[float, ...]]],
) -> Outcome:
    # A logsumexp is finite unless a logit is NaN or +inf; one of -inf is allowed.
    newest = [(token, watched) for place, token, watched in read if place.token is None]
    token, watched = newest[0] if newest else (None, ())
    return Outcome(
        is_finite=all(math.isfinite(normalizers[row]) for row in rows),
        prompt=tuple(token for place, token, _ in read if place.token is not None),
        token=token,
        watched=watched,
    )


def _read(
    table: torch.Tensor, places: Sequence[_Place], draws: Sequence[Draw]
) -> tuple[list[float], list[tuple[ScoredToken, tuple[float, ...]]]]:
    """Choose where a token is to be chosen, and read all scores in one transfer.

    Args:
        table: float32 [rows, vocabulary].
        places: What to read.
        draws: For each place without a token, what its choice depends on.

    Returns:
        The logsumexp of each row, and for each place its scored token and what else it watches.
    """
    open_places = [i for i, place in enumerate(places) if place.token is None]
    asking = [i for i, place in enumerate(places) if place.n_top]
    n_top = max((place.n_top for place in places), default=0)
    rows = on_device(table, [place.row for place in places])
    tokens = on_device(table, [place.token or 0 for place in places])
    if draws:
        chosen = [places[i].row for i in open_places]
        newest = table if chosen == list(range(len(table))) else table[on_device(table, chosen)]
        tokens = tokens.index_copy(0, on_device(table, open_places), choose(newest, draws))
    best, ids = table[:0], tokens[:0]
    if asking:
        best, ids = table[rows[on_device(table, asking)]].topk(n_top)
    watched = [table[own.row, on_device(table, own.watch)] for own in places if own.watch]
    numbers = torch.cat([table.logsumexp(-1), table[rows, tokens], best.flatten(), *watched])
    # Numbers and tokens travel together, bit by bit.
    packed = [numbers.view(torch.int32), tokens.int(), ids.flatten().int()]
    read = torch.cat(packed).cpu()
    values, found = read[: len(numbers)].view(torch.float32).tolist(), read[len(numbers) :].tolist()
    normalizers, scores = values[: len(table)], iter(values[len(table) :])
    logits = list(islice(scores, len(places)))
    top_logits, found_ids = list(islice(scores, len(asking) * n_top)), found[len(places) :]
    scored = list[tuple[ScoredToken, tuple[float, ...]]]()
    n_asked = 0
    for i, place in enumerate(places):
        normalizer, top = normalizers[place.row], range(n_asked, n_asked + place.n_top)
        n_asked += n_top if place.n_top else 0
        alternatives = tuple((found_ids[j], top_logits[j] - normalizer) for j in top)
        token = ScoredToken(found[i], logits[i] - normalizer, alternatives)
        scored.append((token, tuple(next(scores) - normalizer for _ in place.watch)))
    return normalizers, scored
