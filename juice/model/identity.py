"""The identity of a model, its description and its files, without loading its weights.

The identity of weights is the same in any folder, dtype or quantisation:

    fingerprint = SHA-256(config fields, then for the embedding and every projection of the layers:
    shape and sampled rows)

Rows are read as float32 from the safetensors files as stored, so the dtype a model is loaded in
does not matter, and packed or offloaded weights are never touched. A model built in memory is read
from memory if its weights are float32; otherwise it has no fingerprint. Nor does a folder that was
saved quantised: packed weights cannot be compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors as hub
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.utils import cached_file

from juice.engine.contract import ModelDescription
from juice.engine.load_options import LoadOptions
from juice.errors import ModelNotFoundError, causes_of, first_line
from juice.files import MINI
from juice.head_set.schema import ModelIdentity
from juice.model.layout import Layout, features, resolve, text_config

N_ROWS = 8
INDEX_FILE, WEIGHTS_FILE = "model.safetensors.index.json", "model.safetensors"
# From a tensor's name to its shape and sampled rows, [N_ROWS or fewer, ...]; None without it.
RowReader = Callable[[str], tuple[list[int], torch.Tensor] | None]


def identify_model(
    model: PreTrainedModel,
    layout: Layout,
    *,
    model_id: str,
    revision: str | None,
    folder: Path | None,
    rows: Mapping[str, tuple[list[int], torch.Tensor]] | None = None,
) -> ModelIdentity:
    """Return a model's identity, with the fingerprint of its weights.

    They are those in `folder`, or those of which `rows` has the sampled ones, or those in memory.
    """
    read = _rows_in_memory(model) if rows is None else rows.get
    if folder is not None:
        read = _rows_on_disk(model, folder)
    return ModelIdentity(
        id=model_id,
        revision=revision,
        architecture=type(model).__name__,
        n_layers=layout.n_layers,
        n_heads=layout.n_heads,
        fingerprint=_fingerprint(model, layout, read),
    )


def _fingerprint(model: PreTrainedModel, layout: Layout, read: RowReader) -> str | None:
    config = text_config(model)
    shape = [layout.n_layers, layout.n_heads, config.hidden_size, config.vocab_size]
    digest = hashlib.sha256(json.dumps([config.model_type, *shape]).encode())
    sampled = [
        model.get_input_embeddings(),
        *(m for layer in layout.layers for m in layer.layer.modules() if features(m)),
    ]
    if not getattr(config, "tie_word_embeddings", False):
        sampled.append(layout.output)
    names = {module: name for name, module in model.named_modules()}
    for number, module in enumerate(sampled):
        samples = read(f"{names[module]}.weight")
        if samples is None:
            return None
        shape, rows = samples
        digest.update(json.dumps([number, shape]).encode())
        digest.update(rows.to(torch.float32).contiguous().numpy().tobytes())
    return "sha256:" + digest.hexdigest()


def sampled_rows(n_rows: int) -> list[int]:
    """Return the numbers of the rows of a matrix that its fingerprint is made of."""
    return sorted({round(i * (n_rows - 1) / (N_ROWS - 1)) for i in range(N_ROWS)})


def _rows_in_memory(model: PreTrainedModel) -> RowReader:
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def read(name: str) -> tuple[list[int], torch.Tensor] | None:
        weight = parameters.get(name)
        if type(weight) is not nn.Parameter or weight.dtype != torch.float32 or weight.is_meta:
            return None
        return list(weight.shape), weight.detach()[sampled_rows(len(weight))].cpu()

    return read


def _rows_on_disk(model: PreTrainedModel, folder: Path) -> RowReader:
    files = _file_of_each_tensor(folder)
    # Checkpoints (gpt2, Pythia, multimodal models) may name tensors differently from modules;
    # transformers has the mapping.
    renamings = [
        step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)
    ]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    stored_as = {
        rename_source_key(s, renamings, [], model.base_model_prefix, parameters)[0]: s
        for s in files
    }

    def read(name: str) -> tuple[list[int], torch.Tensor] | None:
        stored = stored_as.get(name)
        if stored is None:
            return None
        with safe_open(files[stored], framework="pt") as file:
            weight = file.get_slice(stored)
            shape = list(weight.get_shape())
            rows = torch.cat([weight[i : i + 1] for i in sampled_rows(shape[0])])
        return (shape, rows) if rows.is_floating_point() else None

    return read


def _file_of_each_tensor(folder: Path) -> dict[str, Path]:
    index = folder / INDEX_FILE
    if index.exists():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    path = folder / WEIGHTS_FILE
    if not path.exists():
        return {}
    with safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)


def describe(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layout: Layout,
    identity: ModelIdentity,
    **how: Any,
) -> ModelDescription:
    """Return a model's description, also of one on the meta device.

    `how` are the fields of ModelDescription that the model does not know: how it runs.
    """
    config = text_config(model)
    lengths = (getattr(config, field, None) for field in ("max_position_embeddings", "max_seq_len"))
    stops = getattr(model.generation_config, "eos_token_id", None)
    # Those who tune a model for chats often change the tokenizer's alone.
    ends = [*(stops if isinstance(stops, list) else [stops]), tokenizer.eos_token_id]
    return ModelDescription(
        identity=identity,
        tokenizer=tokenizer,
        heads_per_layer=tuple(layer.n_heads for layer in layout.layers),
        max_positions=next((value for value in lengths if isinstance(value, int)), None),
        vocabulary_size=int(config.vocab_size),
        stop_token_ids=frozenset(
            token for token in ends if token is not None and 0 <= token < config.vocab_size
        ),
        **how,
    )


def source_of(model: str | Path) -> str:
    """Return the hub id or folder that a model's name stands for."""
    return str(MINI) if str(model) == "mini" else str(model)


