"""An engine's present state."""

from __future__ import annotations

from dataclasses import dataclass


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
        n_steps: The steps so far.
        n_step_requests: The requests that ran in them, added up: over `n_steps`, the mean batch.
    """

    is_alive: bool
    heartbeat_age_s: float
    n_running: int
    n_waiting: int
    n_kv_bytes: int
    max_kv_bytes: int
    n_steps: int = 0
    n_step_requests: int = 0
