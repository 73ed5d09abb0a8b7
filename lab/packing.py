"""Packing of documents into rows of a fixed length, each document seeing only itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

IGNORED = -100


@dataclass(frozen=True)
class Rows:
    """Packed documents; positions begin anew with each of them, which separates their attention.

    All are [rows, length]; `targets` holds the next token, IGNORED where there is none.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor

    def n_targets(self) -> int:
        """Return the number of tokens to predict."""
        return int((self.targets != IGNORED).sum())


class Packer:
    """Fills rows with whole documents, each in the first row that has room for it."""

    def __init__(self, n_rows: int, length: int) -> None:
        self._length = length
        self._rows: list[list[list[int]]] = [[] for _ in range(n_rows)]

    def add(self, document: list[int]) -> Rows | None:
        """Take a document; return the rows so far where none has room for it.

        A row takes a document's tokens but the last, which is only predicted; none may be longer
        than the rows' length + 1.
        """
        full = None
        row = next(
            (r for r in self._rows if self._used(r) + len(document) - 1 <= self._length), None
        )
        if row is None:
            full = self._tensors()
            self._rows = [[] for _ in self._rows]
            row = self._rows[0]
        row.append(document)
        return full

    @staticmethod
    def _used(row: list[list[int]]) -> int:
        return sum(len(document) - 1 for document in row)

    def _tensors(self) -> Rows:
        tokens = torch.zeros(len(self._rows), self._length, dtype=torch.long)
        targets, positions = torch.full_like(tokens, IGNORED), torch.zeros_like(tokens)
        for i, row in enumerate(self._rows):
            start = 0
            for document in row:
                end = start + len(document) - 1
                tokens[i, start:end] = torch.tensor(document[:-1])
                targets[i, start:end] = torch.tensor(document[1:])
                positions[i, start:end] = torch.arange(end - start)
                start = end
            positions[i, start:] = torch.arange(self._length - start)
        return Rows(tokens, targets, positions)
