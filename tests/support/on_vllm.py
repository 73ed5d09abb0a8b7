"""vLLM engines on tiny models whose heads are as wide as vLLM's kernels for CPUs want them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import juice
from juice.engine.contract import Engine
from juice.engine.load_options import EngineOptions, Limits, LoadOptions
from juice.formula import Method, Target
from juice.loading import checked_vllm
from tests.support import tiny
from tests.support.architectures import ARCHITECTURES, Architecture

HEAD_WIDTH = 32
# vLLM compiles nothing; its blocks are the smallest that its CPU kernels take.
ON_CPU = {"enforce_eager": True, "block_size": 32}
# The process that schedules runs the model, too, which starts faster.
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
WIDER = {"hidden_size": 128, "n_embd": 128, "head_dim": HEAD_WIDTH, "word_embed_proj_dim": 128}
WIDER |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
SMALL = Limits(max_batch=4, max_model_len=128, max_prefill_tokens=24, kv_memory_bytes=32 << 20)


def wide(name: str) -> Architecture:
    """Return an architecture with heads of 32."""
    found = next(architecture for architecture in ARCHITECTURES if architecture.name == name)
    config = {key: WIDER.get(key, value) for key, value in found.config.items()}
    return replace(found, config=config)


def save_with_set(root: Path, target: Target, method: Method = "juice") -> None:
    """Save a model, `root/model`, and in `root/head_sets` a set that was made for it."""
    tiny.save(root / "model", wide("Llama").build())
    heads = {"plus": [(0, 1), (3, 0)], "minus": [(1, 3)]}
    with juice.load(root / "model") as model:
        betas = {"beta_plus": 2, "beta_minus": -1}
        made = model.make_head_set(name=target, target=target, method=method, **heads, **betas)
        made.save(root / "head_sets" / "tiny" / target)


def fork_vllms_processes() -> None:
    """Fork vLLM's processes from this one, as vLLM does on GPUs: spawned, each imports it anew.

    Safe while this process computes on one thread; vLLM spawns on CPUs, where it may take several.
    """
    context = get_context("fork")
    for module in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
        import_module(module).get_mp_context = lambda: context


def let_vllm_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM compile by its own compiler, where it is asked to, in all of its processes."""
    folder = str(Path(__file__).with_name("compiled"))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
    import_module("compiled_on_cpu").install()


@contextmanager
def started(
    folder: Path,
    *,
    dtype: str = "float32",
    window: str = "all",
    twin: bool = True,
    head_sets: Path | None = None,
    limits: Limits = SMALL,
    tp: int = 1,
    pp: int = 1,
    **arguments: Any,
) -> Iterator[Engine]:
    """Run vLLM on a model's folder; prompts are prefilled in chunks of 24 tokens."""
    if tp == pp == 1:
        arguments["distributed_executor_backend"] = ONE_PROCESS
    options = {**ON_CPU, **arguments}
    engine = checked_vllm(
        str(folder),
        LoadOptions(dtype=dtype),
        EngineOptions(engine="vllm", window=window, twin=twin, tp=tp, pp=pp, vllm_args=options),
        head_sets=head_sets,
        limits=limits,
    )
    try:
        yield engine
    finally:
        engine.close()
