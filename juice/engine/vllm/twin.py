"""The twin of a compiled decoder: the same parameters, compiled once more, without companions.

vLLM compiles a decoder's `forward` once for each object, without guards, so what a step does beside
steering is settled when it is traced. Two variants, one of which runs no companions, leave the
choice to each step.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import VllmConfig, set_current_vllm_config

from juice.engine.vllm.arguments import Layers

TAG = "plain"  # names its folder in vLLM's compile cache


def has_twin(vllm_config: VllmConfig, layers: Layers) -> bool:
    """Return whether a compiled decoder has a twin: there are companions to be left out.

    V1 replays whole steps by a description that says nothing of companions: there is none then.
    """
    whole_steps = vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    may = vllm_config.use_v2_model_runner or not whole_steps
    return bool(layers.window) and layers.twin and may


def twin_of(decoder: nn.Module, vllm_config: VllmConfig) -> nn.Module:
    """Return a module that shares all parameters and modules with a decoder, to be compiled apart.

    Its `forward` has a code object and a name of its own: PyTorch keeps what it compiled by the
    one, vLLM's ahead-of-time artifacts have the other in their key.
    """
    cls: Any = type(decoder)
    forward = cls.forward
    name = f"{forward.__qualname__}:{TAG}"
    same = FunctionType(
        forward.__code__.replace(co_qualname=name),
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    same.__kwdefaults__, same.__module__ = forward.__kwdefaults__, forward.__module__
    same.__dict__.update(forward.__dict__)
    same.__qualname__ = name
    twin: Any = object.__new__(type(f"{cls.__name__}Plain", (cls,), {"forward": same}))
    twin.__dict__ = dict(decoder.__dict__)
    twin.__dict__.pop("aot_compiled_fn", None)
    twin.was_aot_compile_fn_loaded_from_disk = False
    with set_current_vllm_config(vllm_config), set_model_tag(TAG):
        TorchCompileWithNoGuardsWrapper.__init__(twin)
        twin._compile_tag = TAG
    return twin
