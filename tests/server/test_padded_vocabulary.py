"""Tokens that a model has and its tokenizer does not, as those that fill an output layer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support import tiny
from tests.support.on_vllm import save_with_set
from tests.support.serving import events, serving

FIRST, BEYOND = len(tiny.tiny_tokenizer()), tiny.VOCAB_SIZE
LAST = BEYOND - 1
ALWAYS = {"logit_bias": {str(LAST): 100}, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
ASKED = {"prompt": "Q", "context": "C", "target": "context"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    root = tmp_path_factory.mktemp("padded")
    save_with_set(root, "context")
    assert FIRST < LAST
    with (
        serving(
            *("--model", str(root / "model"), "--head-sets", str(root / "head_sets")),
            *("--max-model-len", "128", "--max-batch", "4"),
            environment={"JUICE_HEAD_SETS": str(root / "head_sets")},  # vLLM's plugin reads it, too
        ) as running,
        httpx.Client(base_url=running.url, timeout=60) as made,
    ):
        yield made


def posted(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_prompt_may_hold_them_and_its_echo_has_them_as_no_text(client: httpx.Client) -> None:
    ids = [*tiny.tiny_tokenizer()("ab")["input_ids"], FIRST, LAST, 5]
    body = {"prompt": ids, "echo": True, "logprobs": 20, "max_tokens": 0}
    (choice,) = posted(client, "/v1/completions", **body)["choices"]
    names, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert names[:4] == ["a", "b", f"token_id:{FIRST}", f"token_id:{LAST}"]
    assert choice["text"] == f"ab{names[4]}"
    assert offsets == [0, 1, 2, 2, 2]


def test_an_answer_may_be_of_them(client: httpx.Client) -> None:
    whole = posted(client, "/generate", prompt="a", logprobs=3, **ALWAYS)
    assert whole["text"] == ""
    assert [token["id"] for token in whole["logprobs"]] == [LAST] * 4
    with client.stream("POST", "/generate", json={"prompt": "a", **ALWAYS, "stream": True}) as got:
        assert not any(event.get("text") for event in events(got))
    choice = posted(client, "/v1/completions", prompt="a", logprobs=1, **ALWAYS)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{LAST}"] * 4
    assert choice["logprobs"]["text_offset"] == [0] * 4


def test_one_may_end_an_answer(client: httpx.Client) -> None:
    stopped = posted(client, "/generate", prompt="a", stop_token_ids=[LAST], **ALWAYS)
    assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")


def test_one_is_never_part_of_a_form(client: httpx.Client) -> None:
    body = {**ALWAYS, "ignore_eos": False, "max_tokens": 9, "guided_choice": ["red", "green"]}
    assert posted(client, "/generate", prompt="a", **body)["text"] in ("red", "green")


def test_they_are_looked_into_as_others_are(client: httpx.Client) -> None:
    found = posted(client, "/explain", **ASKED, tokens=[FIRST, LAST], answer=[LAST])
    assert [(token["id"], token["token"]) for token in found["tokens"]] == [(FIRST, ""), (LAST, "")]
    read = posted(client, "/origins", prompt="Q", context="C", answers=[[FIRST, 5, LAST]])
    assert [token["id"] for token in read["origins"][0]] == [FIRST, 5, LAST]
    assert posted(client, "/detokenize", tokens=[FIRST, 5, LAST])["text"] == "".join(
        token["token"] for token in read["origins"][0]
    )
    swept = posted(client, "/sweep", **ASKED, strengths=[0, 1], max_tokens=1)
    assert len(swept["strengths"]) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [BEYOND]}),
        ("/generate", {"prompt": "a", "logit_bias": {str(BEYOND): 1}}),
        ("/generate", {"prompt": "a", "stop_token_ids": [BEYOND]}),
        ("/explain", {**ASKED, "tokens": [5, BEYOND]}),
        ("/explain", {**ASKED, "answer": [BEYOND]}),
        ("/origins", {"prompt": "Q", "context": "C", "answers": [[BEYOND]]}),
        ("/detokenize", {"tokens": [BEYOND]}),
    ],
    ids=json.dumps,
)
def test_the_next_one_is_none_of_the_models_and_refused_in_words(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert f"the model has tokens 0 to {LAST}" in answer.json()["error"]["message"]
