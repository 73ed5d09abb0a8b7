"""Which waiting requests join, and how much of whose prompt is prefilled next.

Requests join in the order of arrival, each when its rows, with all positions that it may need, fit
into the memory for keys and values next to what runs; what has joined is never evicted. One that
must wait for memory lets others go ahead, but not for ever.

A step has a budget of tokens (`juice.batching.costs`). What decodes takes its part, prompts the
rest: half of it in equal shares, so that a short prompt does not wait for a long one, half in the
order of arrival, so that not all finish late. So neither a long prompt nor many hold up what runs
for longer than a step.

In deterministic mode no request shares a forward with another, and prompts go through in chunks of
one size. So every shape that is computed depends on the request alone, and with it every bit.

Rows share a forward unless the model forbids it: where it makes its own masks, all must have the
same number of tokens cached, and where its positions change with length (`rope_switch`), all must
be on the same side of the switch. A row that crosses it is computed again as a whole, alone, one
such row a step: that may hold up the others for longer than a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from juice.batching.costs import Costs, Share, fair_shares
from juice.batching.generation import Generation
from juice.batching.shelves import Shelves
from juice.engine import Limits

# Scoring a prompt keeps a whole vocabulary of logits for each token, so only a few go at a time.
MAX_SCORED_CHUNK = 256
# The tokens of a prompt's chunk where its size must not depend on what else runs.
FIXED_CHUNK = 256
# However much decodes, this part of a step's budget is for prompts.
PREFILL_SHARE = 0.25
# How many requests may go ahead of one that waits for memory, and how many are asked.
MAX_OVERTAKEN, MAX_ASKED = 64, 16


class Scheduler:
    """The policy.

    Args:
        limits: The bounds in force.
        shelves: The occupied rows.
        costs: What forwards cost.
        rope_switch: The length beyond which the model's positions change; None where they do not.
        by_length: Whether only rows with the same number of cached tokens share a forward.
        deterministic: Whether no rows of different requests share a forward.
    """

    def __init__(
        self,
        limits: Limits,
        shelves: Shelves,
        costs: Costs,
        *,
        rope_switch: int | None,
        by_length: bool,
        deterministic: bool = False,
    ) -> None:
        self.limits = limits
        self._shelves = shelves
        self._costs = costs
        self._rope_switch = rope_switch
        self._by_length = by_length
        self._deterministic = deterministic
        self._decoded: tuple[list[Generation], list[list[Share]]] | None = None

    def next_of(self, waiting: Iterable[Generation]) -> Generation | None:
        """Return the request that joins next, of those that wait longest; None if all must wait."""
        if sum(row.owner is row for row in self._shelves.rows) >= self.limits.max_batch:
            return None
        passed = list[Generation]()
        for generation in waiting:
            if self._shelves.fits(generation):
                for own in passed:
                    own.n_overtaken += 1
                return generation
            if generation.n_overtaken >= MAX_OVERTAKEN or len(passed) == MAX_ASKED:
                return None
            passed.append(generation)
        return None

    def forwards(self) -> list[list[Share]]:
        """Return the forwards of a step: prefill first, then all that decode.

        Each is a list of generations with how many of their tokens go through.
        """
        # A row that is a token ahead waits for the other row of its request, computed again.
        decoding = [
            s for shelf in self._shelves for s in shelf.table.decoding if s.n_cached < s.length
        ]
        crossing = [s for s in decoding if s.n_cached == self._rope_switch]
        for generation in crossing[:1]:
            generation.n_cached = 0  # its next token changes all its keys
        again = [[(s, s.length)] for s in crossing[:1]]
        steps = [s for s in decoding if s not in crossing]
        budget = float(self.limits.max_prefill_tokens)
        left = budget - sum(self._cost(s, 1) for s in steps)
        return [
            *self._apart(self._chunks(max(left, PREFILL_SHARE * budget)), self._costs.prefills),
            *self._steps(steps),
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

    def _steps(self, decoding: list[Generation]) -> list[list[Share]]:
        """Return the forwards in which these decode; they stay the same until a row changes."""
        if self._decoded is None or self._decoded[0] != decoding:
            parts = self._apart([(s, 1) for s in decoding], self._costs.decodes)
            self._decoded = decoding, parts
        return self._decoded[1]

    def _apart(
        self, chosen: list[Share], cheapest: Callable[[list[Share]], list[list[Share]]]
    ) -> list[list[Share]]:
        """Return the forwards of what is chosen: by shelf, by what a model allows, by cost."""
        if self._deterministic:
            return [[share] for share in chosen]
        groups: dict[object, list[Share]] = {}
        for generation, n_tokens in chosen:
            n_cached = generation.n_cached if self._by_length else None
            key = (id(self._shelves[generation]), n_cached, self.reach([generation]))
            groups.setdefault(key, []).append((generation, n_tokens))
        return [part for group in groups.values() for part in cheapest(group)]

    def _chunks(self, budget: float) -> list[Share]:
        """Return the generations to prefill now, oldest first, and how many tokens of each."""
        prefilling = sorted(
            (s for shelf in self._shelves for s in shelf.table.prefilling if s.is_prefilling),
            key=lambda s: s.number,
        )
        if self._deterministic:
            return self._fixed_chunks(prefilling, budget)
        wanted = [self._cost(s, s.n_to_prefill) for s in prefilling]
        shares = fair_shares(wanted, budget / 2)
        budget -= sum(shares)
        chosen, n_scored = list[Share](), 0
        for generation, own, share in zip(prefilling, wanted, shares, strict=True):
            more = min(budget, own - share)
            budget -= more
            n_tokens = self._n_tokens(generation, share + more)
            if generation.request.prompt_logprobs:
                n_tokens = min(n_tokens, MAX_SCORED_CHUNK - n_scored)
                n_scored += n_tokens
            # The oldest always goes on.
            if n_tokens or not chosen:
                chosen.append((generation, max(1, n_tokens)))
        return chosen

    def _fixed_chunks(self, prefilling: list[Generation], budget: float) -> list[Share]:
        """Return whose next chunk is prefilled now, oldest first; the oldest always goes on."""
        chosen = list[Share]()
        for generation in prefilling:
            n_tokens = min(FIXED_CHUNK, generation.n_to_prefill)
            budget -= self._cost(generation, n_tokens)
            if chosen and budget < 0:
                break
            chosen.append((generation, n_tokens))
        return chosen

    def _cost(self, generation: Generation, n_tokens: int) -> float:
        return self._costs.of_rows(generation) * self._costs.of_tokens(
            n_tokens, generation.n_cached
        )

    def _n_tokens(self, generation: Generation, cost: float) -> int:
        """Return how many tokens of a prompt cost at most this."""
        n = self._costs.n_tokens(cost / self._costs.of_rows(generation), generation.n_cached)
        return min(n, generation.n_to_prefill)
