"""The placement of a model's weights: a device or a map, a dtype, a quantisation.

The map is Accelerate's: modules stay on a CPU or on disk and are fetched for each forward. So a
weight may be on the meta device between forwards: JuICE never reads one, and never moves the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel, TorchAoConfig

from juice.engine.load_options import DeviceMap
from juice.errors import UsageError
from juice.processor import bfloat16_unit

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZATIONS = {"bnb-4bit": "bitsandbytes", "bnb-8bit": "bitsandbytes", "torchao-int8": "torchao"}
BY_ITSELF = ("auto", "balanced", "balanced_low_0", "sequential")


def choose_device(device: str) -> torch.device:
    """Turn `auto` into the best device here; raises UsageError for one that cannot be used."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"device {device!r} cannot be used ({str(error).splitlines()[0]}); "
            "expected auto, cpu, cuda, cuda:N or mps"
        ) from error
    return chosen


def choose_dtype(
    dtype: str,
    device: torch.device,
    *,
    stored: torch.dtype | None = None,
    deterministic: bool = False,
    capabilities: Mapping[str, Any] | None = None,
) -> tuple[torch.dtype | str, str | None]:
    """Return the dtype to load in, and the reason where `auto` is bfloat16 on a CPU.

    Args:
        dtype: A name of `DTYPES`, or `auto`: the stored dtype on a GPU; on a CPU float32, or
            bfloat16 where the CPU multiplies it, the weights are stored so, and batches need not be
            deterministic.
        device: The device of the inputs.
        stored: The dtype in which the weights are stored; None where they are packed, or it is not
            known.
        deterministic: Whether a request must have the same bits in every batch.
        capabilities: The CPU's, by name; None for those of this one.

    Raises:
        UsageError: There is no such dtype.
    """
    if dtype != "auto":
        if dtype not in DTYPES:
            raise UsageError(f"dtype {dtype!r} is unknown; expected auto, {', '.join(DTYPES)}")
        return DTYPES[dtype], None
    if device.type != "cpu":
        return "auto", None
    unit = bfloat16_unit(capabilities)
    if unit is None or stored != torch.bfloat16 or deterministic:
        return torch.float32, None
    return torch.bfloat16, f"the CPU multiplies bfloat16 ({unit})"


def choose_map(device_map: DeviceMap) -> str | dict[str, Any]:
    """Return a device map for Accelerate: one of its own names, or devices by module.

    Raises UsageError for anything else, and where Accelerate is not installed.
    """
    _require("accelerate", "a device map")
    if isinstance(device_map, Mapping):
        return dict(device_map)
    if isinstance(device_map, int):
        return {"": device_map}
    if device_map in BY_ITSELF:
        return device_map
    if not device_map.startswith("{"):
        try:
            return {"": choose_device(device_map)}
        except UsageError as error:
            names = ", ".join(BY_ITSELF)
            raise UsageError(
                f"device_map {device_map!r} is unknown; "
                f'expected {names}, a device, or JSON such as {{"": "cpu"}}'
            ) from error
    try:
        return dict(json.loads(device_map))
    except ValueError as error:
        raise UsageError(f"device_map {device_map!r} is not JSON: {error}") from error


def choose_quantization(name: str, config: PretrainedConfig, dtype: torch.dtype | str) -> Any:
    """Return transformers' configuration of a quantisation.

    Raises UsageError for an unknown one, a model that was saved quantised, or a missing package.
    """
    if name not in QUANTIZATIONS:
        raise UsageError(f"quantization {name!r} is unknown; expected {', '.join(QUANTIZATIONS)}")
    if getattr(config, "quantization_config", None):
        raise UsageError(f"the model was saved quantised; load it without quantization={name}")
    _require("accelerate", f"quantization {name}")
    _require(QUANTIZATIONS[name], f"quantization {name}")
    if name == "torchao-int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    if name == "bnb-8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    stored = getattr(config, "dtype", None) or torch.bfloat16
    compute = dtype if isinstance(dtype, torch.dtype) else stored
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
    )


def is_quantized(model: PreTrainedModel) -> bool:
    """Return whether any weight is packed or of a class of its own."""
    weights = (getattr(module, "weight", None) for module in model.modules())
    return any(weight is not None and type(weight) is not nn.Parameter for weight in weights)


def _require(package: str, what: str) -> None:
    if find_spec(package) is None:
        raise UsageError(
            f"{what} needs {package}; install it with: pip install 'juice-steering[quant]'"
        )
