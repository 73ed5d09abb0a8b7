"""Lets vLLM's V2 model runner run on a CPU, in each process that has this folder in PYTHONPATH.

vLLM has such a runner for CPUs, but only with a backend of Triton for them, which its build lacks.
Triton's interpreter runs the kernels instead, all but one, for which vLLM has PyTorch's.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

from triton.backends import backends

# What asks whether it is active is PyTorch's compiler, which must not take it.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False), compiler=None)


def without_kernel() -> None:
    """Take PyTorch's cut of top-k and top-p, and steps that are scheduled ahead, as on a GPU.

    A plugin of vLLM, called in its processes.
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
    update = CpuPlatform.check_and_update_config.__func__

    def update_all_but_the_scheduler(cls: type[CpuPlatform], config: Any) -> None:
        is_ahead = config.scheduler_config.async_scheduling
        update(cls, config)
        assert is_ahead, "V2 schedules ahead unless it is told not to"
        config.scheduler_config.async_scheduling = is_ahead

    CpuPlatform.check_and_update_config = classmethod(update_all_but_the_scheduler)
