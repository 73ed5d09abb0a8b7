"""The scheduler: which waiting requests join, and which tokens of which rows share a forward.

Requests join in the order of arrival, each when all positions that it may need fit into the memory
for keys and values next to those that run; a request that has joined is never evicted.

A step has a budget of tokens. Decoding rows take their part, prompts the rest: half of it in equal
shares, so that a short prompt does not wait for a long one, half in the order of arrival, so that
not all finish late. So neither a long prompt nor many hold up the others for longer than a step.

In deterministic mode no request shares a forward with another, and prompts go through in chunks of
one size. So every shape that is computed depends on the request alone, and with it every bit.

Rows share a forward unless the model forbids it: where it makes its own masks, all must have the
same number of tokens cached, and where its positions change with length (`rope_switch`), all must
be on the same side of the switch. A row that crosses it is computed again alone, as a whole where
memory allows, one such row a step: that may hold up the others for longer than a step.

The unit of cost is the time of one token that attends to nothing. A token goes through the weights
once, and attends to every key before it:

    cost of n tokens after s cached ones = n + n (s + n / 2) / keys_per_token

with keys_per_token the number of keys to which attending costs as much as all products with
weights: a product with P weights takes 2 P operations, the attention to a key 4 for every number in
z. A forward pads its rows to the longest, so rows of different lengths go apart where that is
cheaper. A decode step is bound by memory instead: it reads all weights once, and the keys of every
row, as many as the longest has.
"""

from __future__ import annotations

import math
from collections import abc, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition

from juice.engine.load_options import Limits
from juice.engine.own.rows import Shelves
from juice.engine.own.sequence import Sequence
from juice.errors import EngineStoppedError, JuiceError
from juice.model.loaded import LoadedModel

# A sequence, and how many of its next tokens go through the model.
Share = tuple[Sequence, int]
# Below so many tokens, reading the weights takes longer than computing with them.
TOKENS_PER_FORWARD = 64
# Of more rows than these, those of nearly the same length go together at once.
MAX_RUNS = 64
# Beside a GPU, Python launches its kernels for so long a layer (measured on an H100), in which even
# an older one computes and reads this much.
LAUNCH_S, FLOPS, BYTES_PER_S = 1.2e-3, 1e14, 1e12


@dataclass(frozen=True)
class Costs:
    """The costs of one model.

    Args:
        keys_per_token: The keys to which attending costs as much as a token's other products.
        keys_per_forward: The keys and values that are read in the time of reading all weights, and
            of launching a forward on a GPU.
        n_layers: The number of layers.
        tokens_per_forward: The tokens that go through the weights in that time.
    """

    keys_per_token: float
    keys_per_forward: float
    n_layers: int
    tokens_per_forward: float

    @classmethod
    def of(cls, loaded: LoadedModel, n_kv_bytes_per_token: int) -> Costs:
        """Return the costs of a model whose keys and values take so many bytes a token."""
        layers = loaded.layout.layers
        n_weights = loaded.n_weights
        weights = loaded.model.parameters()
        n_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
        width = sum(layer.n_heads * layer.d_head for layer in layers)
        launch_s = 0.0 if loaded.device.type == "cpu" else LAUNCH_S * len(layers)
        return cls(
            keys_per_token=max(1.0, n_weights / (2 * width)),
            keys_per_forward=(n_bytes + launch_s * BYTES_PER_S) / n_kv_bytes_per_token,
            n_layers=len(layers),
            tokens_per_forward=TOKENS_PER_FORWARD + launch_s * FLOPS / (2 * n_weights),
        )

    def of_tokens(self, n_tokens: float, n_cached: int) -> float:
        """Return the cost of the next tokens of one row."""
        return n_tokens * (1 + (n_cached + n_tokens / 2) / self.keys_per_token)

    def n_tokens(self, cost: float, n_cached: int) -> int:
        """Return the number of next tokens of one row that cost at most this."""
        keys = self.keys_per_token + n_cached
        return int(math.sqrt(keys * keys + 2 * cost * self.keys_per_token) - keys)

    def of_rows(self, sequence: Sequence) -> float:
        """Return the rows of a sequence, its companion counted by the layers that it is in."""
        return 1 + len(sequence.window) / self.n_layers

    def prefills(self, chosen: abc.Sequence[Share]) -> list[list[Share]]:
        """Return the forwards in which chunks of prompts cost least, padding included."""

        def cost(n_rows: float, n_tokens: int, n_keys: int) -> float:
            return self.tokens_per_forward + n_rows * n_tokens * (1 + n_keys / self.keys_per_token)

        return self._cheapest(chosen, cost)[1]

    def decodes(self, chosen: abc.Sequence[Share]) -> list[list[Share]]:
        """Return the forwards in which a decode step costs least.

        Rows that do not go together with all others of their shelf are copied: their keys are read
        twice and written once.
        """

        def apart(n_rows: float, _n_tokens: int, n_keys: int) -> float:
            return self.keys_per_forward + 3 * n_rows * n_keys

        n_rows = sum(self.of_rows(sequence) for sequence, _ in chosen)
        together = self.keys_per_forward + n_rows * max(sequence.n_cached for sequence, _ in chosen)
        cost, parts = self._cheapest(chosen, apart)
        return parts if cost < together else [list(chosen)]

    def _cheapest(
        self, chosen: abc.Sequence[Share], cost: Callable[[float, int, int], float]
    ) -> tuple[float, list[list[Share]]]:
        """Cut the chosen sequences, in order of length, where the parts cost least in all."""
        runs = _runs(sorted(chosen, key=_length))
        rows = [sum(self.of_rows(sequence) for sequence, _ in run) for run in runs]
        tokens = [max(n for _, n in run) for run in runs]
        # The least cost of the first runs, and where their last part begins.
        best = [(0.0, 0)]
        for end in range(1, len(runs) + 1):
            n_rows, n_tokens, cheapest = 0.0, 0, (math.inf, 0)
            n_keys = _length(runs[end - 1][-1])
            for start in reversed(range(end)):
                n_rows, n_tokens = n_rows + rows[start], max(n_tokens, tokens[start])
                cheapest = min(cheapest, (best[start][0] + cost(n_rows, n_tokens, n_keys), start))
            best.append(cheapest)
        parts, end = list[list[Share]](), len(runs)
        while end:
            start = best[end][1]
            parts.append([share for run in runs[start:end] for share in run])
            end = start
        return best[-1][0], parts[::-1]


