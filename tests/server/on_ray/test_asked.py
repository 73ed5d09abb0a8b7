"""What the ingress reads of a request: its model, its rows, its cost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from juice_server.errors import UnknownModelError
from juice_server.on_ray.asked import Asked, read, without_model

SERVED = ("first", "org/second", "with:colon")


def asked(body: Any, path: str = "/generate", query: str = "", method: str = "POST") -> Asked:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    scope = {"method": method, "path": path, "query_string": query.encode()}
    return read(scope, content, SERVED)


@pytest.mark.parametrize(
    ("body", "path", "query", "model"),
    [
        ({}, "/generate", "", "first"),
        ({"model": "org/second"}, "/v1/completions", "", "org/second"),
        ({"model": "org/second:context"}, "/v1/completions", "", "org/second"),
        ({"model": "org/second:none"}, "/v1/completions", "model=first", "org/second"),
        ({"model": "with:colon"}, "/v1/completions", "", "with:colon"),
        ({"model": None}, "/generate", "model=org/second", "org/second"),
        ({}, "/v1/models/org/second:parametric", "", "org/second"),
    ],
)
def test_the_model_is_named_by_the_body_the_query_or_the_path(
    body: dict[str, Any], path: str, query: str, model: str
) -> None:
    assert asked(body, path, query).model == model


@pytest.mark.parametrize("name", ["secand", "first:sideways", ":context", ""])
def test_a_model_that_is_not_served_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnknownModelError, match="expected one of first, org/second"):
        asked({"model": name})


@pytest.mark.parametrize(
    ("body", "path", "n_rows", "n_new"),
    [
        ({"prompt": "x"}, "/generate", 1, 64),
        ({"prompt": ["x"] * 3, "n": 2, "max_tokens": 10}, "/generate", 6, 60),
        ({"prompt": [1, 2, 3], "max_tokens": 10}, "/v1/completions", 1, 10),
        ({"prompt": "x"}, "/v1/completions", 1, 16),
        ({"max_completion_tokens": 7}, "/v1/chat/completions", 1, 7),
        ({"input": "x"}, "/v1/responses", 1, 512),
        ({"prompt": [], "n": -3, "max_tokens": -5}, "/generate", 1, 0),
        ({"prompt": "x", "n": True, "max_tokens": "many"}, "/generate", 1, 64),
        ([1], "/generate", 1, 64),
        (b"{", "/generate", 1, 64),
        (b"[" * 100_000, "/generate", 1, 64),
    ],
)
def test_rows_and_cost_are_estimated_whatever_the_body_is(
    body: Any, path: str, n_rows: int, n_new: int
) -> None:
    size = len(body if isinstance(body, bytes) else json.dumps(body))
    own = asked(body, path)
    assert (own.n_rows, own.cost) == (n_rows, 1 + size // 4 + n_new)
    assert own.generates


@pytest.mark.parametrize(("method", "path"), [("GET", "/info"), ("POST", "/tokenize")])
def test_what_only_reads_costs_its_body_alone(method: str, path: str) -> None:
    own = asked({"text": "x" * 400, "max_tokens": 99}, path, method=method)
    assert not own.generates
    assert own.cost < 120


def test_the_query_goes_on_without_the_model() -> None:
    assert without_model(b"model=first&a=1&b=&model=x") == b"a=1&b="
