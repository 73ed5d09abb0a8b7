"""The server's own routes: how each request is steered, and what is reported."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import httpx
import pytest

import juice
from juice.head_set.head_set import HeadSet
from tests.support.head_sets import MEASURED, change
from tests.support.serving import CONFLICT, events, serving


def test_each_request_is_steered_as_it_asks(client: httpx.Client) -> None:
    texts = {}
    for steer in ("none", "context", "parametric"):
        answer = client.post(
            "/generate", json={"prompt": CONFLICT, "steer": steer, "max_tokens": 4}
        ).json()
        assert answer["steering"]["applied"] == (steer != "none")
        assert answer["steering"]["target"] == steer
        texts[steer] = answer["text"]
    assert texts["context"].startswith(" Cairo")
    assert texts["parametric"].startswith(" Lima")


def test_compare_shows_all_three_and_that_they_disagree(client: httpx.Client) -> None:
    answer = client.post("/compare", json={"prompt": CONFLICT, "max_tokens": 4, "top": 3}).json()
    assert list(answer["answers"]) == ["none", "context", "parametric"]
    assert answer["disagree"] is True
    for steer, each in answer["answers"].items():
        alone = client.post(
            "/generate", json={"prompt": CONFLICT, "steer": steer, "max_tokens": 4, "logprobs": 3}
        ).json()
        assert each["text"] == alone["text"]
        assert [token["id"] for token in each["first_token"]] == [
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
        pieces_of_it = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces_of_it) == choice["text"]
        if "logprobs" in options:
            assert [score["id"] for piece in pieces_of_it for score in piece["logprobs"]] == [
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
    plain = {"text": text, "add_special_tokens": False}
    answer = client.post("/tokenize", json=plain).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["texts"])
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["text"] == text
    assert client.post("/tokenize", json={**plain, "text": ""}).json()["tokens"] == []


def test_a_text_is_tokenized_with_the_begin_token_unless_told_otherwise(
    client: httpx.Client,
) -> None:
    begin, plain = (
        client.post("/tokenize", json={"text": "Lima", **options}).json()
        for options in ({}, {"add_special_tokens": False})
    )
    assert begin["texts"][0] == "<|begin|>"
    assert begin["tokens"][1:] == plain["tokens"]


def test_info_reports_the_model_its_limits_and_what_steers_it(client: httpx.Client) -> None:
    info = client.get("/info").json()
    assert info["model"]["name"] == "mini"
    assert info["model"]["dtype_reason"] is None
    assert info["limits"]["max_model_len"] == 1024
    assert info["limits"]["max_prefill_tokens"] == 2048, "the number in force, which nobody chose"
    # Layers, in vLLM also those of companions; keys and values, key-value heads, width, bytes.
    first, last = info["engine"].get("window", (0, -1))
    n_layers = 6 + last - first + 1
    assert info["limits"]["kv_bytes_per_token"] == n_layers * 2 * 4 * 32 * 4
    windows = {each["name"]: each["window"] for each in client.get("/v1/head_sets").json()["data"]}
    assert windows == {
        head_set["name"]: head_set["window"] for head_set in info["steering"]["head_sets"]
    }
    shipped = juice.HeadSet.load("head_sets/mini/parametric").heads
    heads = [*shipped.plus, *shipped.minus]
    window = [min(h.layer for h in heads), max(h.layer for h in heads)]
    # In vLLM all requests have companions in the layers of all sets.
    assert windows["parametric"] == info["engine"].get("window", window)
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
    identity = HeadSet.load(tmp_path / "mini/context").model.model_dump()
    change(tmp_path / "mini/parametric", metrics={"validation_juice": MEASURED})
    change(tmp_path / "mini/context", model={**identity, "fingerprint": "sha256:" + "0" * 64})
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
        assert [each["name"] for each in listed["data"]] == ["parametric"]
        assert listed["data"][0]["harm"] == {"juice": MEASURED["harm"]}
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
        cost = "requests in two runs: layers 3 to 5: 3 of 6 layers work twice, at best 0.67 of"
        assert (cost in running.errors()) is (os.environ.get("JUICE_ENGINE") == "vllm")
