"""The OpenAPI document, from which others generate their clients."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest

from tests.support.serving import Server


@pytest.fixture(scope="module")
def schemas(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()["components"]["schemas"]
    return found


@pytest.mark.parametrize("name", ["strength", "beta_plus", "beta_minus"])
def test_the_ranges_of_steer_are_those_that_are_served(
    name: str, schemas: dict[str, Any], client: httpx.Client
) -> None:
    field = schemas["Steer"]["properties"][name]
    documented = next(one for one in [field, *field.get("anyOf", ())] if "minimum" in one)
    for value, status in (
        (documented["minimum"], 200),
        (documented["maximum"], 200),
        (documented["minimum"] - 0.01, 400),
        (documented["maximum"] + 0.01, 400),
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
    kinds = schemas["Steer"]["properties"]["head_set"]["anyOf"]
    assert [kind["type"] for kind in kinds] == ["string", "null"]
    steer = {"target": "context", "head_set": {"name": "context"}}
    answer = client.post("/generate", json={"prompt": "Peru", "steer": steer})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "steer.head_set"


def test_every_field_and_parameter_is_described(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    described = {
        f"{name}.{field}": each.get("description", "")
        for name, schema in document["components"]["schemas"].items()
        for field, each in schema.get("properties", {}).items()
    } | {
        f"{path} {each['name']}": each.get("description", "")
        for path, methods in document["paths"].items()
        for method in methods.values()
        for each in method.get("parameters", ())
    }
    assert len(described) > 350
    assert not [name for name, text in described.items() if not text.endswith(".")]
    assert "Args:" not in str(document)


def test_every_status_and_the_key_are_documented(server: Server) -> None:
    # The server makes it when it is first asked for, which takes a second or more.
    document = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    assert document["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    assert document["components"]["securitySchemes"]["APIKeyHeader"]["name"] == "x-api-key"
    either = [{"HTTPBearer": []}, {"APIKeyHeader": []}]
    for path in ("/version", "/metrics"):
        operation = document["paths"][path]["get"]
        assert operation["security"] == either
        assert {*operation["responses"]} == {"200", "401", "403", "500"}
        refused = operation["responses"]["401"]["content"]
        assert refused["application/json"]["schema"]["$ref"].endswith("/ErrorAnswer")
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"):
        operation = document["paths"][path]["post"]
        assert operation["security"] == either
        assert {"200", "400", "401", "403", "404", "413", "415", "422", "429", "500", "503"} <= {
            *operation["responses"]
        }
        schema = operation["responses"]["422"]["content"]["application/json"]["schema"]
        assert schema["$ref"].endswith("/ErrorAnswer")
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        operation = document["paths"][path]["post"]["responses"]
        refused = operation["400"]["content"]["application/json"]["schema"]
        assert refused["$ref"].endswith("/MessagesErrorAnswer")
    assert "HTTPValidationError" not in str(document)
    assert "security" not in document["paths"]["/healthz"]["get"]


TURNS = [{"role": "user", "content": "What is the capital of Peru?"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
STEER = {"target": "context", "gate": "off"}
BRIEF = {"max_tokens": 40, "steer": STEER}
TOOL = {"name": "f", "parameters": SCHEMA}
# Requests whose answers together have every field.
ASKED: list[tuple[str, dict[str, Any] | None]] = [
    ("/generate", {"prompt": "Peru", **BRIEF, "logprobs": 2, "n": 2}),
    ("/compare", {"prompt": "Peru", "context": "Lima.", "max_tokens": 4, "logprobs": True}),
    ("/v1/completions", {"prompt": "Peru", **BRIEF, "logprobs": 2, "echo": True}),
    ("/v1/chat/completions", {"messages": TURNS, **BRIEF}),
    ("/v1/chat/completions", {"messages": TURNS, **BRIEF, "logprobs": True, "top_logprobs": 2}),
    (
        "/v1/chat/completions",
        {
            "messages": TURNS,
            **BRIEF,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required",
        },
    ),
    ("/v1/responses", {"input": "Peru?", **BRIEF, "top_logprobs": 2, "metadata": {"a": "b"}}),
    ("/v1/responses", {"input": "Peru?", "max_output_tokens": 1}),
    (
        "/v1/responses",
        {
            "input": "Peru?",
            **BRIEF,
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": {"type": "function", "name": "f"},
        },
    ),
    (
        "/v1/responses",
        {
            "input": "Peru?",
            **BRIEF,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        },
    ),
    ("/v1/messages", {"messages": TURNS, **BRIEF}),
    ("/v1/messages", {"messages": TURNS, **BRIEF, "stop_sequences": ["im", "ai"]}),
    (
        "/v1/messages",
        {
            "messages": TURNS,
            **BRIEF,
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": TURNS}),
    ("/tokenize", {"text": "Peru", "return_token_strs": True}),
    ("/detokenize", {"tokens": [300]}),
    *(
        (path, None)
        for path in (
            *("/v1/models", "/v1/models/mini:context", "/v1/head_sets", "/v1/head_sets/context"),
            *("/info", "/version", "/healthz", "/readyz", "/health", "/ping"),
        )
    ),
]
NAMED = {"/v1/models/mini:context": "/v1/models/{name}"}
NAMED["/v1/head_sets/context"] = "/v1/head_sets/{name}"


def closed(schema: Any) -> Any:
    """Return a schema in which an object has no fields but those that it lists."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    values = {name: closed(value) for name, value in schema.items()}
    return {"additionalProperties": False, **values} if "properties" in schema else values


@pytest.mark.parametrize(("path", "body"), ASKED, ids=str)
def test_every_field_of_an_answer_is_in_the_document(
    client: httpx.Client, path: str, body: dict[str, Any] | None
) -> None:
    document = client.get("/openapi.json").json()
    operation = document["paths"][NAMED.get(path, path)]["get" if body is None else "post"]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert "$ref" in schema, "an object of any fields is no description"
    answer = client.get(path) if body is None else client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    components = closed(document["components"]["schemas"])
    whole = {**schema, "components": {"schemas": components}}
    jsonschema.Draft202012Validator(whole).validate(answer.json())


def test_the_answers_headers_are_documented(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    for path in ("/generate", "/compare", "/v1/completions", "/v1/messages", "/v1/responses"):
        responses = paths[path]["post"]["responses"]
        assert {"x-juice-steering", "x-request-id"} == {*responses["200"]["headers"]}
        assert {"x-request-id", "retry-after"} == {*responses["429"]["headers"]}
        assert "[DONE]" in str(paths[path]["post"]), "what a stream sends is said"
    answer = client.post("/generate", json={"prompt": "Peru", "max_tokens": 1})
    assert {"x-juice-steering", "x-request-id"} <= {*answer.headers}
    assert "x-juice-steering" not in str(paths["/sweep"])
    metrics = paths["/metrics"]["get"]["responses"]["200"]["content"]
    assert [*metrics] == ["text/plain"]
    assert client.get("/metrics").headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Peru?"}),
        ("/v1/messages", {"messages": TURNS}),
        ("/v1/chat/completions", {"messages": TURNS}),
    ],
    ids=str,
)
def test_a_stream_ends_as_its_protocol_has_it(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    with client.stream("POST", path, json={**body, "max_tokens": 4, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    if path == "/v1/chat/completions":
        assert lines[-1] == "data: [DONE]"
    else:
        assert "data: [DONE]" not in lines
        assert lines[-2].removeprefix("event: ") in (
            "response.completed",
            "response.incomplete",
            "message_stop",
        )
