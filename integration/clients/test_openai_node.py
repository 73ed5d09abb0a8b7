"""openai for Node: whole, streamed, with tools, responses; each steered by a field of the body."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.clients import questions

PACKAGES = ("openai (npm)",)
FOLDER = Path(__file__).parent / "node"
GREEDY = {"model": questions.MODEL, "temperature": 0}
CHAT = {**GREEDY, "messages": [{"role": "user", "content": questions.QUESTION}]}
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def ask(url: str) -> Iterator[Ask]:
    """Return a function that runs a job of ask.mjs in a process of Node."""
    if shutil.which("node") is None:
        pytest.skip("there is no node")
    if not (FOLDER / "node_modules").exists():
        pytest.skip("the client is not installed; make clients-test does it, with npm")
    with subprocess.Popen(
        ["node", "ask.mjs", url],
        cwd=FOLDER,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as node:
        assert node.stdin
        assert node.stdout

        def run(job: str, **body: Any) -> Any:
            print(json.dumps({"job": job, "body": body}), file=node.stdin, flush=True)
            line = node.stdout.readline()
            assert line, "node ended"
            answer = json.loads(line)
            return answer.get("value", answer)

        yield run
        node.stdin.close()
        assert node.wait(20) == 0


@pytest.mark.smoke
@pytest.mark.parametrize("steer", questions.STEERS)
def test_chat_is_steered_and_the_header_says_so(ask: Ask, steer: str) -> None:
    answer = ask("chat", **CHAT, steer=steer)
    assert answer["message"]["content"] == questions.ANSWERS[steer]
    assert answer["steering"]["target"] == answer["header"]["target"] == steer
    assert answer["header"]["applied"] is (steer != "none")


@pytest.mark.parametrize("steer", questions.STEERS)
def test_completions_are_steered(ask: Ask, steer: str) -> None:
    text = ask("completion", **GREEDY, prompt=questions.PROMPT, max_tokens=8, steer=steer)
    assert text == questions.PROMPTS[steer]


@pytest.mark.parametrize("steer", questions.STEERS)
def test_streams_have_the_same_text(ask: Ask, steer: str) -> None:
    pieces = ask("stream", **CHAT, steer=steer)
    assert "".join(pieces) == questions.ANSWERS[steer]
    assert len(pieces) > 1
    assert ask("helper", **CHAT, steer=steer)["content"] == questions.ANSWERS[steer]


@pytest.mark.parametrize("steer", ["context", "parametric"])
def test_the_models_name_steers(ask: Ask, steer: str) -> None:
    assert f"mini:{steer}" in ask("models")
    answer = ask("chat", **{**CHAT, "model": f"mini:{steer}"})
    assert answer["message"]["content"] == questions.ANSWERS[steer]
    assert answer["header"]["target"] == steer


@pytest.mark.parametrize("steer", questions.STEERS)
def test_responses_are_steered_whole_and_streamed(ask: Ask, steer: str) -> None:
    body = {**GREEDY, "input": questions.QUESTION, "steer": steer}
    answer = ask("response", **body)
    assert answer["text"] == questions.ANSWERS[steer]
    assert answer["steering"]["target"] == steer
    assert "".join(ask("responseStream", **body)) == answer["text"]


def test_tools_are_called_and_what_they_return_is_believed_as_asked(ask: Ask) -> None:
    turns: list[Any] = [{"role": "user", "content": questions.TOOL_QUESTION}]
    options = {**GREEDY, "tools": [questions.TOOL]}
    required = {"tool_choice": "required", "parallel_tool_calls": False}
    called = ask("chat", **options, messages=turns, **required)["message"]
    (call,) = called["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == questions.ARGUMENTS
    streamed = ask("helper", **options, messages=turns, **required)
    assert streamed["tool_calls"][0]["function"] == call["function"]
    turns += [called, {"role": "tool", "tool_call_id": call["id"], "content": questions.RETURNED}]
    for steer, expected in questions.AFTER_THE_TOOL.items():
        answer = ask("chat", **options, messages=turns, steer=steer)
        assert answer["message"]["content"] == expected


def test_a_misspelt_steer_is_an_error_of_the_client(ask: Ask) -> None:
    expected = {"error": "BadRequestError", "status": 400, "param": "steer.target"}
    assert ask("chat", **CHAT, steer="contxt") == expected
