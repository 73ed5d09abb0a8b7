"""Which engine runs a model: the options of `juice.load`, of the commands and of the server."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from juice.options.base import Options

EngineName = Literal["own", "vllm"]


class EngineOptions(Options):
    """Which engine, and what only vLLM can do."""

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
