"""A fair queue: whose work comes next, where clients share a bounded number of rows and bytes.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): every client has a clock, which its work puts
forward by its cost; of the clients that wait, the one whose clock is furthest behind goes first. A
new client starts at the present time, so nobody can save up turns. A lower priority goes before a
higher one, which counts as one lower for every ten seconds that it has waited, down to the lowest
of another client that waits.

Work that has started is never taken back, so space is kept for later clients: a client may hold at
most eight times as much as it leaves free (Choudhury and Hahne, 1998). A client that holds nothing
may have the last of it. The same rule bounds how much of a client may wait. Work that needs more
rows or bytes than are free lets other work go ahead, but not for ever.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

HELD_TO_FREE = 8
AGEING_S = 10.0
# How often work may be overtaken that does not fit, and how far a client's queue is searched.
MAX_OVERTAKEN, MAX_ASKED = 64, 16
# How many clients are remembered, those that hold and want nothing among them.
MAX_REMEMBERED = 1000
NUMBERS = count()


@dataclass(eq=False, kw_only=True)
class Work:
    """Something that waits for its turn, then holds rows and bytes until they are freed.

    Costs are in any unit that is the same for all, `size` is the part of the bound on waiting work,
    and `max_running` bounds the rows that the client may hold. Lower priorities go first.
    """

    client: Hashable
    cost: float
    n_rows: int = 1
    n_bytes: int = 0
    size: int = 1
    priority: int = 0
    max_running: int | None = None
    arrived: float = field(default_factory=lambda: time.monotonic())
    n_overtaken: int = 0
    number: int = field(default_factory=lambda: next(NUMBERS))

    def __lt__(self, other: Work) -> bool:
        return (self.priority, self.number) < (other.priority, other.number)


W = TypeVar("W", bound=Work)


@dataclass(eq=False)
class _Account(Generic[W]):
    """A client's waiting work, and its holdings; `clock` is the start of its next work."""

    clock: float = 0.0
    waiting: list[W] = field(default_factory=list)
    size: int = 0
    n_rows: int = 0
    n_bytes: int = 0

    def urgency(self, now: float, lowest: int) -> float:
        """Return the priority of what is next here, less what it has gained by waiting."""
        first = self.waiting[0]
        return max(lowest, first.priority - (now - first.arrived) // AGEING_S)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.n_rows


class FairQueue(Generic[W]):
    """The queue, for so many rows and bytes; one thread at a time.

    At most `max_waiting` may wait, by the sizes of the work.
    """

    def __init__(self, *, n_rows: int, max_bytes: int = 0, max_waiting: int) -> None:
        self.n_rows, self.max_bytes, self.max_waiting = n_rows, max_bytes, max_waiting
        self.n_waiting = self.n_running = 0
        self._n_bytes = 0
        self._now = 0.0
        self._accounts: dict[Hashable, _Account[W]] = {}

    @property
    def n_clients(self) -> int:
        """The clients that are remembered: those with work, and the latest of the others."""
        return len(self._accounts)

    def excess(
        self,
        client: Hashable,
        size: int,
        *,
        most: int | None = None,
        max_running: int | None = None,
    ) -> int:
        """Return the excess of waiting work if a client added this size; 0 where it fits.

        Where nothing waits, anything may be added that the client's own bounds allow: `most` may
        wait beside those that start, and `max_running` rows be held; None: its part of the whole.
        """
        account = self._accounts.get(client, _Account[W]())
        n_of_client, rows = account.size, part_of(self.n_rows)
        if most is not None:
            free = min(rows, max_running or rows) - account.n_rows
            if (too_many := n_of_client + size - max(0, free) - most) > 0:
                return too_many
        if not self.n_waiting:
            return 0
        # However much another client was given when nothing waited, it has no more than its part.
        part = part_of(self.max_waiting)
        others = sum(min(a.size, part) for c, a in self._accounts.items() if c != client)
        left = self.max_waiting - others - n_of_client - size
        if _may_hold(n_of_client, size, left):
            return 0
        return max(1, -left)

    def put(self, work: Sequence[W]) -> None:
        """Add work, whether or not it fits."""
        for item in work:
            account = self._accounts.setdefault(item.client, _Account[W]())
            if not account.waiting:
                account.clock = max(account.clock, self._now)
            insort(account.waiting, item)
            account.size += item.size
            self.n_waiting += item.size
        self._forget_the_idle()

    def drop(self, work: W) -> bool:
        """Take work out that waits; return whether it did."""
        account = self._accounts.get(work.client)
        if account is None or work not in account.waiting:
            return False
        self._remove(account, work)
        return True

    def take(self) -> W | None:
        """Return the work whose turn it is, which then holds its rows; None if all must wait."""
        if self.n_running >= self.n_rows:
            return None
        now, passed = time.monotonic(), list[W]()
        waiting = [account for account in self._accounts.values() if account.waiting]
        lowest = min((account.waiting[0].priority for account in waiting), default=0)
        waiting.sort(key=lambda account: (account.urgency(now, lowest), account.clock))
        for account in waiting:
            for work in account.waiting[:MAX_ASKED]:
                has_rows = self._may_have_rows(account, work)
                if not has_rows and account.n_rows:
                    break
                if has_rows and self._may_have_bytes(account, work):
                    for other in passed:
                        other.n_overtaken += 1
                    self._start(account, work)
                    return work
                # Where its client holds some, others' work need not end for it.
                if work.n_overtaken >= MAX_OVERTAKEN and not account.n_bytes:
                    return None
                passed.append(work)
        return None

    def free(self, work: W, *, n_rows: int, n_bytes: int, unused: float = 0.0) -> None:
        """Give back rows and bytes that work held, and what it cost less than it said."""
        account = self._accounts[work.client]
        account.n_rows -= n_rows
        account.n_bytes -= n_bytes
        account.clock -= unused
        self.n_running -= n_rows
        self._n_bytes -= n_bytes

    def _may_have_rows(self, account: _Account[W], work: W) -> bool:
        n = min(work.n_rows, self.n_rows)
        if work.max_running is not None and account.n_rows + n > max(n, work.max_running):
            return False
        return _may_hold(account.n_rows, n, self.n_rows - self.n_running - n)

    def _may_have_bytes(self, account: _Account[W], work: W) -> bool:
        left = self.max_bytes - self._n_bytes - work.n_bytes
        return not self.n_running or _may_hold(account.n_bytes, work.n_bytes, left)

    def _remove(self, account: _Account[W], work: W) -> None:
        account.waiting.remove(work)
        account.size -= work.size
        self.n_waiting -= work.size

    def _start(self, account: _Account[W], work: W) -> None:
        self._remove(account, work)
        account.n_rows += work.n_rows
        account.n_bytes += work.n_bytes
        self.n_running += work.n_rows
        self._n_bytes += work.n_bytes
        self._now = max(self._now, account.clock)
        account.clock += work.cost

    def _forget_the_idle(self) -> None:
        if len(self._accounts) > MAX_REMEMBERED:
            idle = [client for client, account in self._accounts.items() if account.is_idle]
            idle.sort(key=lambda client: self._accounts[client].clock)
            for client in idle[: len(self._accounts) - MAX_REMEMBERED // 2]:
                del self._accounts[client]


def part_of(whole: int) -> int:
    """Return the part of a whole that one client may hold, at least one."""
    return max(1, whole * HELD_TO_FREE // (HELD_TO_FREE + 1))


def with_room(n: int) -> int:
    """Return the whole of which one client may hold n."""
    return n + -(-n // HELD_TO_FREE)


def _may_hold(had: int, n: int, left: int) -> bool:
    """Return whether a client may have n more, when this much is left then."""
    return left >= 0 and (not had or had + n <= HELD_TO_FREE * left)
