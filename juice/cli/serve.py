"""`juice serve`: start the HTTP server. Its flags are the server's settings, defined there only."""

from __future__ import annotations

import gc
import inspect
import json
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from juice import uncollected
from juice.cli import console, options
from juice.errors import UsageError

EXAMPLE = (
    "curl -s {url}/generate{key} -H 'content-type: application/json' -d '{{\"prompt\": \"The"
    ' capital of Peru is Cairo. The capital of Peru is"{steer}, "max_tokens": 8}}\''
)
EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
ApiKey = Annotated[
    list[str] | None,
    typer.Option(help="A key that clients must send; repeatable. Better: JUICE_API_KEYS."),
]


def _flags() -> list[inspect.Parameter]:
    """Return a flag for each setting; none where the server is not installed."""
    if any(find_spec(package) is None for package in ("pydantic_settings", "fastapi", "uvicorn")):
        return []
    settings = options.flags_of(import_module("juice_server.settings").Settings, optional=True)
    key = inspect.Parameter("api_key", options.BY_NAME, default=None, annotation=ApiKey)
    return [*settings, key]


FLAGS = _flags()


def run(**flags: Any) -> None:
    """Serve a model over HTTP (/docs lists the routes); JUICE_* variables set options, too."""
    if not FLAGS:
        raise UsageError(
            "the server is not installed; install it with: pip install 'juice-steering[serve]'"
        )
    given = {name: value for name, value in flags.items() if value is not None}
    if keys := given.pop("api_key", None):
        given["api_keys"] = tuple(keys)
    settings = import_module("juice_server.settings")
    chosen = settings.read(
        {name: options.parsed(settings.Settings, name, value) for name, value in given.items()}
    )
    # Imports PyTorch: wrong settings are reported before that.
    with uncollected():
        process = import_module("juice_server.process")
    gc.freeze()  # collections while it serves need not look at what stays
    options.quiet_libraries()
    logs = import_module("juice_server.telemetry.logs")
    logs.set_up(chosen.log_format)
    if chosen.log_format == "json":
        console.log_instead(logs.LOG)
    console.note(f"juice: loading {chosen.model}")
    process.serve(chosen, on_ready=lambda loaded: console.note(_ready(loaded, chosen)))


run.__signature__ = inspect.Signature(FLAGS)  # type: ignore[attr-defined]
run.__annotations__ = {flag.name: flag.annotation for flag in FLAGS}


def _ready(served: Any, settings: Any) -> str:
    """Return the lines that name a dtype chosen by the CPU, limits, head sets, an example call."""
    engine, library = served.engine, served.head_sets
    # Every interface is no address to connect to; the loopback is one of them.
    host = EVERY_INTERFACE.get(settings.host, settings.host)
    url = f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"
    also = "" if host == settings.host else f" (it listens on {settings.host}, every interface)"
    names = [f"{name} ({found.target})" for name, found in sorted(library.by_name.items())]
    served = ", ".join(names) or "none: every request that steers is refused"
    unfit = f"; not for this model: {', '.join(sorted(library.unfit))}" if library.unfit else ""
    by_default = library.named_after("parametric")
    shown = by_default or next(iter(library.by_name.values()), None)
    steer = ""
    if shown:
        asked: Any = {"target": shown.target, "head_set": shown.name}
        if not shown.betas():
            asked |= {"beta_plus": 1, "beta_minus": -1}
        elif by_default:
            asked = "parametric"
        steer = f', "steer": {json.dumps(asked)}'
    key = " -H 'authorization: Bearer KEY'" if settings.needs_key else ""
    example = EXAMPLE.format(url=url, key=key, steer=steer)
    limits, per_token = engine.limits, engine.n_kv_bytes_per_token
    n_tokens = limits.kv_memory_bytes // per_token
    model = engine.description
    why = f"juice: in {model.dtype}: {model.dtype_reason}\n" if model.dtype_reason else ""
    if engine.name == "vllm" and (window := engine.steerable_layers["juice"]):
        why += f"juice: requests in two runs: {console.working_twice(window, model.n_layers)}\n"
    return why + (
        f"juice: {settings.max_batch} at a time, up to {limits.max_model_len or 'any number of'} "
        f"tokens each; keys and values may take {limits.kv_memory_bytes / 2**30:.2f} GiB, "
        f"{n_tokens:,} tokens\n"
        f"juice: head sets in {library.folder.resolve()}: {served}{unfit}\n"
        f"juice: ready on {url}{also}, a page to try it in a browser\n\n{example}\n"
    )
