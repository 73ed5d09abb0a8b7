"""The identity of a model's weights, the same in any folder, dtype or quantisation.

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
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from juice.head_set import ModelIdentity
from juice.model.layout import Layout, features, text_config

N_ROWS = 8
INDEX_FILE, WEIGHTS_FILE = "model.safetensors.index.json", "model.safetensors"
RowReader = Callable[[str], tuple[list[int], torch.Tensor] | None]


def identify_model(
    model: PreTrainedModel,
    layout: Layout,
    *,
    model_id: str,
    revision: str | None,
    folder: Path | None,
) -> ModelIdentity:
    """Return a model's identity, with its fingerprint.

    Args:
        model: The model.
        layout: Its layers and heads.
        model_id: Its hub id, folder or name.
        revision: Its revision on the hub; None: not recorded.
        folder: The weight files to fingerprint; None: the weights in memory.
    """
    return ModelIdentity(
        id=model_id,
        revision=revision,
        architecture=type(model).__name__,
        n_layers=layout.n_layers,
        n_heads=layout.n_heads,
        fingerprint=_fingerprint(
            model, layout, _rows_on_disk(model, folder) if folder else _rows_in_memory(model)
        ),
    )


def _fingerprint(model: PreTrainedModel, layout: Layout, read: RowReader) -> str | None:
    config = text_config(model)
    fields = [
        config.model_type,
        layout.n_layers,
        layout.n_heads,
        config.hidden_size,
        config.vocab_size,
    ]
    digest = hashlib.sha256(json.dumps(fields).encode())
    sampled = [
        model.get_input_embeddings(),
        *(m for layer in layout.layers for m in layer.layer.modules() if features(m)),
    ]
    if not getattr(config, "tie_word_embeddings", False):
        sampled.append(layout.output)
    names = {module: name for name, module in model.named_modules()}
    for number, module in enumerate(sampled):
        found = read(f"{names[module]}.weight")
        if found is None:
            return None
        shape, rows = found
        digest.update(json.dumps([number, shape]).encode())
        digest.update(rows.to(torch.float32).contiguous().numpy().tobytes())
    return "sha256:" + digest.hexdigest()


def _sample(n_rows: int) -> list[int]:
    return sorted({round(i * (n_rows - 1) / (N_ROWS - 1)) for i in range(N_ROWS)})


def _rows_in_memory(model: PreTrainedModel) -> RowReader:
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def read(name: str) -> tuple[list[int], torch.Tensor] | None:
        weight = parameters.get(name)
        if (
            type(weight) is not nn.Parameter
            or weight.dtype != torch.float32
            or weight.device.type == "meta"
        ):
            return None
        return list(weight.shape), weight.detach()[_sample(len(weight))].cpu()

    return read


def _rows_on_disk(model: PreTrainedModel, folder: Path) -> RowReader:
    files = _file_of_each_tensor(folder)
    # Checkpoints (gpt2, Pythia, multimodal models) may name tensors differently from modules;
    # transformers has the mapping.
    renamings = [
        step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)
    ]
    parameters = dict.fromkeys(
        (name for name, _ in model.named_parameters(remove_duplicate=False)), True
    )
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
            rows = torch.cat([weight[i : i + 1] for i in _sample(shape[0])])
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
