"""How an engine is doing, now."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Status:
    """How an engine is doing.

    `heartbeat_age_s` is the time since it last began a step; `n_kv_bytes` of `max_kv_bytes` are
    reserved for keys and values.
    """

    is_alive: bool
    heartbeat_age_s: float
    n_running: int
    n_waiting: int
    n_kv_bytes: int
    max_kv_bytes: int
