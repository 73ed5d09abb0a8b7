"""Stop strings over HTTP: an answer ends just before one, however tokens and chunks cut it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.reciting import CUE, reciting
from tests.support.serving import serving

TEMPLATE = (
    "{% if tools %}Call with <tool_call>.{% endif %}"
    "{% for m in messages %}{{ m.content }}\n{% endfor %}assistant" + CUE
)
# A call whose arguments hold two characters of several tokens.
PIECES = [
    *("<tool_call>", '\n{"name": "wea', 'ther", "argu', 'ments": {"city": "Li', "ma "),
    *("🙂", "é", " is", " far", '"}}', "\n</tool_call>"),
]
SAID = "".join(PIECES)
# The tokens up to the last of the smiling face, which is four.
N_TO_FACE = PIECES.index("🙂") + 4
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TURNS = [{"role": "user", "content": "x"}]
OF_TOOLS = {"name": "weather", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = reciting(tmp_path_factory.mktemp("reciting"), PIECES, TEMPLATE)
    with (
        serving("--model", str(folder), "--served-model-name", "m") as running,
        httpx.Client(base_url=running.url, timeout=60) as made,
    ):
        yield made


def posted(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json={"model": "m", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    body = {"model": "m", "temperature": 0, **body, "stream": True}
    with client.stream("POST", path, json=body) as answer:
        lines = [each.removeprefix("data: ") for each in answer.iter_lines()]
    return [json.loads(each) for each in lines if each.startswith("{")]


Said = tuple[str, str]  # whole, and streamed


def completion(client: httpx.Client, stop: list[str], **more: Any) -> Said:
    body = {"prompt": f"x{CUE}", "stop": stop, "max_tokens": 99, **more}
    whole = posted(client, "/v1/completions", **body)["choices"][0]
    parts = events_of(client, "/v1/completions", **body)
    return whole["text"], "".join(each["choices"][0]["text"] for each in parts)


def chat(client: httpx.Client, stop: list[str], **more: Any) -> Said:
    body = {"messages": TURNS, "stop": stop, "max_tokens": 99, **more}
    whole = posted(client, "/v1/chat/completions", **body)["choices"][0]
    assert whole["finish_reason"] == "stop"
    deltas = [
        each["choices"][0]["delta"] for each in events_of(client, "/v1/chat/completions", **body)
    ]
    assert not any("tool_calls" in each for each in (whole["message"], *deltas) if each)
    return whole["message"]["content"], "".join(each.get("content", "") for each in deltas)


def chat_with_tools(client: httpx.Client, stop: list[str], **more: Any) -> Said:
    return chat(client, stop, tools=[{"type": "function", "function": OF_TOOLS}], **more)


def response(client: httpx.Client, stop: list[str], **more: Any) -> Said:
    tools = [{"type": "function", **OF_TOOLS}]
    body = {"input": "x", "tools": tools, "stop": stop, "max_output_tokens": 99, **more}
    (item,) = posted(client, "/v1/responses", **body)["output"]
    parts = events_of(client, "/v1/responses", **body)
    kind = "response.output_text.delta"
    return item["content"][0]["text"], "".join(e["delta"] for e in parts if e["type"] == kind)


def message(client: httpx.Client, stop: list[str], **more: Any) -> Said:
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    body = {"messages": TURNS, "tools": tools, "stop_sequences": stop, "max_tokens": 99, **more}
    whole = posted(client, "/v1/messages", **body)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop[-1])
    (block,) = whole["content"]
    deltas = [e["delta"] for e in events_of(client, "/v1/messages", **body) if "delta" in e]
    return block["text"], "".join(each.get("text", "") for each in deltas)


Ask = Callable[..., Said]
ROUTES: list[Ask] = [completion, chat, chat_with_tools, response, message]


@pytest.mark.parametrize("ask", ROUTES, ids=lambda ask: ask.__name__)
@pytest.mark.parametrize(
    "stop", ["ma 🙂", "🙂", "é", "🙂é is f", 'far"', "city", '"}}', "<tool_call>"]
)
def test_an_answer_ends_just_before_a_stop_string(
    client: httpx.Client, ask: Ask, stop: str
) -> None:
    """Also where that cuts a call, which is text then."""
    expected = SAID[: SAID.index(stop)]
    assert ask(client, ["never said", stop]) == (expected, expected)


@pytest.mark.parametrize("ask", ROUTES, ids=lambda ask: ask.__name__)
@pytest.mark.parametrize("n_early", [1, 2, 4])
def test_a_stop_string_that_min_tokens_parts_ends_it_too(
    client: httpx.Client, ask: Ask, n_early: int
) -> None:
    """Kills: what came before the last of them was not remembered, so the string was said whole."""
    stop = "ma 🙂é is"
    expected = SAID[: SAID.index(stop)]
    assert ask(client, [stop], min_tokens=N_TO_FACE - n_early) == (expected, expected)


@pytest.mark.parametrize("ask", ROUTES, ids=lambda ask: ask.__name__)
def test_a_stop_string_that_is_whole_before_min_tokens_ends_nothing(
    client: httpx.Client, ask: Ask
) -> None:
    expected = SAID[: SAID.index(" far")]
    assert ask(client, ["ma", " far"], min_tokens=N_TO_FACE) == (expected, expected)


def test_without_a_stop_string_it_is_a_call(client: httpx.Client) -> None:
    """If it were none, the tests above would show nothing of calls."""
    body = {"messages": TURNS, "tools": [{"type": "function", "function": OF_TOOLS}]}
    (choice,) = posted(client, "/v1/chat/completions", **body, max_tokens=99)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Lima 🙂é is far"}
