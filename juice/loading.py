"""`juice.load`: from a hub id, a folder, or a model in memory to a SteeredModel; sharded over several devices where asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from juice.engine import Limits
from juice.errors import RequestError, UsageError
from juice.model.loading import LoadedModel, check_shardable, load_model, prepare
from juice.model.placement import DeviceMap
from juice.model.ranks import Ranks
from juice.model.sharding import Shard, options_for
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
    device_map: DeviceMap | None = None,
    offload_folder: str | Path | None = None,
    quantization: str | None = None,
    allow_approximate: bool = False,
    limits: Limits | None = None,
    tp: int = 1,
) -> SteeredModel:
    """Load a hub id, a folder or `mini`, or take a transformers model already in memory (with its tokenizer).

    `device_map` is Accelerate's: auto, balanced, balanced_low_0, sequential, a device, or {module: device, cpu or disk}, with
    `offload_folder` for what goes to disk. `quantization` is bnb-4bit, bnb-8bit or torchao-int8. A model with quantised activations
    (bnb-8bit) is steered with `allow_approximate` alone, and every answer then says `exact: false`. A compiled model runs
    uncompiled. `limits` bounds the engine's batches and memory. With `tp` the model is sharded over so many devices of this machine:
    this process is rank 0 and starts the others, which end with `SteeredModel.close`. Raises ModelNotFoundError,
    UnsupportedModelError, UsageError and RankLostError.
    """
    if tp < 1:
        raise RequestError(f"tp is {tp}; expected the number of devices to shard the model over, at least 1", param="tp")
    is_placed = device_map is not None or offload_folder is not None or quantization is not None
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if isinstance(model, PreTrainedModel):
        if tokenizer is None:
            raise RequestError("a model object comes without its tokenizer; pass tokenizer=...", param="tokenizer")
        if is_placed or (device, dtype, revision, attn_implementation) != ("auto", "auto", None, None):
            raise UsageError("a model object stays where and as it is; give device, dtype and quantization to its from_pretrained")
        if tp > 1:
            raise RequestError("a model object is on its device already; to shard it, give its folder or hub id", param="tp")
        return SteeredModel(prepare(model, tokenizer, allow_approximate=allow_approximate), head_sets, limits)
    job: dict[str, Any] = {
        "model": str(model), "revision": revision, "dtype": dtype, "attn_implementation": attn_implementation,
        "allow_approximate": allow_approximate,
    }  # fmt: skip
    if tp > 1:
        if is_placed:
            raise UsageError("tp shards a model as it is stored over devices of its own; drop device_map, offload_folder and quantization")
        return SteeredModel(_sharded(job, tp, device), head_sets, limits)
    loaded = load_model(**job, device=device, device_map=device_map, offload_folder=offload_folder, quantization=quantization)
    return SteeredModel(loaded, head_sets, limits)


def _sharded(job: dict[str, Any], n_ranks: int, device: str) -> LoadedModel:
    """Load a model over several ranks, this process being the first."""
    options_for(Shard(0, n_ranks))
    check_shardable(job["model"], n_ranks, revision=job["revision"])
    ranks = Ranks(n_ranks, "juice.engine.following", job, device=device)
    try:
        loaded = replace(load_model(**job, device=device, shard=Shard(0, n_ranks)), ranks=ranks)
        ranks.guard(loaded.model)
        ranks.wait_until_loaded()
    except BaseException:
        ranks.close()
        raise
    return loaded
