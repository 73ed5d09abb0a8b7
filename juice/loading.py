"""`juice.load`: from a hub id, a folder or a model in memory to a checked SteeredModel.

The only place that calls `AutoModelForCausalLM.from_pretrained`. Weights come only from safetensors
files, and remote code is never run. `HF_TOKEN` and the hub's cache variables work as usual.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from juice.checks.at_load import checked_engine, one_if_small
from juice.checks.heads import check_heads
from juice.checks.linearity import why_not_linear
from juice.checks.two_runs import check_invariance, check_vllm
from juice.engine.contract import Engine
from juice.engine.load_options import EngineName, EngineOptions, Limits, LoadOptions
from juice.engine.own.thread import BatchingEngine
from juice.engine.vllm.launch import vllm_engine
from juice.errors import (
    JuiceError,
    ModelNotFoundError,
    RequestError,
    UnsupportedModelError,
    UsageError,
)
from juice.gguf import GgufFile, GgufModel, is_gguf, read_gguf
from juice.head_set.schema import Weights
from juice.model.identity import (
    explain,
    identify_model,
    sampled_rows,
    source_of,
    stored_tokenizer,
    weights_folder,
)
from juice.model.layout import Layout, resolve
from juice.model.loaded import LoadedModel, input_device
from juice.model.masks import attention_pattern, rope_switch
from juice.model.steering_hooks import ModelHooks
from juice.placement import (
    choose_device,
    choose_dtype,
    choose_map,
    choose_quantization,
    is_quantized,
)
from juice.processor import put_weights_first, use_threads, warn_if_busy
from juice.steered_model import SteeredModel


def prepare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_id: str | None = None,
    revision: str | None = None,
    folder: Path | None = None,
    file: GgufModel | None = None,
    allow_approximate: bool = False,
    dtype_reason: str | None = None,
) -> LoadedModel:
    """Find the heads of a transformers model in memory, install the hooks and check both.

    `model_id` is its hub id or folder; None: the name in its configuration. `folder` has its weight
    files, for the fingerprint, or it came out of `file`; else the weights in memory. Quantised
    activations are refused, or warned of with `allow_approximate`. `dtype_reason` is why the model
    has its dtype, where JuICE chose it by the CPU. Raises UnsupportedModelError for
    a model that cannot be steered exactly, or is steered or sharded already.
    """
    _check_untouched(model)
    layout, pattern = resolve(model), attention_pattern(model)
    identity = identify_model(
        model,
        layout,
        model_id=model_id or model.config.name_or_path or type(model).__name__,
        revision=revision,
        folder=folder,
        rows=file.rows if file else None,
    )
    if file is not None and identity.fingerprint is not None:
        weights = Weights(**file.origin, fingerprint=identity.fingerprint)
        identity = identity.model_copy(update={"weights": weights})
    model.eval()
    exact = _is_exact(model, layout, allow_approximate=allow_approximate)
    model._juice_hooked = True
    loaded = LoadedModel(
        model,
        tokenizer,
        layout,
        pattern,
        rope_switch(model),
        ModelHooks(layout),
        identity,
        modules=tuple(model.modules()),
        exact=exact,
        dtype_reason=dtype_reason,
    )
    with _undone_if_refused(loaded.release), one_if_small(model):
        check_heads(loaded)
    return loaded


@contextmanager
def _undone_if_refused(undo: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        undo()
        raise


def _check_untouched(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for a model in memory that is steered or sharded already."""
    if getattr(model, "_juice_hooked", False):
        raise UnsupportedModelError(
            "this model object is already steered; use the SteeredModel that was made from it"
        )
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise UnsupportedModelError(
            "this model object is sharded; give juice.load its folder or hub id, with "
            'engine="vllm" and tp=N'
        )


def _is_exact(model: PreTrainedModel, layout: Layout, *, allow_approximate: bool) -> bool:
    """Return whether the projections are linear; where not, warn if that is allowed, or raise."""
    with one_if_small(model):
        reason = why_not_linear(model, layout, input_device(model))
    if reason is None:
        return True
    problem = f"{type(model).__name__} cannot be steered exactly: {reason}"
    if not allow_approximate:
        raise UnsupportedModelError(
            f"{problem}. Its activations are quantised: "
            "load it with quantised weights alone (bnb-4bit, torchao-int8) or with none, "
            "or accept approximate steering with allow_approximate=True (--allow-approximate)"
        )
    warnings.warn(f"{problem}; every answer reports `exact: false`", stacklevel=3)
    return False


