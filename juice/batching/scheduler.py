"""Which waiting requests join, and how much of whose prompt is prefilled next.

Requests join in the order of arrival, each when its rows, with all positions that it may need, fit
into the memory for keys and values next to what runs; what has joined is never evicted. Between two
decode steps a bounded number of padded prompt tokens is prefilled, so a long prompt holds up the
others for at most one chunk.

Rows share a forward unless the model forbids it: where it makes its own masks, all must have the
same number of tokens cached, and where its positions change with length (`rope_switch`), all must
be on the same side of the switch. A row that crosses it is computed again as a whole, alone, one
such row a step: that may hold up the others for longer than a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from juice.batching.generation import Generation
from juice.batching.room import Room
from juice.batching.rows import RowTable
from juice.batching.slots import SlotCache
from juice.engine import Limits

# Scoring a prompt keeps a whole vocabulary of logits for each token, so only a few go at a time.
MAX_SCORED_CHUNK = 256


class Scheduler:
    """The policy.

    Args:
        limits: The bounds in force.
        table: The occupied rows.
        cache: The slots.
        rope_switch: The length beyond which the model's positions change; None where they do not.
        by_length: Whether only rows with the same number of cached tokens share a forward.
    """

    def __init__(
        self,
        limits: Limits,
        table: RowTable,
        cache: SlotCache,
        *,
        rope_switch: int | None,
        by_length: bool,
    ) -> None:
        self.limits = limits
        self._table = table
        self._cache = cache
        self._rope_switch = rope_switch
        self._by_length = by_length

    def room_with(self, generation: Generation) -> Room | None:
        """Return the room needed if a generation joins now; None if it must wait."""
        running = [*self._table.mains.rows, *generation.rows]
        if sum(row.owner is row for row in running) > self.limits.max_batch:
            return None
        window = generation.window
        room = Room(
            len(running),
            tuple(
                len(lane.rows) + (layer in window)
                for layer, lane in enumerate(self._table.companions)
            ),
            max(s.request.n_positions for s in running),
        )
        return room if self._cache.fits(room) else None

    def forwards(self) -> list[list[tuple[Generation, int]]]:
        """Return the forwards of a step: prefill first, then all that decode.

        Each is a list of generations with how many of their tokens go through.
        """
        # A row that is a token ahead waits for the other row of its request, computed again.
        decoding = [s for s in self._table.decoding if s.n_cached < s.length]
        crossing = [s for s in decoding if s.n_cached == self._rope_switch]
        for generation in crossing[:1]:
            generation.n_cached = 0  # its next token changes all its keys
        again = [[(s, s.length)] for s in crossing[:1]]
        return [
            *self._apart(self._chunks()),
            *self._apart([(s, 1) for s in decoding if s not in crossing]),
            *again,
        ]

    def reach(self, generations: Sequence[Generation]) -> int | None:
        """Return the position that a forward of these generations must reach; None for any.

        Beyond `rope_switch` the model picks its frequencies by the highest position in the forward.
        """
        return (
            self._rope_switch
            if self._rope_switch is not None and generations[0].length > self._rope_switch
            else None
        )

    def _apart(self, chosen: list[tuple[Generation, int]]) -> list[list[tuple[Generation, int]]]:
        if not self._by_length and self._rope_switch is None:
            return [chosen] if chosen else []
        groups: dict[object, list[tuple[Generation, int]]] = {}
        for generation, n_tokens in chosen:
            n_cached = generation.n_cached if self._by_length else None
            groups.setdefault((n_cached, self.reach([generation])), []).append(
                (generation, n_tokens)
            )
        return list(groups.values())

    def _chunks(self) -> list[tuple[Generation, int]]:
        """Return the generations to prefill now, oldest first, and how many tokens of each.

        Prompts that fit whole go together; one that does not goes alone, a chunk at a time.
        """
        chosen: list[tuple[Generation, int]] = []
        n_rows, longest, n_scored = 0, 0, 0
        for generation in sorted(
            (s for s in self._table.prefilling if s.is_prefilling), key=lambda s: s.number
        ):
            n_tokens = (
                min(generation.n_to_prefill, MAX_SCORED_CHUNK)
                if generation.request.prompt_logprobs
                else generation.n_to_prefill
            )
            n_rows += generation.n_rows
            longest = max(longest, n_tokens)
            n_scored += n_tokens if generation.request.prompt_logprobs else 0
            if n_rows * longest <= self.limits.max_prefill_tokens and n_scored <= MAX_SCORED_CHUNK:
                chosen.append((generation, n_tokens))
            elif not chosen:
                return [
                    (generation, min(n_tokens, max(1, self.limits.max_prefill_tokens // n_rows)))
                ]
            else:
                break
        return chosen
