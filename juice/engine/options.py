"""Options with their ranges, each once: of sampling, of loading a model, and its limits.

Tokens are chosen in this order: a bias for single tokens; penalties for tokens that occurred
before; division by the temperature; the cuts to the `top_k` likeliest tokens, to the smallest set
that holds `top_p` of the mass, and to tokens with at least `min_p` of the likeliest one's
probability.

    repetition   logit / penalty if logit > 0 else logit * penalty   tokens of prompt and answer
    presence     logit - penalty                                     tokens of the answer
    frequency    logit - penalty * occurrences                       tokens of the answer

Unknown names and values out of range are refused. Python, the commands and the server take the
same options. The options of a request that are not about sampling are in `juice.engine.request`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from juice.errors import RequestError, first_problem


class Options(BaseModel):
    """Values with ranges; unknown names are refused. Python code makes them with `of`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    @classmethod
    def of(cls, options: Self | None = None, /, **values: Any) -> Self:
        """Return the options with these values, the others as in `options`, or by default.

        Raises RequestError, which names the first wrong one.
        """
        if options is not None and not values:
            return options
        try:
            return cls(**{**dict(options or ()), **values})
        except ValidationError as error:
            path, problem = first_problem(error)
            name = path.partition(".")[0]
            raise RequestError(
                f"{path} is {shortened(error.errors()[0]['input'])}: {problem}", param=name
            ) from error


MAX_BIASES = 1024
Bias = Annotated[float, Field(ge=-100, le=100)]


def _or_empty(biases: Any) -> Any:
    return {} if biases is None else biases


class SamplingOptions(Options):
    """The choice of the next token; the defaults take the likeliest one."""

    temperature: float = Field(default=0.0, ge=0, le=2, description="0 takes the likeliest token.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Sample from the smallest set with this mass."
    )
    top_k: int = Field(
        default=0,
        ge=-1,
        le=1_000_000,
        description="Sample from the k likeliest tokens; 0 or -1 for all.",
    )
    min_p: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Drop tokens below this share of the likeliest one's probability.",
    )
    repetition_penalty: float = Field(
        default=1.0,
        ge=0.01,
        le=100,
        description="Divides the logits of tokens that occurred before; 1 for none.",
    )
    presence_penalty: float = Field(
        default=0.0,
        ge=-2,
        le=2,
        description="Subtracted from the logits of tokens that are already in the answer.",
    )
    frequency_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="The same, once for each time that they occur."
    )
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_or_empty)] = Field(
        default_factory=dict,
        max_length=MAX_BIASES,
        description="Added to the logits of single tokens, by id.",
    )
    seed: int | None = Field(
        default=None, ge=-(2**63), lt=2**63, description="Seed of the sampling."
    )

    @property
    def changes_logits(self) -> bool:
        """Whether a bias or a penalty changes the logits before the choice."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.logit_bias)


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
        description="auto (as stored on a GPU, float32 on a CPU), float32, bfloat16 or float16.",
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

    def changed(self, *names: str) -> list[str]:
        """Return the options among these that are not at their defaults."""
        return [
            name for name in names if getattr(self, name) != type(self).model_fields[name].default
        ]


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
            "With vllm: the layers that can be steered: auto (those of the head sets), all, or the "
            "first and the last, such as 3-9."
        ),
    )
    deterministic: bool = Field(
        default=False,
        description="Each request gets the same bits whatever runs beside it; costs throughput.",
    )
    vllm_args: dict[str, Any] = Field(
        default_factory=dict, description="More of vLLM's own options, as name=value; repeatable."
    )

    @field_validator("tp", "pp", "window", "vllm_args")
    @classmethod
    def _check_engine(cls, value: Any, info: ValidationInfo) -> Any:
        default = cls.model_fields[info.field_name or ""].get_default(call_default_factory=True)
        if value != default and info.data.get("engine") == "own":
            raise ValueError('only vLLM can do that: choose engine="vllm" (--engine vllm)')
        return value


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of one engine.

    Args:
        max_batch: How many requests run at the same time.
        max_model_len: The tokens of a request, prompt and new; None for the model's context.
        kv_memory_bytes: The bytes for keys and values; None for a share of the memory left free.
        max_prefill_tokens: What a step may cost, in tokens of a short prompt.

    Raises:
        RequestError: A bound is below 1.
    """

    max_batch: int = 64
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    max_prefill_tokens: int = 2048

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise RequestError(f"{name} is {value}; expected at least 1", param=name)