def load_model(model: str | Path, options: LoadOptions | None = None) -> LoadedModel:
    """Load a stored model and its tokenizer, and install the hooks; raises what `load` raises."""
    return prepare(**_read(model, options or LoadOptions()))


def _read(
    model: str | Path, options: LoadOptions, *, deterministic: bool = False
) -> dict[str, Any]:
    """Return the arguments of `prepare` for a stored model, which is then in memory."""
    if options.device == "auto" and dist.is_torchelastic_launched():
        raise UsageError(
            "torchrun has started several processes, and each would load the whole model; start "
            "one without it, or give each process its device"
        )
    if is_gguf(model):
        return _from_file(Path(model), options, deterministic=deterministic)
    folder, report = _from_pretrained(str(model), options, deterministic=deterministic)
    if absent := sorted([*report["missing_keys"], *map(str, report["mismatched_keys"])]):
        raise ModelNotFoundError(
            f"the weights of {model} lack {len(absent)} tensors or have them in another shape "
            f"({absent[0]} first); get them again"
        )
    if options.quantization is not None and not is_quantized(folder["model"]):
        name = type(folder["model"]).__name__
        raise UsageError(
            f"{options.quantization} quantises nothing in {name}, "
            "whose projections are not nn.Linear; choose another, such as bnb-4bit"
        )
    return {
        **folder,
        "model_id": str(model),
        "revision": options.revision,
        "folder": weights_folder(source_of(model), options.revision),
        "allow_approximate": options.allow_approximate,
    }


def _placed(options: LoadOptions) -> tuple[torch.device, dict[str, Any]]:
    """Return the device of the inputs, and from_pretrained's arguments for devices."""
    if options.device_map is None and options.offload_folder is not None:
        raise UsageError(
            "offload_folder is given, but no device_map; "
            "give one that puts something on disk, such as auto"
        )
    if options.device_map is not None and options.device != "auto":
        raise UsageError(f"device {options.device!r} and a device_map are given; drop one of them")
    device, placed = choose_device(options.device), dict[str, Any]()
    if options.device_map is not None:
        chosen = choose_map(options.device_map)
        placed = {"device_map": chosen, "offload_folder": options.offload_folder}
        if isinstance(chosen, dict) and {str(at) for at in chosen.values()} <= {"cpu", "disk"}:
            device = torch.device("cpu")
    return device, placed


