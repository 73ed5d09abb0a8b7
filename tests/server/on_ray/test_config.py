"""The arguments of the application, the files in deploy/ray, and which model a request is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from juice.errors import UsageError
from juice_server.errors import UnknownModelError
from juice_server.on_ray import config
from juice_server.on_ray.config import deployment_name, model_of, without_model

SERVED = ("first", "org/second", "with:colon")
FILES = sorted((Path(__file__).parents[3] / "deploy" / "ray").glob("*.yaml"))


def test_a_models_settings_go_before_the_common_ones() -> None:
    read = config.read(
        {
            "settings": {"max_batch": 4, "api_keys": ["k"], "kv_memory": "1GiB"},
            "models": {"a": {"settings": {"max_batch": 8}}, "b": {}},
        }
    )
    a, b = read.of_model("a"), read.of_model("b")
    assert (a.max_batch, b.max_batch, b.kv_memory) == (8, 4, 1 << 30)
    assert (a.served_model_name, a.api_keys) == ("a", None)
    assert read.of_ingress().needs_key


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "models: Field required"),
        ({"models": {}}, "models: Dictionary should have at least 1"),
        ({"models": {"a": {"replicas": 3}}}, "models.a.replicas: Extra inputs"),
        ({"models": {"a": {"settings": {"max_bach": 3}}}}, "max_bach is not a setting"),
        ({"models": {"a": {"settings": {"max_batch": 0}}}}, "max_batch"),
        ({"models": {"a": {"settings": {"port": 8000}}}}, "port is not for Ray Serve: use"),
        ({"models": {"a": {"waiting_tokens": 3}}}, "models.a.waiting_tokens: Extra inputs"),
        ({"models": {"a": {"settings": {"api_keys": ["k"]}}}}, "api_keys holds for all models"),
    ],
)
def test_what_is_wrong_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config.read(arguments)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_files_configure_deployments_that_there_are(file: Path) -> None:
    (application,) = yaml.safe_load(file.read_text())["applications"]
    assert application["import_path"] == "juice_server.on_ray.application:application"
    read = config.read(application["args"])
    names = {deployment_name(name) for name in read.models}
    assert {deployment["name"] for deployment in application["deployments"]} <= names


def model(body: Any, path: str = "/generate", query: str = "") -> str:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return model_of({"path": path, "query_string": query.encode()}, content, SERVED)


@pytest.mark.parametrize(
    ("body", "path", "query", "expected"),
    [
        ({}, "/generate", "", "first"),
        ({"model": "org/second"}, "/v1/completions", "", "org/second"),
        ({"model": "org/second:context"}, "/v1/completions", "", "org/second"),
        ({"model": "org/second:none"}, "/v1/completions", "model=first", "org/second"),
        ({"model": "with:colon"}, "/v1/completions", "", "with:colon"),
        ({"model": None}, "/generate", "model=org/second", "org/second"),
        ({}, "/v1/models/org/second:parametric", "", "org/second"),
        ([1], "/generate", "", "first"),
        (b"{", "/generate", "", "first"),
        (b"[" * 100_000, "/generate", "model=org/second", "org/second"),
    ],
)
def test_the_model_is_named_by_the_body_the_query_or_the_path(
    body: Any, path: str, query: str, expected: str
) -> None:
    assert model(body, path, query) == expected


@pytest.mark.parametrize("name", ["secand", "first:sideways", ":context", ""])
def test_a_model_that_is_not_served_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnknownModelError, match="expected one of first, org/second"):
        model({"model": name})


def test_the_query_goes_on_without_the_model() -> None:
    assert without_model(b"model=first&a=1&b=&model=x") == b"a=1&b="
