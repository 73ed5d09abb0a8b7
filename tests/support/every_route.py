"""Every route of the server: its list, and a request for each that does real work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from starlette.routing import Mount

PROMPT = "The capital of Peru is Cairo. The capital of Peru is"
CHAT = [{"role": "user", "content": "What is the capital of Peru?"}]
QUESTION = {"prompt": "The capital of Peru is", "context": "The capital of Peru is Cairo."}
BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/generate"): {"prompt": PROMPT, "steer": "parametric", "max_tokens": 4},
    ("POST", "/compare"): {**QUESTION, "max_tokens": 4},
    ("POST", "/origins"): {**QUESTION, "answers": [[300, 301]]},
    ("POST", "/sweep"): {**QUESTION, "target": "parametric", "strengths": [0, 1]},
    ("POST", "/explain"): {**QUESTION, "target": "parametric"},
    ("POST", "/v1/completions"): {"model": "mini:context", "prompt": PROMPT, "max_tokens": 4},
    ("POST", "/v1/chat/completions"): {"model": "mini", "messages": CHAT, "max_tokens": 4},
    ("POST", "/v1/responses"): {"model": "mini", "input": "Peru?", "max_output_tokens": 4},
    ("POST", "/v1/messages"): {"model": "mini", "messages": CHAT, "max_tokens": 4},
    ("POST", "/v1/messages/count_tokens"): {"model": "mini", "messages": CHAT},
    ("POST", "/tokenize"): {"text": PROMPT},
    ("POST", "/detokenize"): {"tokens": [300, 301]},
}
NAMES = {
    "/v1/models/{name:path}": "mini:context",
    "/v1/head_sets/{name}": "context",
    "/playground/{name}": "main.js",
    "/static-offline-docs": "/static-offline-docs/swagger-ui.css",
}


def routes_of(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Yield the method and the path of every route, those without a description, too."""
    routes = list(app.routes)
    while routes:
        route: Any = routes.pop(0)
        if (included := getattr(route, "original_router", None)) is not None:
            routes += included.routes
        elif isinstance(route, Mount):
            yield "GET", route.path
        else:
            yield from ((method, route.path) for method in sorted(route.methods))


def path_of(path: str) -> str:
    """Return a path that a route serves."""
    if (name := NAMES.get(path)) is None:
        return path
    return name if name.startswith("/") else f"{path.partition('{')[0]}{name}"
