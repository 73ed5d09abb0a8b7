"""What a request asks for, as far as its turn depends on it: the model, its rows, its cost.

The ingress has no tokenizer, so it takes four bytes of a body for a token. What a request really
took is known when it has ended, and is settled then.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.types import Scope

from juice.methods import STEER_TARGETS
from juice_server.errors import UnknownModelError
from juice_server.security import READING

BYTES_PER_TOKEN = 4
# New tokens where a body does not say how many, as the schemas have it.
BY_DEFAULT = {"/v1/completions": 16, "/v1/chat/completions": 512, "/v1/responses": 512}
OTHERWISE = 64
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
ONE_MODEL = "/v1/models/"
MAX_ROWS, MAX_COST = 1 << 17, 1 << 31


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks for.

    Args:
        model: The model's name, without a target to steer toward.
        generates: Whether it generates.
        n_rows: How many generations.
        cost: Their tokens, prompt and new, as estimated.
        priority: Lower goes first; None where the body names none.
    """

    model: str
    generates: bool
    n_rows: int = 1
    cost: int = 1
    priority: int | None = None


def read(scope: Scope, body: bytes, served: Collection[str]) -> Asked:
    """Return what a request asks for; what is wrong with its body is left to the replica.

    The model is what the body names, else `?model=`, else the path, else the first that is served.
    Raises UnknownModelError.
    """
    fields = _fields(body)
    model = _model(fields, scope, served)
    if scope["method"] != "POST" or scope["path"] in READING:
        return Asked(model=model, generates=False, cost=1 + len(body) // BYTES_PER_TOKEN)
    n_new = next((_number(fields[name]) for name in LIMITS if fields.get(name) is not None), None)
    if n_new is None:
        n_new = BY_DEFAULT.get(scope["path"], OTHERWISE)
    n_rows = _n_prompts(fields) * max(1, _number(fields.get("n")) or 1)
    priority = fields.get("priority")
    return Asked(
        model=model,
        generates=True,
        n_rows=min(n_rows, MAX_ROWS),
        cost=min(1 + len(body) // BYTES_PER_TOKEN + n_rows * max(0, n_new), MAX_COST),
        priority=priority if type(priority) is int else None,
    )


def without_model(query: bytes) -> bytes:
    """Return a query without the name of the model, which is for the ingress."""
    pairs = [(k, v) for k, v in parse_qsl(query.decode("latin-1"), True) if k != "model"]
    return urlencode(pairs).encode()


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _model(fields: dict[str, Any], scope: Scope, served: Collection[str]) -> str:
    query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
    name = fields.get("model")
    if not isinstance(name, str):
        name = query.get("model")
    if name is None and scope["path"].startswith(ONE_MODEL):
        name = scope["path"].removeprefix(ONE_MODEL)
    if name is None:
        return next(iter(served))
    plain, _, target = name.rpartition(":")
    for own in (name, plain if target in STEER_TARGETS else name):
        if own in served:
            return own
    raise UnknownModelError(
        f"the model {name!r} is not served; expected one of {', '.join(served)}, see /v1/models",
        param="model",
    )


def _n_prompts(fields: dict[str, Any]) -> int:
    """Return how many prompts there are; a list of numbers is one prompt of tokens."""
    prompts = fields.get("prompt")
    if not isinstance(prompts, list) or not prompts or isinstance(prompts[0], int):
        return 1
    return len(prompts)


def _number(value: Any) -> int | None:
    return value if type(value) is int else None
