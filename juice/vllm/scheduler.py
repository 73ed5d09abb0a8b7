"""Prefix caching that keeps apart what is steered differently.

Cached keys and values depend on how their request is steered, so the salt of a request's blocks
holds its coefficients. It is set where requests join, whoever sent them; unsteered requests keep
theirs, and share with each other.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from juice.vllm.arguments import Coefficients


class SaltingScheduler(Scheduler):
    """vLLM's scheduler, with salts."""

    def add_request(self, request: Request) -> None:
        """Salt the request's blocks with its coefficients, and queue it."""
        params = request.sampling_params
        coefficients = Coefficients.read(params.extra_args) if params else None
        if coefficients is not None:
            request.cache_salt = f"{request.cache_salt or ''}:{coefficients.cache_key()}"
            request.block_hashes.clear()
            request.update_block_hashes()
        super().add_request(request)


class SaltingAsyncScheduler(SaltingScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler, with salts."""


def salting_scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> SaltingScheduler:
    """Return the scheduler that vLLM would take itself, with salts."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (SaltingAsyncScheduler if is_async else SaltingScheduler)(vllm_config, *args, **kwargs)
