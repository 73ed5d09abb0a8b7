"""`juice serve`: start the HTTP server."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from juice.cli import console, options
from juice.errors import UsageError

EXAMPLE = (
    "curl -s {url}/generate -H 'content-type: application/json' -d '"
    '{{"prompt": "The name of the capital city of Peru is Oslo. The name of the capital city of Peru is", '
    '"steer": "parametric", "max_tokens": 8}}\''
)


def run(
    model: Annotated[str | None, typer.Option(help="A hub id, a local folder, or `mini` (the default).")] = None,
    head_sets: options.HeadSets = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on, 127.0.0.1 by default; 0.0.0.0 for every interface.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, 8000 by default.", min=1, max=65535)] = None,
    device: Annotated[str | None, typer.Option(help="auto (the default), cpu, cuda, cuda:N or mps.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto (the default), float32, bfloat16 or float16.")] = None,
    revision: options.Revision = None,
    attn_implementation: options.Attention = None,
) -> None:
    """Serve a model over HTTP: POST /generate, GET /healthz, GET /readyz. What is not given comes from JUICE_* or its default."""
    try:
        app, settings = import_module("juice_server.app"), import_module("juice_server.settings")
    except ImportError as error:
        raise UsageError("the server is not installed; install it with: pip install 'juice-steering[serve]'") from error
    given = {
        "model": model, "head_sets": str(head_sets) if head_sets else None, "host": host, "port": port, "device": device,
        "dtype": dtype, "revision": revision, "attn_implementation": attn_implementation,
    }  # fmt: skip
    chosen = settings.read({name: value for name, value in given.items() if value is not None})
    options.quiet_libraries()
    url = f"http://{chosen.host}:{chosen.port}"
    console.note(f"juice: loading {chosen.model}")
    app.serve(chosen, on_ready=lambda: console.note(f"juice: ready on {url}\n\n{EXAMPLE.format(url=url)}\n"))
