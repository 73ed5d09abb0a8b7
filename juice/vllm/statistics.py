"""What vLLM's scheduler last said of itself."""

from __future__ import annotations

import time
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats


class Statistics(StatLoggerBase):
    """Keeps the newest statistics; vLLM makes one and calls `record` after every step."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.newest = SchedulerStats()
        self.at = time.monotonic()
        self.steps = dict[int, int]()  # by how many requests ran in them

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Keep what a step says."""
        self.at = time.monotonic()
        if scheduler_stats is not None:
            self.newest = scheduler_stats
        if iteration_stats is not None:
            # Those that the step finished no longer run.
            n = self.newest.num_running_reqs + len(iteration_stats.finished_requests)
            self.steps[n] = self.steps.get(n, 0) + 1

    def log_engine_initialized(self) -> None:
        """Nothing to do."""