def _from_pretrained(
    model: str, options: LoadOptions, *, deterministic: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arguments of `prepare` for a hub id or a folder, and transformers' loading report."""
    device, placed = _placed(options)
    source, name = source_of(model), options.quantization
    where: dict[str, Any] = {"revision": options.revision, "trust_remote_code": False}
    with _explained(model, device, placed):
        tokenizer = stored_tokenizer(source, **where)
        config = AutoConfig.from_pretrained(source, **where)
        packed = name is not None or getattr(config, "quantization_config", None) is not None
        placed["dtype"], reason = choose_dtype(
            options.dtype,
            device,
            stored=None if packed else getattr(config, "dtype", None),
            deterministic=deterministic,
        )
        if name is not None:
            placed["quantization_config"] = choose_quantization(name, config, placed["dtype"])
        if packed:
            placed.setdefault("device_map", {"": device})  # packed weights go there as they load
        network, report = AutoModelForCausalLM.from_pretrained(
            source,
            **where,
            **placed,
            use_safetensors=True,
            attn_implementation=options.attn_implementation,
            output_loading_info=True,
        )
        network = network if "device_map" in placed else network.to(device)
        put_weights_first(network)
        return {"model": network, "tokenizer": tokenizer, "dtype_reason": reason}, report


@contextmanager
def _explained(model: str, device: torch.device, placed: dict[str, Any]) -> Iterator[None]:
    """Turn what the libraries raise while they load a model into an error in words."""
    try:
        yield
    except JuiceError:
        raise
    except torch.OutOfMemoryError as error:
        raise JuiceError(
            f"{model} does not fit on {device}; "
            "choose another --device or --device-map, or a smaller --dtype"
        ) from error
    except Exception as error:  # whatever a damaged folder makes the libraries raise
        raise ModelNotFoundError(explain(model, error, placed)) from error


def _from_file(path: Path, options: LoadOptions, *, deterministic: bool) -> dict[str, Any]:
    """Return the arguments of `prepare` for a GGUF file."""
    if given := options.changed("revision", "quantization"):
        raise UsageError(f"{given[0]} is not for a .gguf file, which is as it is; drop it")
    device, placed = _placed(options)
    with _explained(str(path), device, placed):
        stored = GgufFile(path)
        dtype, reason = choose_dtype(
            options.dtype, device, stored=stored.dtype, deterministic=deterministic
        )
        file = read_gguf(
            stored,
            sampled_rows,
            attn_implementation=options.attn_implementation,
            dtype=stored.dtype if dtype == "auto" else dtype,
            **placed,
        )
        network = file.network if "device_map" in placed else file.network.to(device)
        put_weights_first(network)
    return {
        "model": network,
        "tokenizer": file.tokenizer,
        "model_id": file.name,
        "file": file,
        "allow_approximate": options.allow_approximate,
        "dtype_reason": reason,
    }


def load(
    model: str | Path | PreTrainedModel = "mini",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    head_sets: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    revision: str | None = None,
    attn_implementation: str | None = None,
    device_map: str | int | torch.device | Mapping[str, Any] | None = None,
    offload_folder: str | Path | None = None,
    quantization: str | None = None,
    allow_approximate: bool = False,
    allow_unverified: bool = False,
    limits: Limits | None = None,
    engine: EngineName = "own",
    tp: int = 1,
    pp: int = 1,
    window: str = "auto",
    twin: bool = True,
    deterministic: bool = False,
    vllm_args: Mapping[str, Any] | None = None,
) -> SteeredModel:
    """Load a model and check that it is steered exactly.

    Args:
        model: A hub id, a local folder, a `.gguf` file, `mini` (bundled), or a transformers model
            already in memory. A compiled model runs uncompiled.
        tokenizer: The tokenizer of a model in memory.
        head_sets: Folder of head sets; None: JUICE_HEAD_SETS, else ./head_sets, else the shipped
            ones.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        dtype: `auto`, `float32`, `bfloat16` or `float16`. `auto` is the stored one on a GPU. On a
            CPU it is float32; or bfloat16 where the CPU multiplies it, the weights are stored so or
            in a quantised file, and batches need not be deterministic, unless the check refuses it.
        threads: Threads on a CPU, of the whole process: 1 to its cores; None: PyTorch's choice.
        revision: Branch, tag or commit of a hub model.
        attn_implementation: `eager`, `sdpa` or another of transformers'.
        device_map: Accelerate's: auto, balanced, balanced_low_0, sequential, a device, or
            {module: device, cpu or disk}.
        offload_folder: Folder for the weights that the map puts on disk.
        quantization: `bnb-4bit`, `bnb-8bit` or `torchao-int8`.
        allow_approximate: Also steer a model with quantised activations (bnb-8bit); every answer
            then has `exact` false.
        allow_unverified: Also steer by head sets that do not say for which weights they were made,
            where architecture and shape fit.
        limits: Bounds of the engine's batches and memory.
        engine: `own`, or `vllm` where it is installed: faster on GPUs, on many devices.
        tp: Devices to shard each layer over (vllm only).
        pp: Stages to spread the layers over (vllm only).
        window: Layers that can be steered in two runs (vllm only): `auto` for those of the head
            sets for two runs, `none`, `all`, or the first and the last, such as `3-9`.
        twin: Whether the model is compiled without a second run, too, so that steps that need none
            cost no more (vllm only).
        deterministic: Give each request the same bits whatever else runs, at a price in throughput;
            checked at load.
        vllm_args: More of vLLM's own options, by name.

    Returns:
        The model with its engine and head sets; a `with` block closes it at the end.

    Raises:
        ModelNotFoundError: The model cannot be found or loaded.
        UnsupportedModelError: The model cannot be steered exactly.
        UsageError: Options contradict each other, or cannot be used here.
    """
    options = LoadOptions.of(
        device=device,
        dtype=dtype,
        threads=threads,
        revision=revision,
        attn_implementation=attn_implementation,
        device_map=str(device_map) if isinstance(device_map, torch.device) else device_map,
        offload_folder=offload_folder,
        quantization=quantization,
        allow_approximate=allow_approximate,
        allow_unverified=allow_unverified,
    )
    chosen = EngineOptions.of(
        engine=engine,
        tp=tp,
        pp=pp,
        window=window,
        twin=twin,
        deterministic=deterministic,
        vllm_args=dict(vllm_args or {}),
    )
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if isinstance(model, torch.nn.Module) and not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"a {type(model).__name__} is not a transformers model; give the one within, such as "
            "`get_base_model()` of a PEFT model, or what its `merge_and_unload()` returns"
        )
    if chosen.engine == "vllm":
        if isinstance(model, PreTrainedModel):
            raise UsageError("vLLM loads models itself; give juice.load a folder or a hub id")
        if is_gguf(model):
            raise UsageError(
                f"vLLM does not load {model}; `juice convert {model} FOLDER` writes a folder that "
                "it loads, and that the same head sets fit"
            )
        served = checked_vllm(str(model), options, chosen, head_sets=head_sets, limits=limits)
        return SteeredModel(served, head_sets, allow_unverified=allow_unverified)
    use_threads(threads)
    running = (
        _checked(_in_memory(model, tokenizer, options), limits, deterministic=deterministic)
        if isinstance(model, PreTrainedModel)
        else _from_storage(model, options, limits, deterministic=deterministic)
    )
    if threads is None and running.loaded.device.type == "cpu":
        warn_if_busy()
    if deterministic:
        with _undone_if_refused(running.close):
            check_invariance(running)
    return SteeredModel(running, head_sets, allow_unverified=allow_unverified)


