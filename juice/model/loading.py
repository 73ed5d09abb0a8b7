"""Loading a model: a hub id, a local folder, or `mini`. The only place that calls from_pretrained.

Weights come from safetensors files alone and remote code is never run. `HF_TOKEN` and the hub's cache variables work as
everywhere; what the hub refuses is passed on with what to do.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import errors as hub
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from juice.errors import JuiceError, ModelNotFoundError, UnsupportedModelError, UsageError
from juice.head_set import ModelIdentity
from juice.model.attention import AttentionPattern, attention_pattern
from juice.model.fingerprint import identify_model
from juice.model.layout import Layout, resolve, text_config
from juice.model.linearity import why_not_linear
from juice.model.output import OutputPositions
from juice.model.partition import check_heads
from juice.model.placement import (
    DeviceMap,
    choose_device,
    choose_dtype,
    choose_map,
    choose_quantization,
    input_device,
    is_quantized,
)
from juice.model.positions import rope_switch
from juice.model.prompts import PromptForm
from juice.model.ranks import Ranks
from juice.model.routing import RowRouting
from juice.model.sharding import WHOLE, Shard, check_plan, options_for, own_device
from juice.model.steering import SteeringHooks
from juice.model.uncompiled import uncompiled

MINI = Path(__file__).parents[1] / "models" / "mini"


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to be steered: its parts, its hooks and who it is.

    `attention` is None where the model must mask by itself; `rope_switch` the tokens beyond which its positions change, if they do.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layout: Layout
    attention: AttentionPattern | None
    rope_switch: int | None
    routing: RowRouting
    steering: SteeringHooks
    output: OutputPositions
    identity: ModelIdentity
    modules: tuple[nn.Module, ...]
    # False where projections are not linear, a row at a time: then steering is approximate, and every answer says so.
    exact: bool = True
    # Held during a forward: the hooks carry one plan at a time.
    turn: RLock = field(default_factory=RLock)
    # The text of the template that makes a prompt a chat; None for prompts as they are.
    chat_template: str | None = None
    # This process' part of a sharded model and, on rank 0, the other ranks.
    shard: Shard = WHOLE
    ranks: Ranks | None = None

    def release(self) -> None:
        """Take the hooks off the model, so that it can be loaded again, and end the other ranks of a sharded one."""
        for handle in (*self.routing.handles, *self.steering.handles, *self.output.handles):
            handle.remove()
        self.model._juice_hooked = False
        if self.ranks is not None:
            self.ranks.close()

    def run(self, **inputs: Any) -> Any:
        """Run one forward and return what the model returns, uncompiled whatever was compiled."""
        with uncompiled(self.modules):
            return self.model(**inputs)

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return input_device(self.model)

    @property
    def n_ranks(self) -> int:
        """The number of devices over which the model is sharded."""
        return self.ranks.n_ranks if self.ranks else 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def quantization(self) -> str | None:
        """How the weights are quantised, such as bitsandbytes-4bit or torchao; None where transformers knows of nothing."""
        config = getattr(self.model.config, "quantization_config", None)
        if config is None:
            return None
        told: dict[str, Any] = config if isinstance(config, dict) else config.to_dict()
        method = told.get("quant_method")
        bits = next((f"-{n}bit" for n in (4, 8) if told.get(f"load_in_{n}bit")), "")
        return f"{getattr(method, 'value', method)}{bits}"

    @property
    def max_positions(self) -> int | None:
        """The model's context in tokens; None where its positions have no end."""
        config = text_config(self.model)
        named = (getattr(config, field, None) for field in ("max_position_embeddings", "max_seq_len"))
        return next((value for value in named if isinstance(value, int)), None)

    @property
    def vocabulary_size(self) -> int:
        """Tokens that the model knows; a tokenizer may name more or fewer."""
        return int(text_config(self.model).vocab_size)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The tokens that end a generation."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        if ids is None:
            ids = self.tokenizer.eos_token_id
        named = ids if isinstance(ids, list) else [] if ids is None else [ids]
        return frozenset(token for token in named if 0 <= token < self.vocabulary_size)

    @cached_property
    def prompts(self) -> PromptForm:
        """How prompts become tokens."""
        return PromptForm(self.tokenizer, self.chat_template)


