"""Loading a model: a hub id, a local folder, or `mini`. The only place that calls from_pretrained.

Weights come only from safetensors files, and remote code is never run. `HF_TOKEN` and the hub's
cache variables work as usual; a refusal by the hub is passed on with a remedy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import errors as hub
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from juice.errors import (
    JuiceError,
    ModelNotFoundError,
    UsageError,
    causes_of,
    first_line,
)
from juice.files import MINI
from juice.loading.placement import (
    choose_device,
    choose_dtype,
    choose_map,
    choose_quantization,
    is_quantized,
)
from juice.loading.prepared import prepare
from juice.model.loaded import LoadedModel
from juice.options import LoadOptions


def load_model(model: str | Path, options: LoadOptions | None = None) -> LoadedModel:
    """Load a model and its tokenizer, and install the hooks.

    Args:
        model: A hub id, a local folder, or `mini`.
        options: Where it goes and in which precision.

    Raises:
        ModelNotFoundError: The model cannot be found or loaded.
        UnsupportedModelError: The model cannot be steered exactly.
        UsageError: The options contradict each other, or cannot be used here.
    """
    options = options or LoadOptions()
    source = source_of(model)
    if options.device == "auto" and dist.is_torchelastic_launched():
        raise UsageError(
            "torchrun has started several processes, and each would load the whole model; start "
            "one without it, or give each process its device"
        )
    place, placed = _placed(options)
    tokenizer, network, report = _from_pretrained(str(model), source, options, place, placed)
    if absent := sorted(
        [*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])]
    ):
        raise ModelNotFoundError(
            f"the weights of {model} lack {len(absent)} tensors or have them in another shape "
            f"({absent[0]} first); get them again"
        )
    if options.quantization is not None and not is_quantized(network):
        name = type(network).__name__
        raise UsageError(
            f"{options.quantization} quantises nothing in {name}, "
            "whose projections are not nn.Linear; choose another, such as bnb-4bit"
        )
    return prepare(
        network,
        tokenizer,
        model_id=str(model),
        revision=options.revision,
        folder=weights_folder(source, options.revision),
        allow_approximate=options.allow_approximate,
    )


def source_of(model: str | Path) -> str:
    """Return the hub id or folder that a model's name stands for."""
    return str(MINI) if str(model) == "mini" else str(model)


def _placed(options: LoadOptions) -> tuple[torch.device, dict[str, Any]]:
    """Return the device of the inputs, and from_pretrained's arguments for devices and dtype."""
    if options.device_map is None and options.offload_folder is not None:
        raise UsageError(
            "offload_folder is given, but no device_map; "
            "give one that puts something on disk, such as auto"
        )
    if options.device_map is not None and options.device != "auto":
        raise UsageError(f"device {options.device!r} and a device_map are given; drop one of them")
    place = choose_device(options.device)
    placed: dict[str, Any] = {}
    if options.device_map is not None:
        placed = {
            "device_map": choose_map(options.device_map),
            "offload_folder": options.offload_folder,
        }
        if isinstance(placed["device_map"], dict) and {
            str(at) for at in placed["device_map"].values()
        } <= {"cpu", "disk"}:
            place = torch.device("cpu")
    return place, {**placed, "dtype": choose_dtype(options.dtype, place)}


def _from_pretrained(
    model: str,
    source: str,
    options: LoadOptions,
    place: torch.device,
    placed: dict[str, Any],
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel, dict[str, Any]]:
    where: dict[str, Any] = {"revision": options.revision, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
        config = AutoConfig.from_pretrained(source, **where)
        placed |= _quantized(options.quantization, config, placed, place)
        network, report = AutoModelForCausalLM.from_pretrained(
            source,
            **where,
            **placed,
            use_safetensors=True,
            attn_implementation=options.attn_implementation,
            output_loading_info=True,
        )
        return tokenizer, network if "device_map" in placed else network.to(place), report
    except JuiceError:
        raise
    except torch.OutOfMemoryError as error:
        raise JuiceError(
            f"{model} does not fit on {place}; "
            "choose another --device or --device-map, or a smaller --dtype"
        ) from error
    except Exception as error:  # whatever a damaged folder makes the libraries raise
        raise ModelNotFoundError(explain(model, error, placed)) from error


def _quantized(
    name: str | None, config: PretrainedConfig, placed: dict[str, Any], place: torch.device
) -> dict[str, Any]:
    """Return from_pretrained's arguments for a quantisation, requested or stored.

    Packed weights go to their device as they load.
    """
    if name is None and getattr(config, "quantization_config", None) is None:
        return {}
    arguments = (
        {}
        if name is None
        else {"quantization_config": choose_quantization(name, config, placed["dtype"])}
    )
    return {**arguments, "device_map": placed.get("device_map", {"": place})}


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
    """Return why a model cannot be loaded, and what to do, from the error of the library."""
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
