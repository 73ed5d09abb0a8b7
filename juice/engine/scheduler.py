"""Which waiting requests join the batch, in the order in which they came.

A request joins when its rows fit beside the running ones; those that join together are prefilled in one forward, so
their padded tokens are bounded too. The first in the queue always joins an empty batch.
"""

from __future__ import annotations

from collections import deque

from juice.engine.request import Sequence

MAX_ROWS = 128
MAX_PREFILL_TOKENS = 8192


class Scheduler:
    """The waiting queue and the bounds of a batch."""

    def __init__(self, max_rows: int = MAX_ROWS, max_prefill_tokens: int = MAX_PREFILL_TOKENS) -> None:
        self.waiting: deque[Sequence] = deque()
        self._max_rows = max_rows
        self._max_prefill_tokens = max_prefill_tokens

    def admit(self, n_running_rows: int) -> list[Sequence]:
        """Take from the queue what joins now, beside so many occupied rows."""
        admitted: list[Sequence] = []
        n_rows, longest = 0, 0
        while self.waiting:
            candidate = self.waiting[0]
            longest = max(longest, len(candidate.pending))
            fits = n_running_rows + n_rows + candidate.n_rows <= self._max_rows
            fits &= (n_rows + candidate.n_rows) * longest <= self._max_prefill_tokens
            if not fits and n_running_rows + n_rows > 0:
                break
            n_rows += candidate.n_rows
            admitted.append(self.waiting.popleft())
        return admitted