def load_model(
    model: str | Path = "mini",
    *,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    attn_implementation: str | None = None,
    device_map: DeviceMap | None = None,
    offload_folder: str | Path | None = None,
    quantization: str | None = None,
    allow_approximate: bool = False,
    shard: Shard = WHOLE,
) -> LoadedModel:
    """Load a model, or a rank's shard of it, and its tokenizer and install the hooks; the options are those of `juice.load`.

    Raises ModelNotFoundError when it cannot be had and UnsupportedModelError when it cannot be steered exactly.
    """
    source = str(MINI) if str(model) == "mini" else str(model)
    if shard == WHOLE and device == "auto" and dist.is_torchelastic_launched():
        raise UsageError(
            "torchrun has started several processes, and each would load the whole model; start one without it: tp=N shards the model over "
            "N devices (`juice serve --tp N`), or name each process' device"
        )
    if device_map is None and offload_folder is not None:
        raise UsageError("offload_folder is given, but no device_map; give one that puts something on disk, such as auto")
    if device_map is not None and device != "auto":
        raise UsageError(f"device {device!r} and a device_map are given; drop one of them")
    place = choose_device(device) if shard == WHOLE else own_device(device, shard)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    placed: dict[str, Any] = {}
    if device_map is not None:
        placed = {"device_map": choose_map(device_map), "offload_folder": offload_folder}
        if isinstance(placed["device_map"], dict) and {str(at) for at in placed["device_map"].values()} <= {"cpu", "disk"}:
            place = torch.device("cpu")
    placed["dtype"] = choose_dtype(dtype, place)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        config = AutoConfig.from_pretrained(source, **options)
        placed |= _quantized(quantization, config, placed, place)
        network, report = AutoModelForCausalLM.from_pretrained(
            source,
            **options,
            **placed,
            **options_for(shard),
            use_safetensors=True,
            attn_implementation=attn_implementation,
            output_loading_info=True,
        )
        if "device_map" not in placed:
            network = network.to(place)
    except JuiceError:
        raise
    except torch.OutOfMemoryError as error:
        raise JuiceError(f"{model} does not fit on {place}; choose another --device or --device-map, or a smaller --dtype") from error
    except Exception as error:  # whatever a damaged folder makes the libraries raise
        raise ModelNotFoundError(_explain(str(model), error, placed)) from error
    if absent := sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])]):
        raise ModelNotFoundError(
            f"the weights of {model} lack {len(absent)} tensors or have them in another shape ({absent[0]} first); get it again"
        )
    if quantization is not None and not is_quantized(network):
        name = type(network).__name__
        raise UsageError(
            f"{quantization} quantises nothing of {name}, whose projections are no nn.Linear; choose another, such as bnb-4bit"
        )
    folder = _weights_folder(source, revision)
    return prepare(
        network, tokenizer, model_id=str(model), revision=revision, folder=folder, allow_approximate=allow_approximate, shard=shard
    )


def check_shardable(model: str | Path, n_ranks: int, *, revision: str | None = None) -> None:
    """Raise UnsupportedModelError for a model that cannot be sharded over so many ranks, before any weight is read."""
    try:
        config = AutoConfig.from_pretrained(str(MINI) if str(model) == "mini" else str(model), revision=revision, trust_remote_code=False)
        is_packed = getattr(config, "quantization_config", None) is not None
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ModelNotFoundError(_explain(str(model), error, {})) from error
    if is_packed:
        raise UnsupportedModelError(f"{model} was saved quantised, which transformers does not shard; serve it without --tp")
    check_plan(network, resolve(network), n_ranks)


def prepare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_id: str | None = None,
    revision: str | None = None,
    folder: Path | None = None,
    allow_approximate: bool = False,
    shard: Shard = WHOLE,
) -> LoadedModel:
    """Resolve a transformers model that is already in memory and install the hooks on it, once."""
    if getattr(model, "_juice_hooked", False):
        raise UnsupportedModelError("this model object is steered already; use the SteeredModel that was made from it")
    if shard == WHOLE and (getattr(model, "tp_size", None) or 1) > 1:
        raise UnsupportedModelError("this model object is sharded already; give juice.load its folder or hub id, and tp=N")
    layout = resolve(model)
    pattern = attention_pattern(model)
    identity = identify_model(
        model, layout, model_id=model_id or model.config.name_or_path or type(model).__name__, revision=revision, folder=folder
    )
    model.eval()
    reason = why_not_linear(model, layout, input_device(model))
    if reason is not None:
        _admit_approximate(f"{type(model).__name__} cannot be steered exactly: {reason}", allowed=allow_approximate)
    model._juice_hooked = True
    hooks = RowRouting(layout), SteeringHooks(layout, shard), OutputPositions(layout)
    loaded = LoadedModel(
        model, tokenizer, layout, pattern, rope_switch(model), *hooks, identity,
        modules=tuple(model.modules()), exact=reason is None, shard=shard,
    )  # fmt: skip
    try:
        check_heads(loaded)
    except BaseException:
        loaded.release()
        raise
    return loaded


def _quantized(name: str | None, config: PretrainedConfig, placed: dict[str, Any], place: torch.device) -> dict[str, Any]:
    """Return what from_pretrained is told of a quantisation, asked for or stored; packed weights go to their device as they load."""
    if name is None and getattr(config, "quantization_config", None) is None:
        return {}
    told = {} if name is None else {"quantization_config": choose_quantization(name, config, placed["dtype"])}
    return {**told, "device_map": placed.get("device_map", {"": place})}


def _admit_approximate(problem: str, *, allowed: bool) -> None:
    if not allowed:
        raise UnsupportedModelError(
            f"{problem}. Its activations are quantised: load it with quantised weights alone (bnb-4bit, torchao-int8) or with none, or "
            "accept approximate steering with allow_approximate=True (--allow-approximate)"
        )
    warnings.warn(f"{problem}; every answer says `exact: false`", stacklevel=3)


def _weights_folder(source: str, revision: str | None) -> Path | None:
    config_file = cached_file(source, "config.json", revision=revision, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    return Path(config_file).parent if config_file else None


def _explain(model: str, error: Exception, placed: dict[str, Any]) -> str:
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)  # type: ignore[arg-type]
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if any(isinstance(cause, hub.GatedRepoError) for cause in causes) or "gated" in str(error):
        return f"{model} is gated: accept its licence on its hub page and set HF_TOKEN to a token that may read it"
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():
        return f"cannot load the model {model!r}: there is no such folder; give a local folder, a hub id, or `mini`"
    if {"device_map", "quantization_config"} & placed.keys():
        return f"{model} cannot be loaded with this device map or quantisation: {reason}; try it without"
    if Path(model).is_dir():
        return f"the folder {model} cannot be loaded: {reason}; expected config.json, tokenizer files and *.safetensors"
    return f"cannot load the model {model!r}: {reason}; give a hub id (network, or its cache, needed), a local folder, or `mini`"
