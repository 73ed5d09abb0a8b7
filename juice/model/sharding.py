"""One rank's part of a sharded model, and the heads that its z holds.

Models are sharded by transformers' own tensor parallel plans: rank r of N holds a slice of every
projection that the plan names. In most plans z, the input of the output projection, holds the
rank's own heads side by side: n_heads / N of them, the first being r * n_heads / N. Where the plan
splits z only later, inside the projection (Phi-3, OLMo 2), or leaves attention whole (DeepSeek),
every rank sees all of z. The width of z shows which. Keys and values are the rank's own as well;
logits, and what goes from layer to layer, are the same on all ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from juice.errors import UnsupportedModelError, UsageError
from juice.model.layout import AttentionLayer, Layout, text_config

# How a plan may treat the output projection: z sharded by heads, or whole on every rank.
SPLIT_STYLES, WHOLE_STYLES = ("rowwise",), ("rowwise_split_input", "rowwise_rep", None)
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Shard:
    """This process' part: `rank` of `n_ranks`."""

    rank: int
    n_ranks: int

    def heads(self, z: torch.Tensor, layer: AttentionLayer) -> slice:
        """Return the heads of a layer in this rank's z, [rows, pos, heads here * d_head]."""
        n_here = z.shape[-1] // layer.d_head
        first = 0 if n_here == layer.n_heads else self.rank * n_here
        return slice(first, first + n_here)


WHOLE = Shard(0, 1)


def check_plan(model: PreTrainedModel, layout: Layout, n_ranks: int) -> None:
    """Raise UnsupportedModelError for a model whose heads `n_ranks` ranks cannot share.

    Its weights may be on the meta device.
    """
    name, plan = type(model).__name__, model.tp_plan
    if not plan:
        raise UnsupportedModelError(
            f"{name} has no tensor parallel plan in transformers, so it cannot be sharded; "
            "serve it without --tp"
        )
    names = {module: re.sub(r"\.\d+(?=\.|$)", ".*", path) for path, module in model.named_modules()}
    for layer in layout.layers:
        style = plan.get(names[layer.projection])
        if style in WHOLE_STYLES:
            continue
        if style not in SPLIT_STYLES:
            raise UnsupportedModelError(
                f"{name} shards its output projections in the style {style!r}, "
                "which JuICE does not know; serve it without --tp"
            )
        kv_heads = getattr(text_config(model), "num_key_value_heads", None)
        counts = {"query heads": layer.n_heads} | (
            {"key-value heads": kv_heads} if isinstance(kv_heads, int) else {}
        )
        for what, n in counts.items():
            if n % n_ranks:
                raise UnsupportedModelError(
                    f"{name} has {n} {what} in layer {layer.index}, "
                    f"which {n_ranks} ranks cannot share; choose a --tp that divides {n}"
                )


def own_device(device: str, shard: Shard) -> torch.device:
    """Return the device of a rank: its own accelerator, or the CPU where there is none.

    Raises UsageError for another kind of device, or where there are fewer devices than ranks.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    if kind == "mps":
        raise UsageError(
            "tensor parallel runs on CUDA devices and on CPUs, not on mps; leave out tp"
        )
    if device not in ("auto", kind):
        raise UsageError(
            f"device is {device!r}; with tp every rank takes one of its own: "
            f"expected auto or {kind}"
        )
    if kind == "cpu":
        return torch.device(kind)
    if (n := torch.accelerator.device_count()) < shard.n_ranks:
        raise UsageError(
            f"tp is {shard.n_ranks}, but there are {n} {kind} devices; choose a tp of {n} at most"
        )
    return torch.device(kind, shard.rank)


def meeting_place(shard: Shard, port: int = 0) -> Any:
    """Return the store through which ranks find each other.

    Rank 0 opens it on a free port; the others pass that port.
    """
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    is_first = shard.rank == 0
    return store("127.0.0.1", port, shard.n_ranks, is_master=is_first, wait_for_workers=False)


def join_group(shard: Shard, store: Any, device: torch.device) -> None:
    """Join the other ranks; returns when all have joined."""
    if device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // shard.n_ranks))
    else:
        torch.accelerator.set_device_index(device)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=store,
        rank=shard.rank,
        world_size=shard.n_ranks,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=None if device.type == "cpu" else device,
    )


def options_for(shard: Shard) -> dict[str, Any]:
    """Return the options that make from_pretrained load only this rank's part.

    Raises UsageError where the installed libraries cannot.
    """
    if shard == WHOLE:
        return {}
    from transformers.distributed import DistributedConfig

    if find_spec("accelerate") is None or "tp_size" not in DistributedConfig.__dataclass_fields__:
        raise UsageError(
            "tensor parallel needs accelerate and transformers 5.23; "
            "install it from the clone with: pip install -e '.[parallel]'"
        )
    return {"distributed_config": DistributedConfig(tp_size=shard.n_ranks)}
