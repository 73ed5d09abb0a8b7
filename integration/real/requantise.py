"""A GGUF file with its weights stored in another way, written with the package gguf.

`python -m integration.real.requantise MODEL.gguf NEW.gguf F32|F16|Q8_0|Q4_0` keeps all fields, and
tensors one by one, so memory holds one of them. Only matrices are quantised. llama.cpp's own
quantiser is better: it takes other types for the embedding and for some layers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    dequantize,
    quantize,
)

FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}


def requantise(
    source: Path, target: Path, kind: str, changed: Mapping[str, Any] | None = None
) -> Path:
    """Write a file with its matrices as `kind`, one of FILE_TYPES, and vectors in float32.

    `changed` has other values for fields that the file has.
    """
    reader = GGUFReader(source)
    architecture = reader.get_field("general.architecture").contents()
    writer = GGUFWriter(target, architecture)
    values = {"general.file_type": FILE_TYPES[kind], **(changed or {})}
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        value = values.get(field.name, field.contents())
        of_array = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=of_array)
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        stored = _kind_of(shape, kind)
        block, n_bytes = GGML_QUANT_SIZES[stored]
        size = int(np.prod(shape)) // block * n_bytes
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), size, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        weight: np.ndarray[Any, Any] = dequantize(tensor.data, tensor.tensor_type)
        stored = _kind_of(weight.shape, kind)
        writer.write_tensor_data(quantize(np.asarray(weight, np.float32), stored))
    writer.close()
    return target


def _kind_of(shape: tuple[int, ...], kind: str) -> GGMLQuantizationType:
    """Return how to store a tensor: whole blocks of a matrix's rows as asked, else in float32."""
    asked = GGMLQuantizationType[kind]
    fits = len(shape) > 1 and shape[-1] % GGML_QUANT_SIZES[asked][0] == 0
    return asked if fits else GGMLQuantizationType.F32


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[3] not in FILE_TYPES:
        raise SystemExit(f"give MODEL.gguf, NEW.gguf and one of {', '.join(FILE_TYPES)}")
    sys.stdout.write(f"{requantise(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])}\n")
