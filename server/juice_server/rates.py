"""How fast things go: what a key may use in a minute, and when there will be room in a queue."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable

from juice.errors import RequestError
from juice_server.clients import Client
from juice_server.errors import RateLimitedError

MINUTE_S = 60.0
N_SEEN = 64
# Without any measurement, and at most.
DEFAULT_WAIT_S, MAX_WAIT_S = 1.0, 60.0


class Throughput:
    """How many generations ended lately, and so how long a place in the queue takes."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=N_SEEN)

    def note(self) -> None:
        """Note that one has ended."""
        self._ends.append(time.monotonic())

    def wait_s(self, n: int) -> float:
        """Return in how many seconds n generations will have ended."""
        now = time.monotonic()
        while self._ends and self._ends[0] < now - MAX_WAIT_S:
            self._ends.popleft()
        if len(self._ends) < 2:
            return DEFAULT_WAIT_S
        each_s = (now - self._ends[0]) / len(self._ends)
        return min(MAX_WAIT_S, n * each_s)


class _Bucket:
    """A minute's allowance, which refills steadily."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute, self._level, self._at = per_minute, float(per_minute), time.monotonic()

    def wait_s(self, n: int) -> float:
        """Return in how many seconds n are there."""
        now = time.monotonic()
        self.add((now - self._at) * self.per_minute / MINUTE_S)
        self._at = now
        return max(0.0, (n - self._level) * MINUTE_S / self.per_minute)

    def add(self, n: float) -> None:
        """Put some back, or take some: fewer than none."""
        self._level = min(float(self.per_minute), self._level + n)


class RateLimits:
    """What is left of each key's allowance; one thread at a time."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[Hashable, str, int], _Bucket] = {}

    def take(self, client: Client, n_tokens: int) -> None:
        """Take one request and its tokens.

        Raises:
            RateLimitedError: The allowance of this minute is used up.
            RequestError: The request has more tokens than a minute's allowance.
        """
        wanted = {"requests": 1, "tokens": n_tokens}
        buckets = self._buckets_of(client)
        for kind, bucket in buckets.items():
            if wanted[kind] > bucket.per_minute:
                raise RequestError(
                    f"the request may use {wanted[kind]} {kind}, prompt and max_tokens; this key "
                    f"has {bucket.per_minute} a minute: ask for less"
                )
        waits = {kind: bucket.wait_s(wanted[kind]) for kind, bucket in buckets.items()}
        kind = max(waits, key=waits.__getitem__, default="")
        if kind and waits[kind]:
            raise RateLimitedError(
                f"this key may use {buckets[kind].per_minute} {kind} a minute; try again later",
                retry_after_s=waits[kind],
            )
        for kind, bucket in buckets.items():
            bucket.add(-wanted[kind])

    def give_back(self, client: Client, n_tokens: int) -> None:
        """Give back tokens that were not used."""
        if "tokens" in (own := self._buckets_of(client)):
            own["tokens"].add(n_tokens)

    def _buckets_of(self, client: Client) -> dict[str, _Bucket]:
        bounds = {"requests": client.requests_per_minute, "tokens": client.tokens_per_minute}
        return {
            kind: self._buckets.setdefault((client.name, kind, bound), _Bucket(bound))
            for kind, bound in bounds.items()
            if bound is not None
        }
