"""`juice.load`: from a hub id, a folder or a model in memory to a SteeredModel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from juice.engine import Engine, Limits
from juice.errors import RequestError, UsageError
from juice.exactness.engine_check import checked_engine
from juice.exactness.invariance import check_invariance
from juice.loading.on_vllm import vllm_engine
from juice.loading.prepared import prepare
from juice.loading.pretrained import load_model
from juice.model.loaded import LoadedModel
from juice.options import EngineName, EngineOptions, LoadOptions
from juice.steered_model import SteeredModel


def load(
    model: str | Path | PreTrainedModel = "mini",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    head_sets: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    attn_implementation: str | None = None,
    device_map: str | int | torch.device | Mapping[str, Any] | None = None,
    offload_folder: str | Path | None = None,
    quantization: str | None = None,
    allow_approximate: bool = False,
    allow_unverified: bool = False,
    limits: Limits | None = None,
    engine: EngineName = "own",
    tp: int = 1,
    pp: int = 1,
    window: str = "auto",
    deterministic: bool = False,
    vllm_args: Mapping[str, Any] | None = None,
) -> SteeredModel:
    """Load a model and check that it is steered exactly.

    Args:
        model: A hub id, a local folder, `mini` (bundled), or a transformers model already in
            memory. A compiled model runs uncompiled.
        tokenizer: The tokenizer of a model in memory.
        head_sets: Folder of head sets; None: JUICE_HEAD_SETS, else ./head_sets, else the shipped
            ones.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        dtype: `auto` (as stored on a GPU, float32 on a CPU), `float32`, `bfloat16` or `float16`.
        revision: Branch, tag or commit of a hub model.
        attn_implementation: `eager`, `sdpa` or another of transformers'.
        device_map: Accelerate's: auto, balanced, balanced_low_0, sequential, a device, or
            {module: device, cpu or disk}.
        offload_folder: Folder for the weights that the map puts on disk.
        quantization: `bnb-4bit`, `bnb-8bit` or `torchao-int8`.
        allow_approximate: Also steer a model with quantised activations (bnb-8bit); every answer
            then has `exact` false.
        allow_unverified: Also steer by head sets that do not say for which weights they were made,
            where architecture and shape fit.
        limits: Bounds of the engine's batches and memory.
        engine: `own`, or `vllm` where it is installed: faster on GPUs, on many devices.
        tp: Devices to shard each layer over (vllm only).
        pp: Stages to spread the layers over (vllm only).
        window: Layers that can be steered (vllm only): `auto` for those of the head sets, `all`, or
            the first and the last, such as `3-9`.
        deterministic: Give each request the same bits whatever else runs, at a price in throughput;
            checked at load.
        vllm_args: More of vLLM's own options, by name.

    Returns:
        The model with its engine and head sets; a `with` block closes it at the end.

    Raises:
        ModelNotFoundError: The model cannot be found or loaded.
        UnsupportedModelError: The model cannot be steered exactly.
        UsageError: Options contradict each other, or cannot be used here.
    """
    options = LoadOptions.of(
        device=device,
        dtype=dtype,
        revision=revision,
        attn_implementation=attn_implementation,
        device_map=str(device_map) if isinstance(device_map, torch.device) else device_map,
        offload_folder=offload_folder,
        quantization=quantization,
        allow_approximate=allow_approximate,
        allow_unverified=allow_unverified,
    )
    chosen = EngineOptions.of(
        engine=engine,
        tp=tp,
        pp=pp,
        window=window,
        deterministic=deterministic,
        vllm_args=dict(vllm_args or {}),
    )
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if chosen.engine == "vllm":
        if isinstance(model, PreTrainedModel):
            raise UsageError("vLLM loads models itself; give juice.load a folder or a hub id")
        running = vllm_engine(str(model), options, chosen, head_sets=head_sets, limits=limits)
        if deterministic:
            _check_deterministic(running)
        return SteeredModel(running, head_sets, allow_unverified=allow_unverified)
    loaded = (
        _in_memory(model, tokenizer, options)
        if isinstance(model, PreTrainedModel)
        else load_model(model, options)
    )
    try:
        own = checked_engine(loaded, limits, deterministic=deterministic)
    except BaseException:
        loaded.release()
        raise
    if deterministic:
        _check_deterministic(own)
    return SteeredModel(own, head_sets, allow_unverified=allow_unverified)


def _check_deterministic(engine: Engine) -> None:
    try:
        check_invariance(engine)
    except BaseException:
        engine.close()
        raise


def _in_memory(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, options: LoadOptions
) -> LoadedModel:
    if tokenizer is None:
        raise RequestError(
            "a model object comes without its tokenizer; pass tokenizer=...", param="tokenizer"
        )
    on_trust = {"allow_approximate", "allow_unverified"}
    if options != LoadOptions(**options.model_dump(include=on_trust)):
        raise UsageError(
            "a model object stays on its device, unchanged; "
            "give device, dtype and quantization to its from_pretrained"
        )
    return prepare(model, tokenizer, allow_approximate=options.allow_approximate)
