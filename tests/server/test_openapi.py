"""The OpenAPI document, from which others generate their clients."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_pages_of_the_api_need_nothing_from_elsewhere(client: httpx.Client, path: str) -> None:
    page = client.get(path)
    assert page.status_code == 200
    files = re.findall(r"""(?:src|href)=["']([^"']+)""", page.text)
    assert len(files) >= 2
    for file in files:
        assert file.startswith("/"), f"{file} is elsewhere"
        assert client.get(file).status_code == 200


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
    assert "security" not in document["paths"]["/healthz"]["get"]
