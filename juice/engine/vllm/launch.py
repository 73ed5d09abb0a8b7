"""A model on vLLM, for `juice.load(engine="vllm")`: what is settled before vLLM is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from juice.engine.load_options import EngineOptions, Limits, LoadOptions
from juice.engine.vllm.arguments import choose_layers
from juice.errors import UsageError
from juice.head_set.library import HeadSetLibrary
from juice.model.identity import describe_stored, source_of

if TYPE_CHECKING:
    from juice.engine.vllm.engine import VllmEngine

# Unless the environment says otherwise, vLLM reports nothing to its makers, its log is short, and
# what it compiles is kept for the next start: ahead of time 0.32 cannot keep transformers' models.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_AOT_COMPILE": "0",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # of its processes
}
INVARIANT = "VLLM_BATCH_INVARIANT"
# What is of one start alone; in its batch-invariant mode vLLM sets the second one itself.
OF_A_START = (INVARIANT, "VLLM_USE_BREAKABLE_CUDAGRAPH")
OWN_ONLY = (
    "device",
    "device_map",
    "offload_folder",
    "threads",
    "attn_implementation",
    "allow_approximate",
)
OWN_QUANTIZATION = ("bnb-4bit", "bnb-8bit", "torchao-int8")


def vllm_engine(
    model: str,
    options: LoadOptions,
    engine: EngineOptions,
    *,
    head_sets: str | Path | None = None,
    limits: Limits | None = None,
) -> VllmEngine:
    """Start vLLM on a model; whoever starts it checks it (`juice.checks.two_runs.check_vllm`).

    Args:
        model: A hub id, a local folder, or `mini`.
        options: Its revision, dtype and quantisation.
        engine: The devices that vLLM spreads it over, and the layers that can be steered.
        head_sets: Folder of head sets; `window` says what is prepared for them.
        limits: Bounds of batches and memory.

    Raises:
        UsageError: vLLM is not installed, or an option is not for it.
        UnsupportedModelError: The model cannot be steered in vLLM.
    """
    if find_spec("vllm") is None:
        raise UsageError(
            "vLLM is not installed here; `make setup-vllm` installs it into .venv-vllm, "
            "or leave out engine (--engine vllm)"
        )
    if given := options.changed(*OWN_ONLY):
        raise UsageError(f"{', '.join(given)} is for juice's own engine; leave it out with vLLM")
    if options.quantization in OWN_QUANTIZATION:
        raise UsageError(
            f"quantization is {options.quantization!r}, which is for juice's own engine; vLLM "
            "expects one of its own names, such as fp8 or bitsandbytes"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with _restored(OF_A_START):
        if engine.deterministic:
            os.environ[INVARIANT] = "1"  # vLLM's processes read it as they start
        return _started(model, options, engine, head_sets, limits or Limits())


@contextmanager
def _restored(names: Sequence[str]) -> Iterator[None]:
    """Give variables of the environment back the values that they have now."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _started(
    model: str,
    options: LoadOptions,
    engine: EngineOptions,
    head_sets: str | Path | None,
    limits: Limits,
) -> VllmEngine:
    start = import_module("juice.engine.vllm.start")
    if engine.deterministic and not start.has_invariant_mode():
        raise UsageError(
            "deterministic: vLLM's batch-invariant mode has no kernels for CPUs; choose the engine "
            '"own" (--engine own), or leave deterministic out'
        )
    description = describe_stored(
        model, options, dtype=options.dtype, device="vllm", n_devices=engine.tp * engine.pp
    )
    library = HeadSetLibrary.scan(
        head_sets, description.identity, allow_unverified=options.allow_unverified
    )
    layers = choose_layers(
        engine.window, library.by_name.values(), description.n_layers, twin=engine.twin
    )
    running: VllmEngine = start.started(
        source_of(model),
        description,
        layers,
        limits,
        engine.vllm_args,
        dtype=options.dtype,
        quantization=options.quantization,
        revision=options.revision,
        tensor_parallel_size=engine.tp,
        pipeline_parallel_size=engine.pp,
    )
    return running
