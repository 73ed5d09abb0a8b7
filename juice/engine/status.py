"""An engine's present state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Status:
    """An engine's present state.

    Args:
        is_alive: Whether the engine still runs.
        heartbeat_age_s: The seconds since it last began a step.
        n_running: The requests that run.
        n_waiting: The requests that wait.
        n_kv_bytes: The bytes reserved for keys and values.
        max_kv_bytes: The most that may be reserved.
        steps: The steps so far, by how many requests ran in them.
    """

    is_alive: bool
    heartbeat_age_s: float
    n_running: int
    n_waiting: int
    n_kv_bytes: int
    max_kv_bytes: int
    steps: Mapping[int, int] = field(default_factory=dict)

    @property
    def n_steps(self) -> int:
        """The steps so far."""
        return sum(self.steps.values())

    @property
    def n_step_requests(self) -> int:
        """The requests that ran in them, added up: over `n_steps`, the mean batch."""
        return sum(size * n for size, n in self.steps.items())
