"""`juice serve`: start the HTTP server."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from juice.cli import console, options
from juice.errors import UsageError

EXAMPLE = (
    "curl -s {url}/generate{key} -H 'content-type: application/json' -d '"
    '{{"prompt": "The name of the capital city of Peru is Oslo. The name of the capital city of Peru is"{steer}, "max_tokens": 8}}\''
)


def run(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Option(help="A hub id, a local folder, or `mini` (the default).")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model; else what --model says.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja file instead of the tokenizer's own chat template, for /v1/chat/completions.")
    ] = None,
    head_sets: options.HeadSets = None,
    default_steer: Annotated[
        str | None, typer.Option(help="For requests that do not say: none (the default), context, parametric.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on, 127.0.0.1 by default; 0.0.0.0 for every interface.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, 8000 by default.", min=1, max=65535)] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that clients must send; may be repeated. Better: JUICE_API_KEYS.")
    ] = None,
    api_keys_file: Annotated[Path | None, typer.Option(help="A file with one key a line.")] = None,
    cors_origins: Annotated[
        str | None, typer.Option(help="Origins of web pages that may ask, separated by commas; none by default.")
    ] = None,
    max_connections: Annotated[int | None, typer.Option(help="Connections at once; 1000, or what the system allows.")] = None,
    max_batch: Annotated[int | None, typer.Option(help="Generations that run at once; 32.")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Generations that may wait; 256. Beyond it: 429.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and answer; else the model's context.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="Memory for keys and values, such as 8GiB; else a share of what is free.")] = None,
    max_prefill_tokens: Annotated[int | None, typer.Option(help="Prompt tokens between two decode steps; 2048.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="New tokens that a request may ask for; else the context.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of a prompt; else the context.")] = None,
    max_prompt_characters: Annotated[int | None, typer.Option(help="Characters of a prompt; 1,000,000.")] = None,
    max_prompts: Annotated[int | None, typer.Option(help="Prompts of a request; 32.")] = None,
    max_n: Annotated[int | None, typer.Option(help="Choices of a prompt; 8.")] = None,
    max_body: Annotated[str | None, typer.Option(help="Size of a request's body; 2MiB.")] = None,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds for a request; 300.")] = None,
    header_timeout: Annotated[float | None, typer.Option(help="Seconds for headers to arrive; 10.")] = None,
    body_timeout: Annotated[float | None, typer.Option(help="Seconds for a body to arrive; 30.")] = None,
    write_stall: Annotated[float | None, typer.Option(help="Seconds that a client may not read; 30.")] = None,
    drain: Annotated[float | None, typer.Option(help="Seconds to finish what runs after SIGTERM; 30.")] = None,
    log_prompts: Annotated[
        bool | None, typer.Option("--log-prompts", help="Put prompts into the log; they are kept out by default.")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Devices to shard the model over (tensor parallel); 1.", min=1)] = None,
    device: Annotated[str | None, typer.Option(help="auto (the default), cpu, cuda, cuda:N or mps.")] = None,
    device_map: Annotated[
        str | None, typer.Option(help="Over several devices, memory and disk: auto, balanced, sequential, or JSON {module: device}.")
    ] = None,
    offload_folder: Annotated[Path | None, typer.Option(help="Where the weights lie that a device map puts on disk.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto (the default), float32, bfloat16 or float16.")] = None,
    quantization: Annotated[str | None, typer.Option(help="bnb-4bit, torchao-int8; bnb-8bit with --allow-approximate.")] = None,
    allow_approximate: Annotated[
        bool | None, typer.Option("--allow-approximate", help="Steer a model with quantised activations too.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    attn_implementation: Annotated[str | None, typer.Option(help="eager, sdpa or another of transformers'.")] = None,
) -> None:
    """Serve a model over HTTP; /docs lists the routes. What is not given comes from JUICE_* or its default."""
    try:
        settings = import_module("juice_server.settings")
    except ImportError as error:
        raise UsageError("the server is not installed; install it with: pip install 'juice-steering[serve]'") from error
    given = {name: value for name, value in ctx.params.items() if value is not None}
    if keys := given.pop("api_key", None):
        given["api_keys"] = tuple(keys)
    chosen = settings.read(given)
    process = import_module("juice_server.process")  # PyTorch comes with it: what is wrong with the settings is said before
    options.quiet_libraries()
    url = f"http://{chosen.host}:{chosen.port}"
    console.note(f"juice: loading {chosen.model}")
    process.serve(chosen, on_ready=lambda loaded: console.note(_ready(loaded, url, has_keys=bool(chosen.keys()))))


def _ready(model: Any, url: str, *, has_keys: bool) -> str:
    """Say what was chosen, what steers, and how to ask."""
    engine, library = model.engine, model.head_sets
    names = [f"{name} ({own.target})" for name, own in sorted(library.by_name.items())]
    served = ", ".join(names) or "none: every request that steers is refused"
    unfit = f"; not for this model: {', '.join(sorted(library.unfit))}" if library.unfit else ""
    by_default = next((own for name, own in library.by_name.items() if name == own.target == "parametric"), None)
    own = by_default or next(iter(library.by_name.values()), None)
    asked: Any = {"target": own.target, "head_set": own.name} if own and not by_default else "parametric"
    if own and not own.betas():
        asked = {"target": own.target, "head_set": own.name, "beta_plus": 1, "beta_minus": -1}
    key = " -H 'authorization: Bearer KEY'" if has_keys else ""
    example = EXAMPLE.format(url=url, key=key, steer=f', "steer": {json.dumps(asked)}' if own else "")
    limits, per_token = engine.limits, engine.n_kv_bytes_per_token
    n_tokens = limits.kv_memory_bytes // per_token
    return (
        f"juice: {limits.max_batch} at a time, up to {limits.max_model_len or 'any number of'} tokens each; keys and values may take "
        f"{limits.kv_memory_bytes / 2**30:.2f} GiB, {n_tokens:,} tokens\n"
        f"juice: head sets in {library.folder.resolve()}: {served}{unfit}\n"
        f"juice: ready on {url}\n\n{example}\n"
    )
