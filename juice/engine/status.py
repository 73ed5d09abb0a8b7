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
    """

    is_alive: bool
    heartbeat_age_s: float
    n_running: int
    n_waiting: int
    n_kv_bytes: int
    max_kv_bytes: int
