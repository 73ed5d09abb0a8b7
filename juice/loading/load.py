"""`juice.load`: from a hub id, a folder or a model in memory to a SteeredModel, sharded or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from juice.engine import Limits
from juice.errors import RequestError, UsageError
from juice.exactness.engine_check import checked_engine
from juice.loading.prepared import prepare
from juice.loading.pretrained import check_shardable, load_model
from juice.model.loaded import LoadedModel
from juice.model.ranks import Ranks
from juice.model.sharding import Shard, options_for
from juice.options import LoadOptions
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
    limits: Limits | None = None,
    tp: int = 1,
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
        limits: Bounds of the engine's batches and memory.
        tp: Devices of this machine to shard the model over: this process is rank 0 and starts the
            others, which end with `SteeredModel.close`.

    Returns:
        The model with its engine and head sets; a `with` block closes it at the end.

    Raises:
        ModelNotFoundError: The model cannot be found or loaded.
        UnsupportedModelError: The model cannot be steered exactly.
        UsageError: Options contradict each other, or cannot be used here.
        RankLostError: A rank of a sharded model ended while it loaded.
    """
    if tp < 1:
        raise RequestError(
            f"tp is {tp}; expected the number of devices to shard the model over, at least 1",
            param="tp",
        )
    options = LoadOptions.of(
        device=device,
        dtype=dtype,
        revision=revision,
        attn_implementation=attn_implementation,
        device_map=str(device_map) if isinstance(device_map, torch.device) else device_map,
        offload_folder=offload_folder,
        quantization=quantization,
        allow_approximate=allow_approximate,
    )
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if isinstance(model, PreTrainedModel):
        loaded = _in_memory(model, tokenizer, options, tp)
    elif tp > 1:
        loaded = _sharded(str(model), options, tp)
    else:
        loaded = load_model(model, options)
    try:
        engine = checked_engine(loaded, limits)
    except BaseException:
        loaded.release()
        raise
    return SteeredModel(engine, head_sets)


def _in_memory(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    options: LoadOptions,
    n_ranks: int,
) -> LoadedModel:
    if tokenizer is None:
        raise RequestError(
            "a model object comes without its tokenizer; pass tokenizer=...", param="tokenizer"
        )
    if options != LoadOptions(allow_approximate=options.allow_approximate):
        raise UsageError(
            "a model object stays on its device, unchanged; "
            "give device, dtype and quantization to its from_pretrained"
        )
    if n_ranks > 1:
        raise RequestError(
            "a model object is already on its device; to shard it, give its folder or hub id",
            param="tp",
        )
    return prepare(model, tokenizer, allow_approximate=options.allow_approximate)


def _sharded(model: str, options: LoadOptions, n_ranks: int) -> LoadedModel:
    """Load a model over several ranks, this process being the first."""
    if options.changed("device_map", "offload_folder", "quantization"):
        raise UsageError(
            "tp shards the stored model over devices that it chooses itself; "
            "drop device_map, offload_folder and quantization"
        )
    options_for(Shard(0, n_ranks))
    check_shardable(model, n_ranks, revision=options.revision)
    others = options.model_copy(update={"device": "auto"})  # each takes a device of its own
    ranks = Ranks(
        n_ranks,
        "juice.loading.following",
        {"model": model, "options": others},
        device=options.device,
    )
    try:
        loaded = replace(load_model(model, options, shard=Shard(0, n_ranks)), ranks=ranks)
        ranks.guard(loaded.model)
        ranks.wait_until_loaded()
    except BaseException:
        ranks.close()
        raise
    return loaded
