"""The table by row: what every row of vLLM's persistent batch adds to its z.

At layer l and head h, a token of row r gets

    z <- z + own[r, h] * z + clean[r, h] * z of its companion

with z as it was before. The tensors stay where they are from the start on, and are written in the
order of the stream before a step runs, so graphs that replay whole steps read them.
"""

from __future__ import annotations

import torch

from juice.vllm.arguments import Coefficients

OWN, CLEAN = 0, 1


class Table:
    """The coefficients of the batch's rows, and the row of every token of the step.

    One more row than the batch has, of zeros, is that of padding, and of tokens before the first
    one that is steered.

    Args:
        n_rows: The largest number of requests in a batch.
        n_tokens: The largest number of tokens in a step.
        window: The layers that have companions.
        n_heads: The query heads of a layer, over all ranks.
        device: Where the model runs.
    """

    def __init__(
        self, n_rows: int, n_tokens: int, window: range, n_heads: int, device: torch.device
    ) -> None:
        self.window, self.n_heads, self.n_rows = window, n_heads, n_rows
        # By layer, kind (own or clean), row and head.
        self.coefficients = torch.zeros(
            len(window), 2, n_rows + 1, n_heads, dtype=torch.float32, device=device
        )
        self.row_of_token = torch.full((n_tokens,), n_rows, dtype=torch.int64, device=device)
        self._first = torch.zeros(n_rows + 1, dtype=torch.int64, device=device)
        self._tokens = torch.arange(n_tokens, device=device)
        self.steered = [False] * n_rows

    def write(self, row: int, coefficients: Coefficients | None) -> None:
        """Set the coefficients of a row."""
        self.steered[row] = coefficients is not None
        values = torch.zeros(len(self.window), 2, self.n_heads)
        if coefficients is not None:
            kind = OWN if coefficients.own else CLEAN
            for layer, head, value in coefficients.heads:
                values[self.window.index(layer), kind, head] += value
        self.coefficients[:, :, row] = values.to(self.coefficients.device)
        self._first[row] = 0 if coefficients is None else coefficients.first_position

    def move(self, source: int, destination: int) -> None:
        """Move a row to another place; its own place is then empty."""
        self.coefficients[:, :, destination] = self.coefficients[:, :, source]
        self._first[destination] = self._first[source]
        self.steered[destination] = self.steered[source]
        self.write(source, None)

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        pair, exchanged = [one, other], [other, one]
        self.coefficients[:, :, pair] = self.coefficients[:, :, exchanged]
        self._first[pair] = self._first[exchanged]
        self.steered[one], self.steered[other] = self.steered[other], self.steered[one]

    def clear(self) -> None:
        """Say that the tokens of the step belong to no row."""
        self.row_of_token.fill_(self.n_rows)

    def place(self, starts: torch.Tensor, positions: torch.Tensor) -> None:
        """Say which row every token of the step belongs to; requests are in the order of rows.

        Args:
            starts: Where each request's tokens start, and where the last one's end, int
                [requests + 1].
            positions: The position of each token in its request, int [tokens].
        """
        n = len(positions)
        row = torch.searchsorted(starts[1:], self._tokens[:n].to(starts.dtype), right=True)
        # Graphs may pad the requests too: what is beyond the last one's end belongs to nobody.
        row = torch.where(self._tokens[:n] < starts[-1], row, self.n_rows).clamp(max=self.n_rows)
        steered = positions >= self._first[row]
        self.row_of_token[:n] = torch.where(steered, row, self.n_rows)
