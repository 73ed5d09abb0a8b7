"""Small doors: what clients send that is nearly right is served, or refused in words."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.serving import BEARER, KEYS, Server

BODY: dict[str, Any] = {"prompt": "The capital of Peru is", "max_tokens": 1}
USER = {"role": "user", "content": "x"}
CHAT: dict[str, Any] = {"model": "mini", "messages": [USER], "max_tokens": 1}
A_LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


def refused(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def test_a_compressed_body_is_refused_in_words(url: str) -> None:
    packed = gzip.compress(json.dumps(BODY).encode())
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    told = refused(httpx.post(f"{url}/generate", content=packed, headers=headers), 415)
    assert told == "the body is compressed (content-encoding: gzip); send it as it is"


def test_a_slash_at_the_end_changes_nothing(url: str) -> None:
    assert httpx.post(f"{url}/v1/chat/completions/", json=CHAT).status_code == 200
    assert httpx.get(f"{url}/v1/models/").json() == httpx.get(f"{url}/v1/models").json()


def test_a_slash_at_the_end_needs_the_same_key(served: Callable[..., Server]) -> None:
    """Kills: a scope that is looked up by another path than the one that is served."""
    url = served("--api-key", KEYS[0], "--api-key", KEYS[1]).url
    for path in ("/metrics/", "/v1/models/", "/v1/chat/completions/"):
        assert httpx.get(url + path).status_code == 401
    assert httpx.get(f"{url}/metrics/", headers=BEARER).status_code == 200


def test_a_proxys_prefix_is_taken_with_and_without_it(served: Callable[..., Server]) -> None:
    """Proxies send a path as it was, or without their prefix."""
    url = served("--root-path", "/juice", "--api-key", KEYS[0], "--api-key", KEYS[1]).url
    for prefix in ("", "/juice"):
        assert httpx.get(f"{url}{prefix}/healthz").status_code == 200
        assert httpx.get(f"{url}{prefix}/metrics").status_code == 401
        answer = httpx.post(f"{url}{prefix}/v1/chat/completions", json=CHAT, headers=BEARER)
        assert answer.status_code == 200
        assert "playground/main.js" in httpx.get(f"{url}{prefix}/").text
    assert "/juice/openapi.json" in httpx.get(f"{url}/docs").text
    assert httpx.get(f"{url}/openapi.json").json()["servers"] == [{"url": "/juice"}]


def test_the_page_answers_to_head(url: str) -> None:
    answer = httpx.head(url)
    assert answer.status_code == 200
    assert answer.headers["content-length"] == str(len(httpx.get(url).content))


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_a_seed_has_all_64_bits_and_the_next_one_wraps(url: str, seed: int) -> None:
    def texts(seed: int, n: int) -> list[str]:
        body = {**BODY, "max_tokens": 8, "temperature": 1.5, "seed": seed, "n": n}
        answer = httpx.post(f"{url}/generate", json=body).json()
        return [choice["text"] for choice in answer.get("choices") or [answer]]

    following = seed + 1 if seed < 0 else -(2**63)
    assert texts(seed, 2) == [*texts(seed, 1), *texts(following, 1)]


def test_an_empty_turn_of_the_assistant_is_taken_as_clients_replay_it(url: str) -> None:
    replayed = {"role": "assistant", "content": None, "tool_calls": []}
    body = {**CHAT, "messages": [USER, replayed, USER]}
    assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
    nothing = {**CHAT, "messages": [{**USER, "content": None, "tool_calls": []}]}
    assert "expected text" in refused(httpx.post(f"{url}/v1/chat/completions", json=nothing))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", True),
        ("max_tokens", "3"),
        ("max_tokens", 3.0),
        ("temperature", "1"),
        ("temperature", False),
        ("n", True),
        ("steer", {"target": "context", "strength": True}),
        ("steer", {"target": "context", "beta_plus": "2"}),
    ],
)
def test_a_number_is_a_number(url: str, field: str, value: Any) -> None:
    told = refused(httpx.post(f"{url}/generate", json={**BODY, field: value}))
    assert told.startswith((field, "strength is"))
    assert any(words in told for words in ("valid number", "valid integer", "expected a number"))


@pytest.mark.parametrize("name", ["openai/mini", "hosted_vllm/mini", "nope"])
def test_a_wrong_name_is_told_the_right_one(url: str, name: str) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", json={**CHAT, "model": name})
    assert "mini is, see /v1/models" in refused(answer, 404)


@pytest.mark.parametrize("schema", [A_LOOP, {"$ref": "#"}])
def test_references_in_a_loop_are_refused_in_words(url: str, schema: dict[str, Any]) -> None:
    answer = httpx.post(f"{url}/generate", json={**BODY, "guided_json": schema})
    assert "lead back to themselves" in refused(answer)