def stored_tokenizer(source: str, **where: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a hub id or folder.

    Never that of the package mistral-common, where it is installed: it has no chat template, nor
    tokens to look at.
    """
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        source, mistral_format=False, **where
    )
    return tokenizer


def weights_folder(source: str, revision: str | None) -> Path | None:
    """Return the folder of a model's files; None where they are not on this machine."""
    config_file = cached_file(
        source,
        "config.json",
        revision=revision,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
    )
    return Path(config_file).parent if config_file else None


def explain(model: str, error: Exception, placed: dict[str, Any]) -> str:
    """Return the reason why a model cannot be loaded, and the remedy, from a library's error."""
    reason = first_line(error)
    if "gated" in str(error) or any(isinstance(e, hub.GatedRepoError) for e in causes_of(error)):
        return (
            f"{model} is gated: "
            "accept its licence on its hub page and set HF_TOKEN to a token that may read it"
        )
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():
        return (
            f"cannot load the model {model!r}: there is no such folder; "
            "give a local folder, a hub id, or `mini`"
        )
    if {"device_map", "quantization_config"} & placed.keys():
        return (
            f"{model} cannot be loaded with this device map or quantisation: {reason}; "
            "try it without"
        )
    if Path(model).is_dir():
        return (
            f"the folder {model} cannot be loaded: {reason}; "
            "expected config.json, tokenizer files and *.safetensors"
        )
    return (
        f"cannot load the model {model!r}: {reason}; "
        "give a hub id (network, or its cache, needed), a local folder, or `mini`"
    )


def describe_stored(model: str, options: LoadOptions, **how: Any) -> ModelDescription:
    """Return the description of a stored model: a hub id, a folder, or `mini`; see `describe`.

    Raises ModelNotFoundError, and UnsupportedModelError without heads that can be steered.
    """
    source = source_of(model)
    where: dict[str, Any] = {"revision": options.revision, "trust_remote_code": False}
    try:
        tokenizer = stored_tokenizer(source, **where)
        config = AutoConfig.from_pretrained(source, **where)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a damaged folder makes the libraries raise
        raise ModelNotFoundError(explain(model, error, {})) from error
    with suppress(OSError):  # a model without one stops where its configuration says
        network.generation_config = GenerationConfig.from_pretrained(source, **where)
    layout = resolve(network)
    identity = identify_model(
        network,
        layout,
        model_id=model,
        revision=options.revision,
        folder=weights_folder(source, options.revision),
    )
    return describe(network, tokenizer, layout, identity, **how)
