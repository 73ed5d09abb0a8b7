"""What a forward costs, in the time of one token that attends to nothing.

A token goes through the weights once, and attends to every key before it:

    cost of n tokens after s cached ones = n + n (s + n / 2) / keys_per_token

with keys_per_token the number of keys to which attending costs as much as all products with
weights: a product with P weights takes 2 P operations, the attention to a key 4 for every number in
z. A forward pads its rows to the longest, so rows of different lengths go apart where that is
cheaper. A decode step is bound by memory instead: it reads all weights once, and the keys of every
row, as many as the longest has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from juice.batching.generation import Generation
from juice.model.loaded import LoadedModel

# A generation, and how many of its next tokens go through the model.
Share = tuple[Generation, int]
# Below so many tokens, reading the weights takes longer than computing with them.
TOKENS_PER_FORWARD = 64


@dataclass(frozen=True)
class Costs:
    """The costs of one model.

    Args:
        keys_per_token: The keys to which attending costs as much as a token's other products.
        keys_per_forward: The keys and values that are read in the time of reading all weights.
        n_layers: The number of layers.
    """

    keys_per_token: float
    keys_per_forward: float
    n_layers: int

    @classmethod
    def of(cls, loaded: LoadedModel, n_kv_bytes_per_token: int) -> Costs:
        """Return the costs of a model whose keys and values take so many bytes a token."""
        layers = loaded.layout.layers
        n_weights = sum(own.numel() for own in loaded.model.parameters())
        n_bytes = sum(own.numel() * own.element_size() for own in loaded.model.parameters())
        width = sum(layer.n_heads * layer.d_head for layer in layers)
        return cls(max(1.0, n_weights / (2 * width)), n_bytes / n_kv_bytes_per_token, len(layers))

    def of_tokens(self, n_tokens: float, n_cached: int) -> float:
        """Return the cost of the next tokens of one row."""
        return n_tokens * (1 + (n_cached + n_tokens / 2) / self.keys_per_token)

    def n_tokens(self, cost: float, n_cached: int) -> int:
        """Return how many next tokens of one row cost at most this."""
        keys = self.keys_per_token + n_cached
        return int(math.sqrt(keys * keys + 2 * cost * self.keys_per_token) - keys)

    def of_rows(self, generation: Generation) -> float:
        """Return the rows of a generation, its companion counted by the layers that it is in."""
        return 1 + len(generation.window) / self.n_layers

    def prefills(self, chosen: Sequence[Share]) -> list[list[Share]]:
        """Return the forwards in which chunks of prompts cost least, padding included."""

        def cost(n_rows: float, n_tokens: int, n_keys: int) -> float:
            return TOKENS_PER_FORWARD + n_rows * n_tokens * (1 + n_keys / self.keys_per_token)

        return self._cheapest(chosen, cost)[1]

    def decodes(self, chosen: Sequence[Share]) -> list[list[Share]]:
        """Return the forwards in which a decode step costs least.

        Rows that do not go together with all others of their shelf are copied: their keys are read
        twice and written once.
        """

        def apart(n_rows: float, _n_tokens: int, n_keys: int) -> float:
            return self.keys_per_forward + 3 * n_rows * n_keys

        n_rows = sum(self.of_rows(own) for own, _ in chosen)
        together = self.keys_per_forward + n_rows * max(own.n_cached for own, _ in chosen)
        cost, parts = self._cheapest(chosen, apart)
        return parts if cost < together else [list(chosen)]

    def _cheapest(
        self, chosen: Sequence[Share], cost: Callable[[float, int, int], float]
    ) -> tuple[float, list[list[Share]]]:
        """Cut what is chosen, in order of length, where the parts cost least in all."""
        items = sorted(chosen, key=lambda share: share[0].n_cached + share[1])
        # The least cost of the first rows, and where their last part begins.
        best = [(0.0, 0)]
        for end in range(1, len(items) + 1):
            n_rows, n_tokens, found = 0.0, 0, (math.inf, 0)
            n_keys = items[end - 1][0].n_cached + items[end - 1][1]
            for start in reversed(range(end)):
                own, n = items[start]
                n_rows, n_tokens = n_rows + self.of_rows(own), max(n_tokens, n)
                found = min(found, (best[start][0] + cost(n_rows, n_tokens, n_keys), start))
            best.append(found)
        parts, end = list[list[Share]](), len(items)
        while end:
            start = best[end][1]
            parts.append(items[start:end])
            end = start
        return best[-1][0], parts[::-1]


def fair_shares(wanted: Sequence[float], there: float) -> list[float]:
    """Divide what is there equally; what one does not want goes to the others."""
    shares = [0.0] * len(wanted)
    for n_left, i in zip(
        range(len(wanted), 0, -1), sorted(range(len(wanted)), key=lambda i: wanted[i]), strict=True
    ):
        shares[i] = min(wanted[i], there / n_left)
        there -= shares[i]
    return shares
