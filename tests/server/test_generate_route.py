"""The server's own routes: how each request is steered, what is refused, what is reported.

Also the mistakes that end the server at startup.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from pydantic import BaseModel, ValidationError

import juice
from juice_server.schemas.about import DetokenizeRequest
from juice_server.schemas.generate import GenerateRequest
from juice_server.schemas.openai import ChatRequest, CompletionRequest
from tests.support.serving import CONFLICT, Server, events, serving


def test_each_request_is_steered_as_it_asks(client: httpx.Client) -> None:
    texts = {}
    for steer in ("none", "context", "parametric"):
        answer = client.post(
            "/generate", json={"prompt": CONFLICT, "steer": steer, "max_tokens": 4}
        ).json()
        assert answer["steering"]["applied"] == (steer != "none")
        assert answer["steering"]["target"] == steer
        texts[steer] = answer["text"]
    assert texts["context"].startswith(" Oslo")
    assert texts["parametric"].startswith(" Lima")


def test_compare_shows_all_three_and_that_they_disagree(client: httpx.Client) -> None:
    answer = client.post("/compare", json={"prompt": CONFLICT, "max_tokens": 4, "top": 3}).json()
    assert list(answer["answers"]) == ["none", "context", "parametric"]
    assert answer["disagree"] is True
    for steer, own in answer["answers"].items():
        alone = client.post(
            "/generate", json={"prompt": CONFLICT, "steer": steer, "max_tokens": 4, "logprobs": 3}
        ).json()
        assert own["text"] == alone["text"]
        assert [token["id"] for token in own["first_token"]] == [
            token["id"] for token in alone["logprobs"][0]["top"]
        ]


def test_the_server_answers_what_the_library_generates(client: httpx.Client) -> None:
    model = juice.load("mini")
    prompts = [
        CONFLICT,
        "The official language of Brazil is",
        "Question: Who wrote the book Emma? Answer:",
    ]
    options = {
        "max_tokens": 12,
        "temperature": 0.8,
        "seed": 3,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
    }
    answer = client.post(
        "/generate",
        json={"prompt": prompts, "steer": {"target": "parametric", "strength": 0.5}, **options},
    ).json()
    completions = model.generate(prompts, steer="parametric", strength=0.5, **options)
    assert [choice["text"] for choice in answer["choices"]] == [c.text for c in completions]
    assert answer["usage"]["prompt_tokens"] == sum(c.n_prompt_tokens for c in completions)
    assert answer["usage"]["completion_tokens"] == sum(len(c.token_ids) for c in completions)


def test_choice_i_of_n_has_the_seed_plus_i(client: httpx.Client) -> None:
    body = {
        "prompt": [CONFLICT, "The official language of Brazil is"],
        "max_tokens": 10,
        "temperature": 1.5,
        "seed": 20,
    }
    together = client.post("/generate", json={**body, "n": 3}).json()["choices"]
    assert [choice["index"] for choice in together] == list(range(6))
    for i in range(3):
        alone = client.post("/generate", json={**body, "seed": 20 + i}).json()["choices"]
        assert [together[i]["text"], together[3 + i]["text"]] == [
            choice["text"] for choice in alone
        ]
    assert len({choice["text"] for choice in together}) > 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steer": "context"},
        {"temperature": 1.3, "seed": 4, "n": 3},
        {"stop": [" is", "s."], "temperature": 1.2, "seed": 9, "logprobs": 2},
        {"ignore_eos": True, "max_tokens": 40},
        {"prompt": [CONFLICT, "Tokyo", "Question: Who"], "temperature": 1.0, "seed": 0},
    ],
)
def test_a_stream_has_what_the_whole_answer_has(client: httpx.Client, options: dict) -> None:
    body = {"prompt": CONFLICT, "max_tokens": 16, **options}
    whole = client.post("/generate", json=body).json()
    with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *pieces, last = events(response)
    expected = whole.get(
        "choices", [{"index": 0, "text": whole["text"], "logprobs": whole.get("logprobs")}]
    )
    for choice in expected:
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        if "logprobs" in options:
            assert [score["id"] for piece in own for score in piece["logprobs"]] == [
                score["id"] for score in choice["logprobs"]
            ]
    assert last["usage"] == whole["usage"]
    assert last["steering"] == whole["steering"]
    assert last["finish_reason"] == whole["finish_reason"]


def test_strength_zero_is_not_applied_and_equals_no_steering(client: httpx.Client) -> None:
    plain = client.post("/generate", json={"prompt": CONFLICT, "max_tokens": 8}).json()
    zero = client.post(
        "/generate",
        json={"prompt": CONFLICT, "max_tokens": 8, "steer": {"target": "context", "strength": 0}},
    ).json()
    assert zero["steering"]["applied"] is False
    assert zero["text"] == plain["text"]


def test_logprobs_are_those_of_the_library_and_alternatives_are_the_likeliest(
    client: httpx.Client,
) -> None:
    answer = client.post(
        "/generate",
        json={"prompt": CONFLICT, "steer": "parametric", "max_tokens": 3, "logprobs": 4},
    ).json()
    model = juice.load("mini")
    completion = model.generate(CONFLICT, steer="parametric", max_tokens=3)[0]
    assert [score["logprob"] for score in answer["logprobs"]] == pytest.approx(
        completion.logprobs, abs=1e-5
    )
    best = model.next_token(CONFLICT, steer="parametric", top=4)
    assert [top["token"] for top in answer["logprobs"][0]["top"]] == [token for token, _ in best]


def test_tokenize_and_detokenize_are_each_others_inverse(client: httpx.Client) -> None:
    text = "Café, 東京 🏔 — naïve"
    answer = client.post("/tokenize", json={"text": text}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["texts"])
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["text"] == text
    assert client.post("/tokenize", json={"text": ""}).json()["tokens"] == []


def test_info_reports_the_model_its_limits_and_what_steers_it(client: httpx.Client) -> None:
    info = client.get("/info").json()
    assert info["model"]["name"] == "mini"
    assert info["limits"]["max_model_len"] == 512
    # Layers, keys and values, width, bytes.
    assert info["limits"]["kv_bytes_per_token"] == 6 * 2 * 192 * 4
    windows = {own["name"]: own["window"] for own in client.get("/v1/head_sets").json()["data"]}
    assert windows == {own["name"]: own["window"] for own in info["steering"]["head_sets"]}
    heads = juice.HeadSet.load("head_sets/mini/parametric").heads.minus
    assert windows["parametric"] == [min(h.layer for h in heads), max(h.layer for h in heads)]
    assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == [
        "mini",
        "mini:context",
        "mini:parametric",
    ]


def test_the_single_run_is_served_as_well_as_the_dual_run(client: httpx.Client) -> None:
    model = juice.load("mini")
    for method in ("juice", "june"):
        steer = juice.Steer(target="parametric", method=method, beta_minus=-1.5)
        body = {"prompt": CONFLICT, "max_tokens": 8, "logprobs": 0}
        answer = client.post(
            "/generate",
            json={**body, "steer": {"target": "parametric", "method": method, "beta_minus": -1.5}},
        ).json()
        assert answer["steering"]["method"] == method
        assert answer["steering"]["beta_minus"] == -1.5
        completion = model.generate(CONFLICT, steer=steer, max_tokens=8)[0]
        assert [score["logprob"] for score in answer["logprobs"]] == pytest.approx(
            completion.logprobs, abs=1e-5
        )


def test_a_head_set_of_another_model_is_listed_with_its_reason_and_never_steers(
    tmp_path: Path,
) -> None:
    shutil.copytree("head_sets/mini", tmp_path / "mini")
    other = tmp_path / "mini/context/head_set.json"
    content = json.loads(other.read_text())
    content["model"]["fingerprint"] = "sha256:" + "0" * 64
    other.write_text(json.dumps(content))
    with (
        serving("--head-sets", str(tmp_path), "--default-steer", "parametric") as running,
        httpx.Client(base_url=running.url) as client,
    ):
        body = {"prompt": CONFLICT, "max_tokens": 4}
        for steer in ("context", {"target": "context", "head_set": "context"}):
            refused = client.post("/generate", json={**body, "steer": steer})
            assert refused.status_code == 422, refused.text
            assert refused.json()["error"]["code"] == "head_set_mismatch"
        listed = client.get("/v1/head_sets").json()
        assert [own["name"] for own in listed["data"]] == ["parametric"]
        assert "fingerprint" in listed["unfit"][0]["reason"]
        assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == [
            "mini",
            "mini:none",
            "mini:parametric",
        ]
        by_default = client.post("/generate", json=body).json()
        assert by_default["text"].startswith(" Lima")
        assert by_default["steering"]["target"] == "parametric"
        assert (
            client.post("/generate", json={**body, "steer": "none"}).json()["steering"]["applied"]
            is False
        )
        assert (
            client.post("/v1/completions", json={**body, "model": "mini:context"}).status_code
            == 422
        )
        assert (
            client.post("/v1/completions", json={**body, "model": "mini:none"}).json()["steering"][
                "applied"
            ]
            is False
        )
        compared = client.post("/compare", json=body).json()
        assert list(compared["answers"]) == ["none", "parametric"]
        assert compared["disagree"] is None
        assert "parametric (parametric)" in running.errors(), "startup reports what steers"


WRONG = {
    "empty_prompt": ({"prompt": ""}, 400, "prompt"),
    "no_prompt": ({}, 400, "prompt"),
    "prompt_list_empty": ({"prompt": []}, 400, "prompt"),
    "prompt_number": ({"prompt": 7}, 400, "prompt"),
    "too_many_prompts": ({"prompt": ["x"] * 33}, 400, "prompt"),
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
    "context_exceeded": ({"prompt": "word " * 1000}, 400, "prompt"),
    "max_tokens_exceeded": ({"prompt": "x", "max_tokens": 600}, 400, "max_tokens"),
    "max_tokens_zero": ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    "min_tokens": ({"prompt": "x", "max_tokens": 5, "min_tokens": 6}, 400, "min_tokens"),
    "temperature": ({"prompt": "x", "temperature": 3}, 400, "temperature"),
    "n_unbounded": ({"prompt": "x", "n": 10_000}, 400, "n"),
    "n_beyond_the_settings": ({"prompt": "x", "n": 9}, 400, "n"),
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
        error = client.post(route, json={"prompt": "word " * 1000}).json()["error"]
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
        "<|endoftext|>" * 50_000,
        "\0" * 1000,
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
    assert client.post("/generate/", json={"prompt": "x"}).status_code == 404


def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_line(tmp_path: Path) -> None:
    server = Server("--model", str(tmp_path))
    assert server.process.wait(timeout=120) == 2
    assert "juice: error: the folder" in server.errors()
    assert "Traceback" not in server.errors()


def test_a_head_sets_folder_that_is_wrong_ends_the_server_with_one_line(tmp_path: Path) -> None:
    for folder, message in (
        (tmp_path / "nowhere", "does not exist"),
        (Path("head_sets/mini"), "give the folder above"),
    ):
        server = Server("--head-sets", str(folder))
        assert server.process.wait(timeout=120) == 2
        assert message in server.errors()


def test_a_default_steer_without_a_head_set_ends_the_server_with_one_line(tmp_path: Path) -> None:
    server = Server("--head-sets", str(tmp_path), "--default-steer", "context")
    assert server.process.wait(timeout=120) == 2
    assert "default_steer is context, but no head set" in server.errors()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-batch", "0"), "JUICE_MAX_BATCH"),
        (("--kv-memory", "much"), "JUICE_KV_MEMORY"),
        (("--api-keys-file", "/nowhere"), "/nowhere"),
        (("--default-steer", "truth"), "--default-steer"),
        (("--max-model-len", "513"), "context of 512"),
    ],
)
def test_a_wrong_setting_ends_the_server_with_one_line(
    arguments: tuple[str, ...], message: str
) -> None:
    server = Server(*arguments)
    assert server.process.wait(timeout=120) == 2
    assert message in server.errors()
    assert "Traceback" not in server.errors()


def test_a_port_that_is_taken_ends_the_server_with_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "juice.cli.main", "serve", "--port", str(port)]
        done = subprocess.run(
            command, env=dict(os.environ), capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 2
    assert "already in use" in done.stderr.lower()
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
