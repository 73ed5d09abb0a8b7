"""What the server refuses, wrong fields and malformed bodies alike, with the same envelope."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

import juice
from juice.errors import ContextLengthError
from juice.model.control_tokens import ControlTokens
from juice_server.http import StrictRequest
from juice_server.requests import Translator
from juice_server.routes.native import DetokenizeRequest, GenerateRequest
from juice_server.routes.openai import ChatRequest, CompletionRequest
from juice_server.settings import Settings

WRONG = {
    "empty_prompt": ({"prompt": ""}, 400, "prompt"),
    "no_prompt": ({}, 400, "prompt"),
    "prompt_list_empty": ({"prompt": []}, 400, "prompt"),
    "prompt_number": ({"prompt": 7}, 400, "prompt"),
    "too_many_prompts": ({"prompt": ["x"] * 1025}, 400, "prompt"),
    "steer_unknown": ({"prompt": "x", "steer": "truth"}, 400, "steer.target"),
    "steer_key_unknown": (
        {"prompt": "x", "steer": {"target": "context", "stength": 2}},
        400,
        "steer.stength",
    ),
    "field_unknown": ({"prompt": "x", "steerr": "context"}, 400, "steerr"),
    "beta_absurd": (
        {"prompt": "x", "steer": {"target": "context", "beta_plus": 1e9}},
        400,
        "steer.beta_plus",
    ),
    "beta_wrong_sign": (
        {"prompt": "x", "steer": {"target": "context", "beta_minus": 1}},
        400,
        "steer.beta_minus",
    ),
    "beta_without_target": (
        {"prompt": "x", "steer": {"target": "none", "beta_plus": 1}},
        400,
        "steer.target",
    ),
    "head_set_unknown": (
        {"prompt": "x", "steer": {"target": "context", "head_set": "nothing"}},
        404,
        "steer.head_set",
    ),
    "head_set_other_target": (
        {"prompt": "x", "steer": {"target": "context", "head_set": "parametric"}},
        400,
        "steer.head_set",
    ),
    "context_exceeded": ({"prompt": "word " * 2000}, 400, "prompt"),
    "max_tokens_exceeded": ({"prompt": "x", "max_tokens": 1100}, 400, "max_tokens"),
    "max_tokens_zero": ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    "min_tokens": ({"prompt": "x", "max_tokens": 5, "min_tokens": 6}, 400, "min_tokens"),
    "temperature": ({"prompt": "x", "temperature": 3}, 400, "temperature"),
    "n_unbounded": ({"prompt": "x", "n": 10_000}, 400, "n"),
    "n_beyond_the_settings": ({"prompt": "x", "n": 129}, 400, "n"),
    "logprobs_unbounded": ({"prompt": "x", "logprobs": 21}, 400, "logprobs"),
    "stops_unbounded": ({"prompt": "x", "stop": ["a"] * 17}, 400, "stop"),
    "stop_empty": ({"prompt": "x", "stop": [""]}, 400, "stop.0"),
    "stop_token_unknown": ({"prompt": "x", "stop_token_ids": [5000]}, 400, "stop_token_ids"),
    "stop_token_negative": ({"prompt": "x", "stop_token_ids": [-1]}, 400, "stop_token_ids.0"),
    "bias_unknown_token": ({"prompt": "x", "logit_bias": {"4096": 1}}, 400, "logit_bias"),
    "bias_absurd": ({"prompt": "x", "logit_bias": {"1": 1000}}, 400, "logit_bias.1"),
    "seed_huge": ({"prompt": "x", "seed": 2**70}, 400, "seed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_refused_with_the_field(client: httpx.Client, name: str) -> None:
    body, status, param = WRONG[name]
    for streamed in ({}, {"stream": True}):
        answer = client.post("/generate", json={**body, **streamed})
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param
    assert client.get("/readyz").status_code == 200


def test_a_prompt_over_the_context_has_openais_code(client: httpx.Client) -> None:
    for route in ("/generate", "/v1/completions"):
        error = client.post(route, json={"prompt": "word " * 2000}).json()["error"]
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "\\ud800": 1}',
        b'{"prompt": "x", "temperature": NaN}',
        b"[" * 5000,
        b'{"prompt": "x", "steer": {"target": "context", "strength": Infinity}}',
        b'{"prompt":' * 20000,
        b"",
        b"null",
        b"[]",
        b'"x"',
    ],
)
@pytest.mark.parametrize(
    "route",
    [
        "/generate",
        "/compare",
        "/origins",
        "/sweep",
        "/explain",
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
    ],
)
def test_a_body_that_is_not_a_json_request_is_a_400(
    client: httpx.Client, raw: bytes, route: str
) -> None:
    answer = client.post(route, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert "message" in answer.json()["error"]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "5000 digits"),
        (b'{"prompt": "x", "seed": 1, "seed": 2}', "seed is given twice; give it once"),
    ],
    ids=["digits", "twice"],
)
def test_what_no_field_can_be_is_refused_with_the_reason(
    client: httpx.Client, raw: bytes, reason: str
) -> None:
    answer = client.post("/generate", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert reason in message
    assert "Exceeds" not in message


TURN = {"role": "user", "content": "x"}
FUNCTION: dict[str, Any] = {"type": "function", "name": "f"}


def nested(depth: int) -> Any:
    """Return a list in a list, and so on: as many as the depth says."""
    made: list[Any] = []
    for _ in range(depth - 1):
        made = [made]
    return made


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/responses", {"input": "x", "metadata": {"a": "\ud800"}}),
        ("/v1/responses", {"input": "x", "metadata": {"\udfff": "a"}}),
        ("/v1/responses", {"input": "x", "instructions": "a\ud800b"}),
        ("/v1/chat/completions", {"messages": [TURN], "chat_template_kwargs": {"a": "\ud800"}}),
        ("/generate", {"prompt": "x", "stop": "\udc00"}),
    ],
)
def test_half_of_a_character_is_refused_wherever_it_is(
    client: httpx.Client, route: str, body: dict[str, Any]
) -> None:
    headers = {"content-type": "application/json"}
    answer = client.post(route, content=json.dumps(body), headers=headers)
    assert answer.status_code == 400, answer.text
    assert "is half of a character; send both halves" in answer.json()["error"]["message"]


def test_a_character_of_two_halves_is_one(client: httpx.Client) -> None:
    raw = json.dumps({"input": "x", "max_output_tokens": 1, "metadata": {"a": "🙂"}})
    assert "\\ud83d" in raw
    answer = client.post("/v1/responses", content=raw, headers={"content-type": "application/json"})
    assert answer.json()["metadata"] == {"a": "🙂"}


@pytest.mark.parametrize("depth", [101, 400, 900, 100_000])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": [TURN], "chat_template_kwargs": {"a": 0}}),
        (
            "/v1/responses",
            {"input": "x", "tools": [{**FUNCTION, "strict": True, "parameters": {"a": 0}}]},
        ),
        ("/v1/completions", {"prompt": "x", "guided_json": {"a": 0}}),
    ],
)
def test_what_is_nested_too_deeply_is_refused(
    client: httpx.Client, route: str, body: dict[str, Any], depth: int
) -> None:
    raw = json.dumps(body).replace('"a": 0', f'"a": {"[" * depth}{"]" * depth}')
    answer = client.post(route, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert "nested more than 100 levels deep" in answer.json()["error"]["message"]


def test_a_hundred_levels_are_taken(client: httpx.Client) -> None:
    for depth, status in ((98, 200), (99, 400)):  # within two objects
        options = {"a": nested(depth)}
        body = {"messages": [TURN], "max_tokens": 1, "chat_template_kwargs": options}
        assert client.post("/v1/chat/completions", json=body).status_code == status


def test_json_within_text_may_be_nested_too_deeply_too(client: httpx.Client) -> None:
    deep = '{"a":' * 5000
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}}
    bodies: list[dict[str, Any]] = [
        {"messages": [TURN, {"role": "assistant", "tool_calls": [call]}]},
        {"messages": [TURN], "vllm_xargs": {"steer": deep}},
        {"messages": [TURN], "structured_outputs": deep},
    ]
    for body in bodies:
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(("n_bytes", "is_let"), [(1_000, False), (1_000_000, True)])
def test_while_a_large_body_is_parsed_others_are_served(n_bytes: int, is_let: bool) -> None:
    """Nothing here waits for a client: another task goes on only where the parser lets it."""
    body = json.dumps({"a": [{}] * (n_bytes // 4)}).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def run() -> None:
        served: list[bool] = []
        asyncio.get_running_loop().call_soon(served.append, True)
        content = await StrictRequest({"type": "http", "headers": []}, receive).json()
        assert len(content["a"]) == n_bytes // 4
        assert bool(served) is is_let

    asyncio.run(run())


def test_a_body_that_is_not_utf_8_is_refused_in_words(client: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    for raw in (b'{"prompt": "\xff"}', b'{"prompt": "\xed\xa0\x80"}'):
        answer = client.post("/generate", content=raw, headers=headers)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith("the body is not UTF-8: ")
        assert message.endswith(" at byte 12; send UTF-8")


@pytest.mark.parametrize("field", ["guided_json", "response_format", "structured_outputs"])
def test_a_schema_may_be_true_but_not_false(field: str) -> None:
    for schema in (True, False):
        wrapped = {
            "guided_json": schema,
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
            "structured_outputs": {"json": schema},
        }
        body = {"prompt": "x", field: wrapped[field]}
        if schema:
            structure = CompletionRequest.model_validate(body).structure
            assert structure is not None
            assert structure.text == "{}"
        else:
            with pytest.raises(ValidationError, match="nothing is valid under this schema"):
                CompletionRequest.model_validate(body)


MANY_KEYS = {f"k{i}": i for i in range(50_000)}


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (CompletionRequest, {"prompt": ["a", *[1] * 50_000]}),
        (CompletionRequest, {"prompt": [*[1] * 50_000, "a"]}),
        (CompletionRequest, {"prompt": [["a"] * 50_000]}),
        (CompletionRequest, {"prompt": "x", **MANY_KEYS}),
        (GenerateRequest, {"prompt": [1] * 50_000}),
        (GenerateRequest, {"prompt": "x", **MANY_KEYS}),
        (GenerateRequest, {"prompt": "x", "steer": {"target": "context", **MANY_KEYS}}),
        (GenerateRequest, {"prompt": "x", "logit_bias": MANY_KEYS}),
        (GenerateRequest, {"prompt": "x", "stop": [1] * 50_000}),
        (GenerateRequest, {"prompt": "x", "stop_token_ids": ["a"] * 50_000}),
        (DetokenizeRequest, {"tokens": ["a"] * 50_000}),
        (ChatRequest, {"messages": [1] * 50_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 50_000}]}),
    ],
    ids=range(13),
)
def test_a_large_wrong_body_costs_a_few_errors_not_one_an_item(
    schema: type[BaseModel], body: dict
) -> None:
    """Validating a million wrong items one by one blocks the event loop for 25 seconds."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    assert caught.value.error_count() <= 5


