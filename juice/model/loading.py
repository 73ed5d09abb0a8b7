"""Loading a model: a hub id, a local folder, or `mini`. The only place that calls from_pretrained.

Weights come from safetensors files alone and remote code is never run. `HF_TOKEN` and the hub's cache variables work as
everywhere; what the hub refuses is passed on with what to do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import errors as hub
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from juice.errors import JuiceError, ModelNotFoundError, UnsupportedModelError, UsageError
from juice.head_set import ModelIdentity
from juice.model.attention import AttentionPattern, attention_pattern
from juice.model.fingerprint import identify_model
from juice.model.layout import Layout, resolve, text_config
from juice.model.output import OutputPositions
from juice.model.partition import check_heads
from juice.model.positions import rope_switch
from juice.model.prompts import PromptForm
from juice.model.ranks import Ranks
from juice.model.routing import RowRouting
from juice.model.sharding import WHOLE, Shard, check_plan, options_for, own_device
from juice.model.steering import SteeringHooks

MINI = Path(__file__).parents[1] / "models" / "mini"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    # Held during a forward: the hooks carry one plan at a time.
    turn: RLock = field(default_factory=RLock)
    # The text of the template that makes a prompt a chat; None for prompts as they are.
    chat_template: str | None = None
    # This process' part of a sharded model and, on rank 0, the other ranks.
    shard: Shard = WHOLE
    ranks: Ranks | None = None

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

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
    shard: Shard = WHOLE,
) -> LoadedModel:
    """Load a model, or a rank's shard of it, and its tokenizer and install the hooks.

    Raises ModelNotFoundError when it cannot be had and UnsupportedModelError when it cannot be steered exactly.
    """
    source = str(MINI) if str(model) == "mini" else str(model)
    if shard == WHOLE and device == "auto" and dist.is_torchelastic_launched():
        raise UsageError(
            "torchrun has started several processes, and each would load the whole model; start one without it: tp=N shards the model over "
            "N devices (`juice serve --tp N`), or name each process' device"
        )
    place = choose_device(device) if shard == WHOLE else own_device(device, shard)
    chosen_dtype = choose_dtype(dtype, place)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        network, report = AutoModelForCausalLM.from_pretrained(
            source, **options, dtype=chosen_dtype, use_safetensors=True, attn_implementation=attn_implementation, output_loading_info=True,
            **options_for(shard),
        )  # fmt: skip
        network = network.to(place)
    except torch.OutOfMemoryError as error:
        raise JuiceError(f"{model} does not fit on {place}; choose another --device or a smaller --dtype") from error
    except Exception as error:  # whatever a damaged folder makes the libraries raise
        raise ModelNotFoundError(_explain(str(model), error)) from error
    if absent := sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])]):
        raise ModelNotFoundError(
            f"the weights of {model} lack {len(absent)} tensors or have them in another shape ({absent[0]} first); get it again"
        )
    return prepare(network, tokenizer, model_id=str(model), revision=revision, folder=_weights_folder(source, revision), shard=shard)


def check_shardable(model: str | Path, n_ranks: int, *, revision: str | None = None) -> None:
    """Raise UnsupportedModelError for a model that cannot be sharded over so many ranks, before any weight is read."""
    try:
        config = AutoConfig.from_pretrained(str(MINI) if str(model) == "mini" else str(model), revision=revision, trust_remote_code=False)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ModelNotFoundError(_explain(str(model), error)) from error
    check_plan(network, resolve(network), n_ranks)


def prepare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_id: str | None = None,
    revision: str | None = None,
    folder: Path | None = None,
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
    model._juice_hooked = True
    hooks = RowRouting(layout), SteeringHooks(layout, shard), OutputPositions(layout)
    loaded = LoadedModel(model, tokenizer, layout, pattern, rope_switch(model), *hooks, identity, shard=shard)
    check_heads(loaded)
    return loaded


def choose_device(device: str) -> torch.device:
    """Turn `auto` into the best device there is; raises UsageError for one that there is not."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"device {device!r} cannot be used ({str(error).splitlines()[0]}); expected auto, cpu, cuda, cuda:N or mps"
        ) from error
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """Turn `auto` into float32 on a CPU and the stored dtype elsewhere; raises UsageError for an unknown name."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown; expected auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _weights_folder(source: str, revision: str | None) -> Path | None:
    config_file = cached_file(source, "config.json", revision=revision, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    return Path(config_file).parent if config_file else None


def _explain(model: str, error: Exception) -> str:
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)  # type: ignore[arg-type]
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if any(isinstance(cause, hub.GatedRepoError) for cause in causes) or "gated" in str(error):
        return f"{model} is gated: accept its licence on its hub page and set HF_TOKEN to a token that may read it"
    if Path(model).is_dir():
        return f"the folder {model} cannot be loaded: {reason}; expected config.json, tokenizer files and *.safetensors"
    if model.startswith((".", "/", "~")):
        return f"cannot load the model {model!r}: there is no such folder; give a local folder, a hub id, or `mini`"
    return f"cannot load the model {model!r}: {reason}; give a hub id (network, or its cache, needed), a local folder, or `mini`"
