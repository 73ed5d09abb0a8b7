"""GGUF files: llama.cpp's format, read into transformers' models behind a gate.

The reader of transformers drops in silence what it does not know: a tensor, the scaling of the
rotary embedding, a soft cap. Here a file is loaded only if every tensor and every field about the
model's shape is understood, and refused by name otherwise. Weights are dequantised one by one,
straight into the dtype of the model.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from juice.errors import ModelNotFoundError, UnsupportedModelError, UsageError, first_line
from juice.gguf_tokenizer import stop_ids, token_id, tokenizer_of

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

# From a field of the file, without its architecture, to that of a configuration.
FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# What other functions here read, or what must only agree with the rest.
READ_ELSEWHERE = {"vocab_size", "attention.value_length", "rope.dimension_count", "rope.freq_base"}
SCALING = {"rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"}
SLIDING = {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"}


@dataclass(frozen=True)
class Architecture:
    """What files of an architecture may say, beside the fields that all have.

    Args:
        model_type: The name in transformers.
        fields: More fields of the file, to those of a configuration.
        also: Fields that are read by a function of this module.
        window_pattern: Every how many layers one sees everything; 0: no sliding windows.
    """

    model_type: str
    fields: dict[str, str]
    also: frozenset[str] = frozenset()
    window_pattern: int = 0


ARCHITECTURES = {
    "llama": Architecture("llama", {}, frozenset(SCALING)),
    "qwen2": Architecture("qwen2", {}, frozenset(SCALING)),
    "qwen3": Architecture("qwen3", {}, frozenset(SCALING)),
    "gemma2": Architecture("gemma2", CAPS, frozenset(SLIDING), window_pattern=2),
    "gemma3": Architecture("gemma3_text", CAPS, frozenset(SLIDING | SCALING), window_pattern=6),
}


def is_gguf(model: object) -> bool:
    """Return whether a model's name is the path of a GGUF file."""
    return isinstance(model, str | Path) and str(model).endswith(".gguf")