def _length(share: Share) -> int:
    """Return the keys that the last of the tokens attends to."""
    sequence, n_tokens = share
    return sequence.n_cached + n_tokens


def _runs(items: abc.Sequence[Share]) -> list[list[Share]]:
    """Return rows in order of length as runs: each alone, or of many those alike together.

    So the time to part them does not grow with their square. The longest row of a run has at most
    (longest / shortest of all)^(1 / MAX_RUNS) times the length of its shortest.
    """
    if len(items) <= MAX_RUNS:
        return [[item] for item in items]
    ratio = (_length(items[-1]) / _length(items[0])) ** (1 / MAX_RUNS)
    runs, bound = list[list[Share]](), 0.0
    for item in items:
        if _length(item) > bound:
            runs.append([])
            bound = _length(item) * ratio
        runs[-1].append(item)
    return runs


def fair_shares(wanted: abc.Sequence[float], available: float) -> list[float]:
    """Divide an amount equally; the part that one does not want goes to the others."""
    shares = [0.0] * len(wanted)
    for n_left, i in zip(
        range(len(wanted), 0, -1), sorted(range(len(wanted)), key=lambda i: wanted[i]), strict=True
    ):
        shares[i] = min(wanted[i], available / n_left)
        available -= shares[i]
    return shares


