"""Heads, positions and schedules in the request, through every door."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

import juice
from tests.server.test_steer_doors import DOORS

# mini's own heads toward memory, by sign and by coefficient: the same steering, three times.
PLUS, MINUS = [[5, 7], [3, 6], [3, 7]], [[5, 0], [3, 4], [3, 2]]
BETAS = {"beta_plus": 1.5, "beta_minus": -1.0}
BY_SIGN = {"target": "parametric", "heads": {"plus": PLUS, "minus": MINUS}, **BETAS}
BY_COEFFICIENT = {
    "coefficients": [*([*head, 1.5] for head in PLUS), *([*head, -1.0] for head in MINUS)]
}


@pytest.fixture(scope="module")
def model() -> juice.SteeredModel:
    return juice.load("mini")


def test_the_heads_are_those_of_the_set_that_they_stand_for(model: juice.SteeredModel) -> None:
    """What the other tests rely on."""
    head_set = model.head_sets.get("parametric")
    assert [[*map(list, heads)] for _, heads in head_set.intervention("juice").heads] == [
        PLUS,
        MINUS,
    ]


@pytest.mark.parametrize("door", DOORS)
def test_heads_in_a_request_steer_as_their_head_set_does(client: httpx.Client, door: str) -> None:
    named = client.post(door, json={**DOORS[door], "steer": "parametric"})
    reports = []
    for steer in (BY_SIGN, BY_COEFFICIENT):
        answer = client.post(door, json={**DOORS[door], "steer": steer})
        assert answer.status_code == 200, answer.text
        assert "Lima" in answer.text
        assert "Lima" in named.text
        reports.append(answer.json()["steering"])
        assert json.loads(answer.headers["x-juice-steering"]).items() <= reports[-1].items()
    assert {report["head_set"] for report in reports} == {reports[0]["head_set"]}
    assert reports[0]["head_set"].startswith("inline:")
    assert [report["target"] for report in reports] == ["parametric", None]
    assert [report["n_heads"] for report in reports] == [6, 6]
    assert [report["applied"] for report in reports] == [True, True]


@pytest.mark.parametrize(
    "steer",
    [
        {**BY_COEFFICIENT, "strength": [1, 0.5]},
        {**BY_COEFFICIENT, "positions": "last", "method": "june"},
        {"target": "parametric", "positions": {"first_n_generated": 2}, "strength": [0, 3]},
        {**BY_SIGN, "positions": "generated"},
    ],
    ids=["schedule", "last", "first", "generated"],
)
def test_the_server_gives_what_the_library_gives(
    client: httpx.Client, model: juice.SteeredModel, steer: dict[str, Any]
) -> None:
    prompt = "The capital of Peru is Cairo. Which is it? The capital of Peru is"
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 1}
    answer = client.post("/generate", json={**body, "steer": steer}).json()
    given = {
        **steer,
        "strength": tuple(s) if isinstance(s := steer.get("strength", 1.0), list) else s,
    }
    each = model.generate(prompt, steer=juice.Steer(**given), max_tokens=6, ignore_eos=True)[0]
    assert answer["text"] == each.text
    found = [token["logprob"] for token in answer["logprobs"]]
    assert found == pytest.approx(each.logprobs, abs=1e-4)
    assert answer["steering"] == json.loads(json.dumps(each.steering.to_dict()))


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no target": ({}, "target", "name one"),
    "no such layer": ({"coefficients": [[6, 0, 1]]}, "coefficients", "6 layers (0-5)"),
    "no such head": ({"coefficients": [[0, 8, 1]]}, "coefficients", "8 heads (0-7)"),
    "below": ({"coefficients": [[-1, 0, 1]]}, "coefficients", "out of range"),
    "twice": ({"coefficients": [[1, 0, 1], [1, 0, 2]]}, "coefficients", "each head once"),
    "too large": ({"coefficients": [[1, 0, 101]]}, "coefficients", "-100 to 100"),
    "no number": ({"coefficients": [[1, 0, "1"]]}, "coefficients", "expected a number"),
    "no pair": ({**BY_SIGN, "heads": {"plus": [[1]]}}, "heads", "[layer, head]"),
    "another field": ({**BY_SIGN, "heads": {"both": [[1, 1]]}}, "heads", "minus"),
    "no beta": ({**BY_SIGN, "beta_plus": None}, "beta_plus", "give it"),
    "a beta too many": ({**BY_COEFFICIENT, "beta_plus": 1}, "beta_plus", "drop it"),
    "a set, too": ({**BY_SIGN, "head_set": "parametric"}, "heads", "keep one"),
    "a gate": ({**BY_SIGN, "gate": "auto"}, "gate", "given in the request"),
    "a gate of a schedule": (
        {"target": "parametric", "strength": [1, 2], "gate": "auto"}, "gate", "schedule"
    ),
    "a gate of positions": (
        {"target": "parametric", "positions": "last", "gate": "auto"}, "gate", "positions"
    ),
    "no positions": ({**BY_SIGN, "positions": "answer"}, "positions", "first_n_generated"),
    "none of the first": (
        {**BY_SIGN, "positions": {"first_n_generated": 0}}, "positions", "at least 1"
    ),
    "no strengths": ({**BY_SIGN, "strength": []}, "strength", "1 to 64"),
    "too many strengths": ({**BY_SIGN, "strength": [1] * 65}, "strength", "1 to 64"),
    "a strength below": ({**BY_SIGN, "strength": [1, -1]}, "strength", "0 to 100"),
    "a contrast": (
        {"target": "context", "method": "cad", "strength": [1, 2]}, "strength", "one number"
    ),
    "none": ({**BY_COEFFICIENT, "target": "none"}, "target", "name a target"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_steered_is_refused_in_words(client: httpx.Client, case: str) -> None:
    steer, field, words = REFUSED[case]
    for door in ("/generate", "/v1/chat/completions"):
        answer = client.post(door, json={**DOORS[door], "steer": steer})
        error = answer.json()["error"]
        assert answer.status_code == 400, answer.text
        assert error["param"].startswith(f"steer.{field}"), error
        assert words in error["message"], error


def test_layers_that_the_engine_does_not_steer_are_refused_with_the_flag(
    client: httpx.Client,
) -> None:
    """Our own engine steers all of them; vLLM those that its start has prepared."""
    steer = {"coefficients": [[0, 0, 1.0], [1, 0, 1.0]]}
    answer = client.post("/generate", json={**DOORS["/generate"], "steer": steer})
    if client.get("/info").json()["engine"]["name"] == "own":
        assert answer.json()["steering"]["applied"] is True
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (422, "head_set_mismatch")
    assert "--window 0-" in error["message"]


@pytest.mark.parametrize("door", DOORS)
def test_the_effect_of_steering_and_context_is_told_at_each_door(
    client: httpx.Client, door: str
) -> None:
    for steer, unsteered, steered in (("parametric", "C", "L"), ("none", "C", "C")):
        body = {**DOORS[door], "steer": steer, "explain": "effect"}
        effect = client.post(door, json=body).json()["steering"]["effect"]
        assert effect["unsteered"]["text"].strip() == unsteered
        assert effect["steered"]["text"].strip() == steered
        assert (effect["divergence"] > 1) is (steer == "parametric")
        assert effect["without_context"] is None


def test_a_context_that_is_apart_is_compared_with_none(client: httpx.Client) -> None:
    body = {"prompt": "The capital of Peru is", "temperature": 0, "max_tokens": 3, "n": 2}
    for context, is_used in (("The capital of Peru is Cairo.", True), (" ", False)):
        given = {**body, "context": context, "steer": "parametric", "explain": "effect"}
        report = client.post("/generate", json=given).json()["steering"]
        assert (report["effect"]["context_divergence"] > 0.01) is is_used
        assert any("context was not used" in words for words in report["warnings"]) is not is_used
        streamed = client.post("/generate", json={**given, "stream": True}).text
        last = json.loads(streamed.strip().split("\n\n")[-2].removeprefix("data: "))
        assert last["steering"]["effect"]["steered"]["id"] == report["effect"]["steered"]["id"]
        assert last["steering"]["warnings"] == report["warnings"]
    refused = client.post("/generate", json={**body, "prompt": ["a", "b"], "explain": "effect"})
    assert refused.json()["error"]["param"] == "explain"
    assert client.post("/generate", json={**body, "explain": "heads"}).status_code == 400


def test_explain_has_the_effect_on_its_token(client: httpx.Client) -> None:
    question = {"prompt": "The capital of Peru is", "context": "The capital of Peru is Cairo."}
    found = client.post("/explain", json={**question, "target": "parametric"}).json()
    effect = found["steering"]["effect"]
    assert effect["steered"]["text"] == found["tokens"][0]["token"]
    assert effect["context_divergence"] > 0.01
