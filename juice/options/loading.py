"""How a model is loaded: the options of `juice.load`, of the commands and of the server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from juice.options.base import Options

# One of Accelerate's names, a device, or a device for each module; as text, a mapping is JSON.
DeviceMap = str | int | Mapping[str, Any]


class LoadOptions(Options):
    """Where a model goes, in which precision, and which revision of it."""

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