def _checked(loaded: LoadedModel, limits: Limits | None, *, deterministic: bool) -> BatchingEngine:
    with _undone_if_refused(loaded.release):
        return checked_engine(loaded, limits, deterministic=deterministic)


def _from_storage(
    model: str | Path, options: LoadOptions, limits: Limits | None, *, deterministic: bool
) -> BatchingEngine:
    """Return the checked engine of a stored model; in float32 where `auto` is refused in half."""
    read = _read(model, options, deterministic=deterministic)
    half = str(read["model"].dtype).removeprefix("torch.")
    is_packed = options.quantization or getattr(read["model"].config, "quantization_config", None)
    try:
        return _checked(prepare(**read), limits, deterministic=deterministic)
    except UnsupportedModelError as error:
        if options.dtype != "auto" or half == "float32" or is_packed:
            raise
        refusal = str(error)
    read.clear()
    gc.collect()  # the weights, which the error's frames held: there may be no memory for two
    try:
        read = _read(model, LoadOptions.of(options, dtype="float32"), deterministic=deterministic)
        loaded = prepare(**{**read, "dtype_reason": f"the check at load refused {half}"})
        running = _checked(loaded, limits, deterministic=deterministic)
    except JuiceError as error:
        raise UnsupportedModelError(f"{refusal}; and in float32: {error}") from error
    warnings.warn(f"{model} is in float32, since {half} was refused: {refusal}", stacklevel=3)
    return running


def checked_vllm(
    model: str,
    options: LoadOptions,
    engine: EngineOptions,
    *,
    head_sets: str | Path | None = None,
    limits: Limits | None = None,
) -> Engine:
    """Start vLLM on a model and check that it is steered exactly; see `vllm_engine`."""
    running = vllm_engine(model, options, engine, head_sets=head_sets, limits=limits)
    with _undone_if_refused(running.close):
        check_vllm(running)
        if engine.deterministic:
            check_invariance(running)
    return running


def _in_memory(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, options: LoadOptions
) -> LoadedModel:
    if tokenizer is None:
        raise RequestError(
            "a model object comes without its tokenizer; pass tokenizer=...", param="tokenizer"
        )
    anyway = {"allow_approximate", "allow_unverified", "threads"}
    if options != LoadOptions(**options.model_dump(include=anyway)):
        raise UsageError(
            "a model object stays on its device, unchanged; "
            "give device, dtype and quantization to its from_pretrained"
        )
    return prepare(model, tokenizer, allow_approximate=options.allow_approximate)
