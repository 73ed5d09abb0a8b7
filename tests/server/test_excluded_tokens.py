"""Tokens that a model rules out, whose log-probability is minus infinity: JSON has no word for it.

A model of its own, since no bundled one rules any out. Nothing is ever a failure of the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from starlette.testclient import TestClient

import juice
from juice_server import app as server
from juice_server.requests import LOWEST_LOGPROB
from juice_server.settings import Settings
from tests.support import tiny
from tests.support.chat_templates import PLAIN
from tests.support.on_vllm import save_with_set

TOKENIZER = tiny.tiny_tokenizer()
# What is left: fewer tokens than alternatives are ever listed.
LEFT = TOKENIZER("aeiou .")["input_ids"]
ASKED = {"prompt": "Who?", "context": "Nobody."}
TURNS = [{"role": "user", "content": "Who?"}]
CHAT = {"messages": TURNS, "max_tokens": 4}
ECHO = {"prompt": "Who?", "echo": True, "logprobs": 20}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    root: Path = tmp_path_factory.mktemp("excluding")
    save_with_set(root, "context")
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(root / "model")
    model = juice.load(root / "model", head_sets=root / "head_sets")
    excluded = torch.ones(tiny.VOCAB_SIZE, dtype=torch.bool)
    excluded[[*LEFT, 0]] = False
    model.loaded.layout.output.register_forward_hook(
        lambda _module, _given, logits: logits.masked_fill(excluded, -torch.inf)
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server, "load", lambda *_given, **_options: model)
        with TestClient(server.create(Settings()), raise_server_exceptions=False) as running:
            while running.get("/readyz").status_code != 200:
                pass
            yield running


def strict(text: str) -> Any:
    """Return the value of JSON that every client can read."""

    def refuse(word: str) -> NoReturn:
        raise AssertionError(f"{word} is no JSON: {text}")

    return json.loads(text, parse_constant=refuse)


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, float):
        yield value


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompt": "a", "logprobs": 1, "max_tokens": 3}),
        ("/generate", {"prompt": "a", "logprobs": 20, "max_tokens": 3}),
        ("/generate", {"prompt": "a", "logprobs": 20, "top_k": 1, "temperature": 1}),
        ("/generate", {"prompt": "a", "logprobs": 20, "min_p": 1, "temperature": 2}),
        ("/generate", {"prompt": "a", "logprobs": 20, "logit_bias": dict.fromkeys(LEFT, -100)}),
        ("/generate", {"prompt": "a", "logprobs": 20, "logit_bias": {"5": 100}, "max_tokens": 3}),
        ("/generate", {"prompt": "a", "logprobs": 20, "repetition_penalty": 100}),
        ("/generate", {"prompt": "a", "logprobs": 20, "min_tokens": 4, "max_tokens": 4}),
        ("/generate", {"prompt": "a", "logprobs": 20, "guided_choice": ["aio", "u"]}),
        ("/generate", {"prompt": "a", "logprobs": 20, "guided_regex": "[aeiou]{3}", "seed": 1}),
        ("/generate", {**ASKED, "logprobs": 20, "steer": "context", "max_tokens": 3}),
        ("/generate", {**ASKED, "logprobs": 20, "max_tokens": 3,
                       "steer": {"target": "context", "method": "cad"}}),
        ("/generate", {**ASKED, "logprobs": 20, "max_tokens": 3,
                       "steer": {"target": "context", "method": "adacad"}}),
        ("/v1/completions", {**ECHO, "max_tokens": 0}),
        ("/v1/completions", {**ECHO, "max_tokens": 3}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 20}),
        ("/v1/responses", {"input": "Who?", "max_output_tokens": 4, "top_logprobs": 20,
                           "include": ["message.output_text.logprobs"]}),
        ("/v1/messages", CHAT),
        ("/compare", {**ASKED, "logprobs": True, "top": 20, "max_tokens": 3}),
        ("/origins", {**ASKED, "answers": [[5, 6], LEFT[:2]]}),
        ("/sweep", {**ASKED, "target": "context", "answers": ["x", "y"]}),
        ("/sweep", {**ASKED, "target": "context", "answers": ["xa", "yx"]}),
        ("/sweep", {**ASKED, "target": "context", "max_tokens": 4}),
        ("/explain", {**ASKED, "target": "context", "top": 20}),
        ("/explain", {**ASKED, "target": "context", "tokens": [5, 6]}),
        ("/explain", {**ASKED, "target": "context", "tokens": [5, LEFT[0]]}),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_answered_is_json(client: TestClient, path: str, body: dict[str, Any]) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert min(numbers(strict(answer.text)), default=0) >= 2 * LOWEST_LOGPROB
    if path in ("/origins", "/sweep", "/explain") or "echo" in body:
        return  # none of these is streamed
    with client.stream("POST", path, json={**body, "stream": True}) as streamed:
        lines = [line.removeprefix("data: ") for line in streamed.iter_lines()]
    parts = [strict(line) for line in lines if line.startswith("{")]
    assert parts
    assert not any("error" in part for part in parts), parts


def test_one_has_the_lowest_that_is_told(client: TestClient) -> None:
    """If none were listed, the tests above would show nothing."""
    first = client.post("/generate", json={"prompt": "a", "logprobs": 20}).json()["logprobs"][0]
    assert min(token["logprob"] for token in first["top"]) == LOWEST_LOGPROB
    echoed = client.post("/v1/completions", json={**ECHO, "max_tokens": 0}).json()
    assert min(echoed["choices"][0]["logprobs"]["token_logprobs"][1:]) == LOWEST_LOGPROB


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("form", [{"guided_choice": ["xyz", "zyx"]}, {"guided_json": SCHEMA}])
def test_a_form_of_nothing_else_is_followed_or_refused_in_words(
    client: TestClient, form: dict[str, Any], temperature: int
) -> None:
    """Kills: a token that may not come, where all that may are ruled out."""
    body = {"prompt": "a", "temperature": temperature, "seed": 3, "logprobs": 20, **form}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 400, answer.text
    assert "rules out" in strict(answer.text)["error"]["message"]
