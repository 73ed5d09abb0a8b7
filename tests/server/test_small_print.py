"""What clients made for OpenAI or vLLM expect beyond the answer itself."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

import juice
from tests.support.serving import BEARER, CONFLICT, Server


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=BEARER, timeout=60) as client:
        yield client


def test_the_token_that_was_drawn_is_among_its_alternatives(http: httpx.Client) -> None:
    """At temperature 2 most drawn tokens are not among the likeliest two."""
    sampled = {"max_tokens": 30, "temperature": 2, "seed": 1}
    chat = http.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": CONFLICT}],
            "logprobs": True,
            "top_logprobs": 2,
            **sampled,
        },
    ).json()
    content = chat["choices"][0]["logprobs"]["content"]
    sizes = set()
    for token in content:
        pairs = [
            (top_logprob["token"], top_logprob["logprob"]) for top_logprob in token["top_logprobs"]
        ]
        assert (token["token"], token["logprob"]) in pairs
        sizes.add(len(pairs))
    assert sizes == {2, 3}
    completion = http.post(
        "/v1/completions", json={"prompt": CONFLICT, "logprobs": 2, **sampled}
    ).json()
    logprobs = completion["choices"][0]["logprobs"]
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert token in top


def test_balancers_and_clients_of_vllm_find_their_routes(http: httpx.Client) -> None:
    with httpx.Client(base_url=http.base_url) as bare:
        assert bare.get("/health").status_code == bare.get("/ping").status_code == 200
        assert bare.post("/ping").status_code == 200
        assert bare.get("/version").status_code == 401
    assert http.get("/version").json() == {"version": juice.__version__}


def test_tokenize_takes_what_vllm_takes(http: httpx.Client) -> None:
    text = http.post("/tokenize", json={"text": CONFLICT}).json()
    assert http.post("/tokenize", json={"prompt": CONFLICT, "model": "mini"}).json() == text
    messages = [{"role": "user", "content": CONFLICT}]
    chat = http.post("/tokenize", json={"messages": messages}).json()
    used = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()[
        "usage"
    ]["prompt_tokens"]
    assert chat["count"] == used > text["count"]
    back = http.post("/detokenize", json={"tokens": text["tokens"], "model": "mini"}).json()
    assert back["prompt"] == back["text"]
    for wrong in (
        {},
        {"text": "a", "messages": messages},
        {"text": "a", "add_generation_prompt": False},
        {"messages": messages, "add_special_tokens": True},
    ):
        assert http.post("/tokenize", json=wrong).status_code == 400


def test_tokenize_gives_the_tokens_that_the_same_chat_has(http: httpx.Client) -> None:
    function = {"name": "f", "description": "d", "parameters": {"properties": {"a": {}}}}
    open_turn = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    for fields in (
        {},
        {"add_generation_prompt": False},
        {"messages": open_turn, "continue_final_message": True},
        {"chat_template_kwargs": {"bos_token": "<|begin|><|begin|>"}},
        {"tools": [{"type": "function", "function": function}]},
    ):
        body = {"messages": [{"role": "user", "content": CONFLICT}], **fields}
        tokenized = http.post("/tokenize", json={**body, "return_token_strs": True}).json()
        used = http.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()["usage"]
        assert tokenized["count"] == used["prompt_tokens"], fields
        assert len(tokenized["token_strs"]) == tokenized["count"]
    assert http.post("/tokenize", json={"text": "a"}).json()["token_strs"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_header_says_what_was_applied_and_pages_may_read_it(
    http: httpx.Client, path: str, stream: bool
) -> None:
    body = {"prompt": CONFLICT, "max_tokens": 2, "stream": stream}
    origin = {"origin": "https://a.example"}
    steered = http.post(path, json={**body, "steer": "context"}, headers=origin)
    told = json.loads(steered.headers["x-juice-steering"])
    assert told == {
        "applied": True,
        "target": "context",
        "method": "juice",
        "head_set": "context",
        "strength": 1.0,
    }
    exposed = steered.headers["access-control-expose-headers"].split(", ")
    assert {"x-juice-steering", "x-request-id"} <= {*exposed}
    plain = http.post(path, json=body)
    assert json.loads(plain.headers["x-juice-steering"])["applied"] is False


def test_64_prompts_with_8_choices_each_are_one_request(http: httpx.Client) -> None:
    body = {"prompt": [f"{i} and" for i in range(64)], "n": 8, "max_tokens": 1}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 512


def test_answers_that_would_never_end_are_refused(http: httpx.Client) -> None:
    """Kills: 1,024 prompts of 128 choices each were taken, and nobody waits for so many."""
    for n_prompts, n, status in ((1024, 1, 200), (9, 114, 400), (1024, 128, 400)):
        body = {"prompt": ["a"] * n_prompts, "n": n, "max_tokens": 1}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == status, answer.text
        if status == 400:
            error = answer.json()["error"]
            assert error["param"] == "n"
            assert f"{n_prompts * n} answers in all; expected at most 1024" in error["message"]


@pytest.mark.parametrize("steer", ["context", '{"target": "context", "strength": 2}', None])
def test_vllms_own_place_for_steer_is_read(client: httpx.Client, steer: str | None) -> None:
    body = {"model": "mini", "prompt": "The capital of Peru is", "max_tokens": 2}
    answer = client.post("/v1/completions", json={**body, "vllm_xargs": {"steer": steer}})
    report = answer.json()["steering"]
    asked = json.loads(steer) if steer and steer[0] == "{" else {"target": steer or "none"}
    assert asked.items() <= report.items()


@pytest.mark.parametrize(
    "fields",
    [
        {"vllm_xargs": {"steer": "context", "other": 1}},
        {"vllm_xargs": {"steer": "context"}, "steer": "context"},
        {"vllm_xargs": {"steer": "{context"}},
        {"vllm_xargs": "context"},
    ],
    ids=str,
)
def test_what_else_stands_there_is_refused(client: httpx.Client, fields: dict) -> None:
    answer = client.post("/v1/completions", json={"model": "mini", "prompt": "x", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "vllm_xargs")