class Inbox:
    """The queue of sequences for the engine's thread; for any thread.

    It is neither bounded nor fair: whoever serves several clients sees to that before
    (`juice.engine.queue`).
    """

    def __init__(self) -> None:
        self.closed: JuiceError | None = None
        self._waiting: deque[Sequence] = deque()
        self._changed = Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, sequence: Sequence, *, is_first: bool = False) -> None:
        """Queue a sequence, before the others if `is_first`.

        Raises EngineStoppedError once closed.
        """
        with self._changed:
            if self.closed is not None:
                raise EngineStoppedError(str(self.closed))
            (self._waiting.appendleft if is_first else self._waiting.append)(sequence)
            self._changed.notify_all()

    def first(self) -> Sequence | None:
        """Return the sequence that has waited longest; None where none waits."""
        with self._changed:
            return self._waiting[0] if self._waiting else None

    def take(self, sequence: Sequence) -> None:
        with self._changed:
            self._waiting.remove(sequence)

    def take_cancelled(self) -> list[Sequence]:
        """Take the sequences that were cancelled while they waited."""
        with self._changed:
            cancelled = [sequence for sequence in self._waiting if sequence.cancelled is not None]
            if gone := set(cancelled):  # others may be cancelled meanwhile
                self._waiting = deque(s for s in self._waiting if s not in gone)
            return cancelled

    def wait(self, timeout_s: float) -> bool:
        """Return whether a sequence waits or the inbox is closed, as soon as that is so."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._waiting or self.closed, timeout_s))

    def close(self, reason: JuiceError) -> None:
        """Refuse everything from now on; the first reason is kept."""
        with self._changed:
            self.closed = self.closed or reason
            self._changed.notify_all()

    def take_all(self) -> list[Sequence]:
        with self._changed:
            left = list(self._waiting)
            self._waiting.clear()
            return left


# Scoring a prompt keeps a whole vocabulary of logits for each token, so only a few go at a time.
MAX_SCORED_CHUNK = 256
# The tokens of a prompt's chunk where its size must not depend on what else runs.
FIXED_CHUNK = 256
# However much decodes, this part of a step's budget is for prompts.
PREFILL_SHARE = 0.25


class Scheduler:
    """The policy of the loop: admission, and the forwards of each step.

    With `by_length` only rows with the same number of cached tokens share a forward; beyond
    `rope_switch` tokens the model's positions change.
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
        self.costs = costs
        self._rope_switch = rope_switch
        self._by_length = by_length
        self._deterministic = deterministic
        self._decoded: tuple[list[Sequence], list[list[Share]]] | None = None

    def may_join(self, sequence: Sequence) -> bool:
        """Return whether there are rows and memory for one more sequence."""
        has_rows = self._shelves.n_running < self.limits.max_batch
        return has_rows and self._shelves.fits(sequence)

    def forwards(self) -> list[list[Share]]:
        """Return the forwards of a step: prefill first, then all that decode."""
        # A row that is a token ahead waits for the other row of its request, computed again.
        decoding = [
            s for shelf in self._shelves for s in shelf.table.decoding if s.n_cached < s.length
        ]
        crossing = [s for s in decoding if s.length - 1 == self._rope_switch]
        for sequence in crossing[:1]:
            if not sequence.has_crossed:  # where memory lacked, part of it is computed again
                sequence.n_cached = 0  # its next token changes all its keys
                sequence.has_crossed = True
        again = [[(s, s.length - s.n_cached)] for s in crossing[:1]]
        steps = [s for s in decoding if s not in crossing]
        assert self.limits.max_prefill_tokens is not None, "settled when the model is loaded"
        budget = float(self.limits.max_prefill_tokens)
        left = budget - sum(self._cost(s, 1) for s in steps)
        return [
            *self._apart(self._chunks(max(left, PREFILL_SHARE * budget)), self.costs.prefills),
            *self._steps(steps),
            *again,
        ]

    def reach(self, sequences: abc.Sequence[Sequence]) -> int | None:
        """Return the position that a forward of these sequences must reach; None for any.

        Beyond `rope_switch` the model picks its frequencies by the highest position in the forward.
        """
        switch = self._rope_switch
        return None if switch is None or sequences[0].length <= switch else switch

    def _steps(self, decoding: list[Sequence]) -> list[list[Share]]:
        """Return the forwards in which these decode; they stay the same until a row changes."""
        if self._decoded is None or self._decoded[0] != decoding:
            parts = self._apart([(s, 1) for s in decoding], self.costs.decodes)
            self._decoded = decoding, parts
        return self._decoded[1]

    def _apart(
        self, chosen: list[Share], cheapest: Callable[[list[Share]], list[list[Share]]]
    ) -> list[list[Share]]:
        """Part the chosen sequences by shelf, by the model's limits and by cost."""
        if self._deterministic:
            return [[share] for share in chosen]
        groups: dict[object, list[Share]] = {}
        for sequence, n_tokens in chosen:
            n_cached = sequence.n_cached if self._by_length else None
            key = (id(self._shelves[sequence]), n_cached, self.reach([sequence]))
            groups.setdefault(key, []).append((sequence, n_tokens))
        return [part for group in groups.values() for part in cheapest(group)]

    def _chunks(self, budget: float) -> list[Share]:
        """Return the sequences to prefill now, oldest first, with the number of tokens of each."""
        prefilling = sorted(
            (s for shelf in self._shelves for s in shelf.table.prefilling if s.is_prefilling),
            key=lambda s: s.number,
        )
        if self._deterministic:
            return self.fixed_chunks(prefilling, budget)
        wanted = [self._cost(s, s.n_to_prefill) for s in prefilling]
        shares = fair_shares(wanted, budget / 2)
        budget -= sum(shares)
        chosen, n_scored = list[Share](), 0
        for sequence, n_wanted, share in zip(prefilling, wanted, shares, strict=True):
            more = min(budget, n_wanted - share)
            budget -= more
            n_tokens = self._n_tokens(sequence, share + more)
            if sequence.request.options.prompt_logprobs:
                n_tokens = min(n_tokens, MAX_SCORED_CHUNK - n_scored)
                n_scored += n_tokens
            # The oldest always goes on.
            if n_tokens or not chosen:
                chosen.append((sequence, max(1, n_tokens)))
        return chosen

    def fixed_chunks(self, prefilling: list[Sequence], budget: float) -> list[Share]:
        """Return the sequences whose next chunk goes now, oldest first; the oldest always does."""
        chosen = list[Share]()
        for sequence in prefilling:
            n_tokens = min(FIXED_CHUNK, sequence.n_to_prefill)
            budget -= self._cost(sequence, n_tokens)
            if chosen and budget < 0:
                break
            chosen.append((sequence, n_tokens))
        return chosen

    def _cost(self, sequence: Sequence, n_tokens: int) -> float:
        return self.costs.of_rows(sequence) * self.costs.of_tokens(n_tokens, sequence.n_cached)

    def _n_tokens(self, sequence: Sequence, cost: float) -> int:
        n = self.costs.n_tokens(cost / self.costs.of_rows(sequence), sequence.n_cached)
        return min(n, sequence.n_to_prefill)
