"""Lets vLLM compile by itself on a CPU, piece by piece around attention, as it does on a GPU.

On CPUs vLLM takes PyTorch's compiler for the whole model instead. A plugin of vLLM: with this
folder in PYTHONPATH a mode that is asked for (`compilation_config={"mode": 3}`) stays. Passes that
name kernels of builds for GPUs are left out.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vllm.compilation.passes.utility import fix_functionalization
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.platforms.cpu import CpuPlatform

_update = CpuPlatform.check_and_update_config.__func__


def _update_all_but_the_mode(cls: type[CpuPlatform], config: Any) -> None:
    compilation = config.compilation_config
    asked = compilation.mode
    _update(cls, config)
    if asked != CompilationMode.VLLM_COMPILE:
        return
    compilation.mode, compilation.cudagraph_mode = asked, CUDAGraphMode.NONE
    compilation.compile_sizes = compilation.compile_sizes or []
    passes = compilation.pass_config
    for field in fields(passes):
        if isinstance(getattr(passes, field.name), bool) or field.name.startswith("fuse"):
            setattr(passes, field.name, False)


def install() -> None:
    """Change the platform of this process."""
    CpuPlatform.check_and_update_config = classmethod(_update_all_but_the_mode)
    fix_functionalization.FixFunctionalizationPass.__call__ = lambda *_: None
