"""The OpenAPI document, from which others generate their clients."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.serving import BEARER, KEYS, serving


@pytest.fixture(scope="module")
def schemas(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()["components"]["schemas"]
    return found


@pytest.mark.parametrize("name", ["strength", "beta_plus", "beta_minus"])
def test_the_ranges_of_steer_are_those_that_are_served(
    name: str, schemas: dict[str, Any], client: httpx.Client
) -> None:
    own = schemas["Steer"]["properties"][name]
    for value, status in (
        (own["minimum"], 200),
        (own["maximum"], 200),
        (own["minimum"] - 0.01, 400),
        (own["maximum"] + 0.01, 400),
    ):
        steer = {"target": "parametric", name: value}
        body = {"prompt": "Peru", "steer": steer, "max_tokens": 1}
        assert client.post("/generate", json=body).status_code == status, value


def test_an_answer_has_every_field_of_its_steering(
    schemas: dict[str, Any], client: httpx.Client
) -> None:
    report = client.post("/generate", json={"prompt": "Peru", "max_tokens": 1}).json()["steering"]
    assert set(report) == set(schemas["SteeringReport"]["required"])


def test_a_head_set_is_given_by_name_alone(schemas: dict[str, Any], client: httpx.Client) -> None:
    assert not {"HeadSet", "HeadSetContent", "HeadLists", "Betas"} & set(schemas)
    steer = {"target": "context", "head_set": {"name": "context"}}
    answer = client.post("/generate", json={"prompt": "Peru", "steer": steer})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "steer.head_set"


def test_every_field_and_parameter_is_described(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    described = {
        f"{name}.{field}": own.get("description", "")
        for name, schema in document["components"]["schemas"].items()
        for field, own in schema.get("properties", {}).items()
    } | {
        f"{path} {own['name']}": own.get("description", "")
        for path, methods in document["paths"].items()
        for method in methods.values()
        for own in method.get("parameters", ())
    }
    assert len(described) > 350
    assert not [name for name, text in described.items() if not text.endswith(".")]
    assert "Args:" not in str(document)


def test_every_status_and_the_key_are_documented() -> None:
    with serving("--api-key", KEYS[0]) as server:
        document = httpx.get(f"{server.url}/openapi.json", headers=BEARER).json()
    assert document["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"):
        own = document["paths"][path]["post"]
        assert own["security"] == [{"HTTPBearer": []}]
        assert {"200", "400", "401", "403", "404", "413", "422", "429", "500", "503"} <= {
            *own["responses"]
        }
        schema = own["responses"]["422"]["content"]["application/json"]["schema"]
        assert schema["$ref"].endswith("/ErrorAnswer")
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        own = document["paths"][path]["post"]["responses"]
        refused = own["400"]["content"]["application/json"]["schema"]
        assert refused["$ref"].endswith("/MessagesErrorAnswer")
    assert "HTTPValidationError" not in str(document)
    assert "security" not in document["paths"]["/healthz"]["get"]
