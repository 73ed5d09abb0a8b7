"""`juice serve`: start the HTTP server."""

from __future__ import annotations

import os
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
    model: options.Model = "mini",
    head_sets: options.HeadSets = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.", min=0, max=65535)] = 8000,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    revision: options.Revision = None,
    attn_implementation: options.Attention = None,
) -> None:
    """Serve a model over HTTP: POST /generate, GET /healthz, GET /readyz."""
    try:
        server = import_module("juice_server.app")
    except ImportError as error:
        raise UsageError("the server is not installed; install it with: pip install 'juice-steering[serve]'") from error
    given = {
        "model": model, "head_sets": str(head_sets) if head_sets else None, "host": host, "port": str(port), "device": device,
        "dtype": dtype, "revision": revision, "attn_implementation": attn_implementation,
    }  # fmt: skip
    os.environ.update({f"JUICE_{name.upper()}": value for name, value in given.items() if value is not None})
    options.quiet_libraries()
    url = f"http://{host}:{port}"
    console.note(f"juice: loading {model}")
    server.serve(on_ready=lambda: console.note(f"juice: ready on {url}\n\n{EXAMPLE.format(url=url)}\n"))
