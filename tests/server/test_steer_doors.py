"""`steer` through every door: applied, as the answer and its report show, or refused in words."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.support.serving import CONFLICT

# Without steering mini says what it was told: Cairo.
QUESTION = "The capital of Peru is Cairo. What is it?"
TURNS = [{"role": "user", "content": QUESTION}]
SHORT = {"temperature": 0, "max_tokens": 8}
DOORS: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": CONFLICT, **SHORT},
    "/v1/completions": {"model": "mini", "prompt": CONFLICT, **SHORT},
    "/v1/chat/completions": {"model": "mini", "messages": TURNS, **SHORT},
    "/v1/responses": {
        "model": "mini", "input": QUESTION, "temperature": 0, "max_output_tokens": 8,
    },
    "/v1/messages": {"model": "mini", "messages": TURNS, **SHORT},
}  # fmt: skip
WHOLE = {"target": "parametric", "strength": 1.0}
WAYS: dict[str, dict[str, Any]] = {
    "a name": {"steer": "parametric"},
    "an object": {"steer": WHOLE},
    "xargs, a name": {"vllm_xargs": {"steer": "parametric"}},
    "xargs, an object": {"vllm_xargs": {"steer": WHOLE}},
    "xargs, an object as text": {"vllm_xargs": {"steer": json.dumps(WHOLE)}},
    "the model's name": {"model": "mini:parametric"},
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_steer_is_applied_at_each_door_or_refused_by_name(
    client: httpx.Client, door: str, way: str
) -> None:
    answer = client.post(door, json={**DOORS[door], **WAYS[way]})
    if door == "/generate" and "steer" not in WAYS[way]:  # ours, with one way alone
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, *WAYS[way])
        return
    assert answer.status_code == 200, answer.text
    assert "Lima" in answer.text
    assert "Cairo" not in answer.text
    report = answer.json()["steering"]
    assert (report["applied"], report["head_set"]) == (True, "parametric")
    told = json.loads(answer.headers["x-juice-steering"])
    assert told.items() <= report.items()


@pytest.mark.parametrize("door", DOORS)
def test_without_it_the_answer_is_another_and_says_so(client: httpx.Client, door: str) -> None:
    """What the other tests compare with."""
    answer = client.post(door, json=DOORS[door])
    assert "Cairo" in answer.text
    assert answer.json()["steering"]["applied"] is False


NEARLY: dict[str, dict[str, Any]] = {
    **{
        name: {name: "parametric"}
        for name in (
            *("steering", "Steer", "steet", "steer_to", "steer_toward", "steer_target"),
            *("steer_mode", "juice_steer", "juiceSteer", "steering_target"),
        )
    },
    "its content alone": {"target": "parametric"},
    "extra_body as a field": {"extra_body": {"steer": "parametric"}},
    "an unknown target": {"steer": "truth"},
    "an unknown field of it": {"steer": {"target": "parametric", "streng": 1}},
    "a list": {"steer": ["parametric"]},
    "text that is an object": {"steer": json.dumps(WHOLE)},
    "xargs of something else": {"vllm_xargs": {"steering": "parametric"}},
    "twice": {"steer": "parametric", "vllm_xargs": {"steer": "parametric"}},
    "an unknown set": {"steer": {"target": "parametric", "head_set": "nothing"}},
    "a model's name that is another": {"model": "mini:truth"},
    "against the model's name": {"model": "mini:parametric", "steer": "context"},
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("nearly", NEARLY)
def test_what_is_nearly_a_way_to_steer_is_refused(
    client: httpx.Client, door: str, nearly: str
) -> None:
    """Kills: an answer that is not steered, to a client that takes it for one that is."""
    answer = client.post(door, json={**DOORS[door], **NEARLY[nearly]})
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["message"]


def test_openais_client_steers_by_its_extra_body(api: openai.OpenAI) -> None:
    steered = {"model": "mini", "extra_body": {"steer": WHOLE}, "temperature": 0}
    chat = api.chat.completions.create(messages=TURNS, max_tokens=8, **steered)
    assert "Lima" in chat.choices[0].message.content
    assert chat.model_extra["steering"]["applied"] is True
    response = api.responses.create(input=QUESTION, max_output_tokens=8, **steered)
    assert "Lima" in response.output_text
    assert response.model_extra["steering"]["applied"] is True


@pytest.mark.parametrize("route", ["/generate", "/v1/completions"])
def test_a_batch_is_steered_as_a_whole_or_refused_as_a_whole(
    client: httpx.Client, route: str
) -> None:
    body = {"steer": "parametric", **SHORT}
    whole = client.post(route, json={**body, "prompt": [CONFLICT, CONFLICT]})
    assert ["Lima" in choice["text"] for choice in whole.json()["choices"]] == [True, True]
    for bad in ("", "word " * 2000):
        refused = client.post(route, json={**body, "prompt": [CONFLICT, bad, CONFLICT]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