class GgufFile:
    """A file of a model, or the parts of one: its fields, and its tensors as they are stored.

    Args:
        path: The file, or the first of its parts (`NAME-00001-of-00003.gguf`).

    Raises:
        ModelNotFoundError: There is no such file, or it is cut or of another format.
        UnsupportedModelError: Something in it is not understood.
        UsageError: The package `gguf` is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._readers = [_reader(part) for part in _parts(self.path)]
        name = self.field("general.architecture")
        if name not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{self.path.name} has the architecture {name!r}, which is not read from a file; "
                f"expected {', '.join(ARCHITECTURES)}. Give the model's folder or hub id instead"
            )
        self.architecture = ARCHITECTURES[name]
        self._prefix = f"{name}."
        count = sum(len(reader.tensors) for reader in self._readers)
        expected = self.field("split.tensors.count") or count
        if count != expected:
            raise ModelNotFoundError(
                f"{self.path.name} and its parts have {count} tensors, not {expected}; get all the "
                "parts again"
            )

    def field(self, name: str) -> Any:
        """Return a field's value; None without it."""
        found = self._readers[0].get_field(name)
        return None if found is None else found.contents()

    def of_model(self, name: str, default: Any = None) -> Any:
        """Return a field of the architecture, named without it."""
        value = self.field(self._prefix + name)
        return default if value is None else value

    @cached_property
    def tensors(self) -> dict[str, ReaderTensor]:
        """The tensors of all parts, by their names in the file."""
        return {tensor.name: tensor for reader in self._readers for tensor in reader.tensors}

    @property
    def name(self) -> str:
        """The model's name in the file, or the file's, as a slug."""
        names = (self.field("general.name") or "", self.path.stem, "model")
        slugs = (re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") for name in names)
        return next(filter(None, slugs))

    @property
    def quantization(self) -> str:
        """The type of most of the weights, such as Q4_K."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            kind = tensor.tensor_type.name
            sizes[kind] = sizes.get(kind, 0) + int(tensor.n_elements)
        return max(sizes, key=lambda kind: sizes[kind])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of its weights; bfloat16 for those that are quantised."""
        whole = {"F32": torch.float32, "F16": torch.float16}
        return whole.get(self.quantization, torch.bfloat16)

    @property
    def sha256(self) -> str:
        """The hash of its bytes, those of its parts one after the other."""
        digest = hashlib.sha256()
        for part in _parts(self.path):
            with part.open("rb") as content:
                while block := content.read(1 << 20):
                    digest.update(block)
        return f"sha256:{digest.hexdigest()}"

    def check_fields(self) -> None:
        """Raise UnsupportedModelError for a field of the architecture that nothing here reads."""
        known = FIELDS.keys() | self.architecture.fields.keys() | READ_ELSEWHERE
        known |= self.architecture.also
        for name in self._readers[0].fields:
            if name.startswith(self._prefix) and name.removeprefix(self._prefix) not in known:
                raise UnsupportedModelError(
                    f"{self.path.name} says {name} = {self.field(name)!r}, which would be "
                    "ignored; give the model's folder or hub id instead"
                )


def _parts(path: Path) -> list[Path]:
    """Return the files of a model, all of which are there."""
    if not path.is_file():
        raise ModelNotFoundError(f"there is no file {path}; give the path of a .gguf file")
    split = re.fullmatch(r"(.*-)(\d{5})(-of-)(\d{5})(\.gguf)", path.name)
    if split is None:
        return [path]
    start, _, of, count, suffix = split.groups()
    parts = [path.with_name(f"{start}{i:05}{of}{count}{suffix}") for i in range(1, int(count) + 1)]
    if absent := [part.name for part in parts if not part.is_file()]:
        raise ModelNotFoundError(f"{path.name} has {count} parts, and {absent[0]} is not beside it")
    return parts


def _reader(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UsageError(
            "a .gguf file needs the package gguf; install it with: "
            "pip install 'juice-steering[gguf]'"
        ) from error

    class Reader(GGUFReader):  # type: ignore[misc]
        """Reads the fields from a plain array: a slice of a memory map takes five times as long."""

        def _build_fields(self, offs: int, count: int) -> Any:
            self.data: np.ndarray[Any, Any] = self.data.view(np.ndarray)
            return super()._build_fields(offs, count)

    try:
        reader = Reader(path)
    except Exception as error:  # whatever bytes of another format make numpy raise
        raise ModelNotFoundError(
            f"{path} is not a whole GGUF file ({first_line(error)}); get it again"
        ) from error
    if reader.byte_order == "S":
        raise UnsupportedModelError(
            f"{path} is big-endian, and this machine is not; get the file for such machines"
        )
    return reader


def config_of(file: GgufFile) -> PretrainedConfig:
    """Return the configuration that a file describes.

    Raises UnsupportedModelError for what it says and no configuration of transformers can.
    """
    file.check_fields()
    kind, tensors = file.architecture, file.tensors
    fields = FIELDS | kind.fields
    values = {ours: file.of_model(theirs) for theirs, ours in fields.items()}
    values = {name: value for name, value in values.items() if value is not None}
    n_heads = values["num_attention_heads"]
    head_dim = values.setdefault("head_dim", values["hidden_size"] // n_heads)
    values.setdefault("num_key_value_heads", n_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (size := file.of_model(name, head_dim)) != head_dim:
            raise UnsupportedModelError(
                f"{file.path.name} has {name} {size}, and heads of size {head_dim}; "
                "expected the same"
            )
    config = AutoConfig.for_model(
        kind.model_type,
        **values,
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        tie_word_embeddings="output.weight" not in tensors,
        rope_parameters=_rope(file),
        **(_sliding(file) if kind.window_pattern else {}),
        **_ids(file),
    )
    if kind.window_pattern:
        # The largest of either family scales by the width of a head in the residual stream.
        largest = values["num_hidden_layers"] == (46 if kind.model_type == "gemma2" else 62)
        config.query_pre_attn_scalar = values["hidden_size"] // n_heads if largest else head_dim
    return config


def _ids(file: GgufFile) -> dict[str, Any]:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    return {ours: token_id(file, name) for name, ours in names.items()}


def _rope(file: GgufFile) -> dict[str, Any]:
    """Return the parameters of the rotary embedding, for each kind of layer where they differ."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": file.of_model("rope.freq_base", 10_000.0),
    }
    scaling, factor = (
        file.of_model("rope.scaling.type", "none"),
        file.of_model("rope.scaling.factor", 1.0),
    )
    if scaling not in {"none", "linear"}:
        raise UnsupportedModelError(
            f"{file.path.name} scales its positions by {scaling!r}; expected linear or none. "
            "Give the model's folder or hub id instead"
        )
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": factor}
    if "rope_freqs.weight" in file.tensors:
        rope |= _frequency_factors(file, rope["rope_theta"])
    if file.architecture.model_type != "gemma3_text":
        return rope
    local = {"rope_type": "default", "rope_theta": file.of_model("rope.freq_base_swa", 10_000.0)}
    return {"full_attention": rope, "sliding_attention": local}


def _frequency_factors(file: GgufFile, theta: float) -> dict[str, Any]:
    """Return Llama 3's scaling, of which a file only has the factor of each frequency, [head / 2].

    Raises UnsupportedModelError where no such scaling gives these factors.
    """
    factors = torch.from_numpy(np.copy(file.tensors["rope_freqs.weight"].data)).double()
    waves = 2 * torch.pi * theta ** (torch.arange(len(factors)) / len(factors)).double()
    factor, low, high, length = float(factors.max()), 1.0, 4.0, 8192
    smooth = (length / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    expected = torch.where(
        waves > length / low, factor, torch.where(waves < length / high, 1.0, between)
    )
    if not torch.allclose(factors, expected, rtol=1e-4, atol=0.0):
        raise UnsupportedModelError(
            f"{file.path.name} scales the frequencies of its positions in a way that is not "
            "Llama 3's; give the model's folder or hub id instead"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }


def _sliding(file: GgufFile) -> dict[str, Any]:
    """Return the sliding windows, and the layers that have them."""
    pattern = file.of_model("attention.sliding_window_pattern", file.architecture.window_pattern)
    n_layers = file.of_model("block_count")
    slides = (
        [bool((i + 1) % pattern) for i in range(n_layers)]
        if isinstance(pattern, int)
        else [bool(value) for value in pattern]
    )
    if len(slides) != n_layers:
        raise UnsupportedModelError(
            f"{file.path.name} says of {len(slides)} layers whether their windows slide, and has "
            f"{n_layers}; get it again"
        )
    width = file.of_model("attention.sliding_window")
    if width is None and file.architecture.model_type != "gemma2":  # older files of which have none
        raise UnsupportedModelError(
            f"{file.path.name} does not say how wide its sliding windows are; get a newer file"
        )
    return {
        "sliding_window": width or 4096,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
    }


@dataclass(frozen=True)
class GgufModel:
    """A model out of a file, in memory.

    Args:
        name: Its name in the file, as a slug.
        network: The model.
        tokenizer: Its tokenizer, with the file's chat template.
        origin: The hash of its file, and how that stores the weights.
        rows: For each of its weight matrices, its shape and the sampled rows, [rows, ...], in
            float32: what its identity is made of.
    """

    name: str
    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    origin: dict[str, str]
    rows: dict[str, tuple[list[int], torch.Tensor]]


def read_gguf(
    file: GgufFile | str | Path, sample: Callable[[int], list[int]], **placed: Any
) -> GgufModel:
    """Load a model from a file.

    Args:
        file: The file, or its path, or that of the first of its parts.
        sample: From the number of rows of a matrix to those that its identity needs.
        placed: from_pretrained's arguments for devices, dtype and attention.

    Raises:
        ModelNotFoundError: There is no such file, or it is cut, or of another format.
        UnsupportedModelError: Something in it is not understood, so the model would be another.
        UsageError: The package `gguf` is not installed.
    """
    if not isinstance(file, GgufFile):
        file = GgufFile(file)
    config, tokenizer = config_of(file), tokenizer_of(file)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    dtype = placed.get("dtype")
    rows: dict[str, tuple[list[int], torch.Tensor]] = {}
    weights: dict[str, torch.Tensor] = {}
    for name, weight in _weights(file, empty):
        if weight.ndim > 1:
            rows[name] = list(weight.shape), weight[sample(len(weight))]
        weights[name] = weight.to(dtype) if isinstance(dtype, torch.dtype) else weight
    network, report = type(empty).from_pretrained(
        None, config=config, state_dict=weights, output_loading_info=True, **placed
    )
    if absent := sorted({*report["missing_keys"], *report["unexpected_keys"]}):
        raise UnsupportedModelError(
            f"{file.path.name} lacks {absent[0]}, or {type(network).__name__} has no place for it; "
            "give the model's folder or hub id instead"
        )
    network.generation_config.eos_token_id = stop_ids(file, tokenizer)
    origin = {"sha256": file.sha256, "quantisation": file.quantization}
    return GgufModel(file.name, network, tokenizer, origin, rows)


def _weights(file: GgufFile, empty: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a file's tensors in float32, by the names of the model's parameters.

    Raises UnsupportedModelError for one that the model has no place for.
    """
    from gguf import MODEL_ARCH_NAMES, dequantize, get_tensor_name_map

    architecture = file.field("general.architecture")
    process = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    processor = process(config=empty.config.to_dict())
    (kind,) = (kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, file.of_model("block_count"))
    places = {names.get_name(ours, (".weight", ".bias")): ours for ours in empty.state_dict()}
    for name, tensor in file.tensors.items():
        if name == "rope_freqs.weight":  # a part of the configuration
            continue
        if name not in places:
            raise UnsupportedModelError(
                f"{file.path.name} has a tensor {name}, which {type(empty).__name__} has no place "
                "for; give the model's folder or hub id instead"
            )
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{file.path.name} stores {name} as {tensor.tensor_type.name}, which the package "
                "gguf does not unpack; get the file in another quantisation, such as Q8_0"
            ) from error
        read = processor.process(weights=values, name=name)
        yield places[name], torch.from_numpy(np.array(read.weights, dtype=np.float32))
