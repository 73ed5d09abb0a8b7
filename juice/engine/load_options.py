"""The options of loading a model and of its engine, each once with its range, and the limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from juice.engine.sampling_options import Options
from juice.errors import RequestError

# One of Accelerate's names, a device, or a device for each module; as text, a mapping is JSON.
DeviceMap = str | int | Mapping[str, Any]


class LoadOptions(Options):
    """The revision of a model, its precision, and the devices that it goes to."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:N or mps.")
    device_map: DeviceMap | None = Field(
        default=None,
        description=(
            "Over several devices, memory and disk: "
            "auto, balanced, balanced_low_0, sequential, or JSON {module: device}."
        ),
    )
    offload_folder: Path | None = Field(
        default=None, description="Folder for the weights that a device map puts on disk."
    )
    dtype: str = Field(
        default="auto",
        description=(
            "auto (as stored on a GPU; float32 on a CPU, or bfloat16 where it multiplies that and "
            "the weights are stored so), float32, bfloat16 or float16."
        ),
    )
    threads: int | None = Field(
        default=None, description="Threads on a CPU, 1 to its cores; else PyTorch's choice."
    )
    quantization: str | None = Field(
        default=None, description="bnb-4bit, torchao-int8; bnb-8bit with --allow-approximate."
    )
    allow_approximate: bool = Field(
        default=False, description="Also steer a model with quantised activations."
    )
    allow_unverified: bool = Field(
        default=False,
        description="Also steer by head sets that do not say for which weights they were made.",
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub model.")
    attn_implementation: str | None = Field(
        default=None, description="eager, sdpa or another of transformers'."
    )


EngineName = Literal["own", "vllm"]


class EngineOptions(Options):
    """The engine, and the options that only vLLM has."""

    engine: EngineName = Field(
        default="own",
        description="own (any architecture, every feature) or vllm (many requests, many devices).",
    )
    tp: int = Field(
        default=1, ge=1, le=64, description="With vllm: devices to shard each layer over."
    )
    pp: int = Field(
        default=1, ge=1, le=64, description="With vllm: stages to spread the layers over."
    )
    window: str = Field(
        default="auto",
        description=(
            "With vllm: the layers that can be steered in two runs: auto (those of the head sets "
            "for two runs), none, all, or the first and the last, such as 3-9."
        ),
    )
    twin: bool = Field(
        default=True,
        description=(
            "With vllm: compile the model without a second run, too, so that steps that need none "
            "cost no more; takes twice the time and disk to compile."
        ),
    )
    deterministic: bool = Field(
        default=False,
        description="Each request gets the same bits whatever runs beside it; costs throughput.",
    )
    vllm_args: dict[str, Any] = Field(
        default_factory=dict, description="More of vLLM's own options, as name=value; repeatable."
    )

    @field_validator("tp", "pp", "window", "twin", "vllm_args")
    @classmethod
    def _check_engine(cls, value: Any, info: ValidationInfo) -> Any:
        default = cls.model_fields[info.field_name or ""].get_default(call_default_factory=True)
        if value != default and info.data.get("engine") == "own":
            raise ValueError('only vLLM can do that: choose engine="vllm" (--engine vllm)')
        return value


MAX_PREFILL_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of one engine.

    Args:
        max_batch: How many requests run at the same time.
        max_model_len: The tokens of a request, prompt and new; None for the model's context.
        kv_memory_bytes: The bytes for keys and values, over all devices; None for a share of the
            memory left free.
        max_prefill_tokens: What a step may cost, in tokens of a short prompt; None for 2,048. On a
            CPU our own engine then takes fewer for a large model: as many as multiply with 1e12
            weights in all, at least 128.

    Raises:
        RequestError: A bound is no whole number, or below 1.
    """

    max_batch: int = 64
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    max_prefill_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            if value is None and getattr(Limits, name) is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
                raise RequestError(
                    f"{name} is {value!r}; expected a whole number, at least 1", param=name
                )
            object.__setattr__(self, name, int(value))  # of NumPy's, too