def test_what_is_not_http_gets_the_envelope_too(client: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", client.base_url.port), timeout=30) as connection:
        connection.sendall(b"GARBAGE\r\n\r\n")
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    "text",
    [
        "a" * 400_000,
        "🏔\u200d" * 100_000,
        "\u0301" * 300_000,
        " " * 500_000,
        "<|end|>" * 50_000,
        "\0" * 2000,
    ],
)
def test_a_pathological_text_is_answered_and_the_probes_stay_fast(
    client: httpx.Client, text: str
) -> None:
    answer = client.post("/generate", json={"prompt": text})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert client.get("/healthz", timeout=5).status_code == 200


def test_unknown_routes_and_methods_use_the_same_envelope(client: httpx.Client) -> None:
    assert client.get("/nothing").json()["error"]["code"] == "not_found"
    assert client.get("/generate").json()["error"]["code"] == "method_not_allowed"
    assert client.get("/generate").status_code == 405
    assert client.post("/generate/x", json={"prompt": "x"}).status_code == 404


@pytest.mark.parametrize("text", ["The capital of Peru is Lima. ", "x", " ", "\U0001f642"])
def test_a_text_that_is_far_too_long_is_refused_by_its_beginning(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million characters take seconds to tokenize, in which everybody else would wait."""
    model = juice.load("mini")
    translator, tokenized = Translator(model, Settings()), list[int]()
    encode = ControlTokens.encode

    def counted(control: ControlTokens, text: str, **options: bool) -> list[int]:
        tokenized.append(len(text))
        return encode(control, text, **options)

    monkeypatch.setattr(ControlTokens, "encode", counted)
    with pytest.raises(ContextLengthError, match="more than twice"):
        translator.tokens((text * 1_000_000)[:1_000_000])
    assert 0 < sum(tokenized) < 20_000
    fits = (text * 1000)[:1000]
    assert translator.tokens(fits) == model.tokenize(fits)
    model.close()
