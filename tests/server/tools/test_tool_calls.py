"""Tools over HTTP, as the clients of OpenAI and Anthropic send them; calls are enforced on mini."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest

from juice_server.tool_parser import MAX_CALLS
from tests.support.reciting import CUE, reciting
from tests.support.serving import serving

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "now": {"type": "object", "additionalProperties": False}}
FLAT: list[Any] = [
    {"type": "function", "name": "weather", "description": "Of a city", "parameters": WEATHER},
    {"type": "function", "name": "now"},
]
TOOLS: list[Any] = [
    {"type": "function", "function": {k: v for k, v in each.items() if k != "type"}}
    for each in FLAT
]
NOW = {"type": "function", "function": {"name": "now"}}
ASKED: list[Any] = [{"role": "user", "content": "What is the capital of Peru?"}]
HERMES = """{%- if tools %}{{ "<|system|>" }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- "Call with <tool_call>." }}{{ eos_token }}{% endif %}
{%- for message in messages %}{{ "<|" + message.role + "|>" + message.content }}
{%- for call in message.tool_calls or [] %}{{ "<tool_call>\\n" + (call.function | tojson) }}
{{- "\\n</tool_call>" + call.id }}{% endfor %}{{ message.tool_call_id }}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>" }}{% endif %}"""


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve mini with a template that shows calls as Hermes writes them."""
    file: Path = tmp_path_factory.mktemp("template") / "hermes.jinja"
    file.write_text(HERMES, encoding="utf-8")
    with serving("--chat-template", str(file)) as running:
        yield running.url


def ask(api: openai.OpenAI, **fields: Any) -> Any:
    options = {"model": "mini", "messages": ASKED, "tools": TOOLS, "max_tokens": 120, **fields}
    return api.chat.completions.create(**({"temperature": 0} | options))


def streamed(chunks: Iterable[Any]) -> dict[int, tuple[str, str]]:
    """Return the names and arguments of the calls of a stream, which must come in pieces."""
    deltas = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
    firsts = {delta.index: delta for delta in deltas if delta.id}
    assert [delta.index for delta in deltas] == sorted(delta.index for delta in deltas)
    assert all(first.function.arguments == "" and first.function.name for first in firsts.values())
    pieces = [delta for delta in deltas if not delta.id]
    assert not any(piece.function.name for piece in pieces)
    assert len(pieces) >= len(firsts)
    return {
        i: (
            first.function.name,
            "".join(piece.function.arguments for piece in pieces if piece.index == i),
        )
        for i, first in firsts.items()
    }


def arguments_of(choice: Any, index: int = 0) -> str:
    return str(choice.message.tool_calls[index].function.arguments)


def check(calls: Any, names: set[str] | None = None) -> None:
    assert calls
    for call in calls:
        assert call.function.name in (names or SCHEMAS)
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("steer", ["none", "context"])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "now"}),
        (NOW, {"now"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}},
            {"now"},
        ),
    ],
)
@pytest.mark.parametrize("server_of", ["url", "hermes"])
def test_a_call_that_is_asked_for_comes_and_is_valid(
    request: pytest.FixtureRequest, server_of: str, choice: Any, names: set[str], steer: str
) -> None:
    url = request.getfixturevalue(server_of)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api:
        options = {"tool_choice": choice, "parallel_tool_calls": False, "temperature": 1, "seed": 3}
        answer = ask(api, **options, extra_body={"steer": steer})
        chosen = answer.choices[0]
        assert (chosen.finish_reason, chosen.message.content) == ("tool_calls", None)
        assert len(chosen.message.tool_calls) == 1
        check(chosen.message.tool_calls, names)
        assert answer.steering["target"] == steer
        chunks = [*ask(api, **options, extra_body={"steer": steer}, stream=True)]
    (called,) = streamed(chunks).values()
    assert called == (chosen.message.tool_calls[0].function.name, arguments_of(chosen))
    assert not any(c.choices[0].delta.content for c in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_without_a_call_the_answer_is_that_without_tools_enforced(api: openai.OpenAI) -> None:
    assert ask(api).choices[0].message.content == "Lima."
    assert ask(api, tool_choice="none").choices[0].message.content == "Lima."
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    assert ask(api, tools=strict).choices[0].message.content == "Lima."


def test_several_choices_call_each_for_itself(api: openai.OpenAI) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "n": 3}
    whole = ask(api, **fields, temperature=1, seed=5).choices
    chunks: dict[int, list[Any]] = {}
    for chunk in ask(api, **fields, temperature=1, seed=5, stream=True):
        chunks.setdefault(chunk.choices[0].index, []).append(chunk)
    assert {i: streamed(each) for i, each in chunks.items()} == {
        each.index: {0: (each.message.tool_calls[0].function.name, arguments_of(each))}
        for each in whole
    }
    assert len(chunks) == 3


@pytest.mark.parametrize("server_of", ["url", "hermes"])
def test_a_model_that_calls_on_and_on_is_ended_or_cut_without_a_trace_of_text(
    request: pytest.FixtureRequest, server_of: str
) -> None:
    """Kills: the beginning of one more call as content; calls without end."""
    url = request.getfixturevalue(server_of)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api:
        for n in (5, 30, 60, 80, 100, 480):
            options = {"tool_choice": "required", "max_tokens": n}
            chosen = ask(api, **options).choices[0]
            calls = chosen.message.tool_calls or []
            assert not chosen.message.content
            if valid := calls[:-1] if chosen.finish_reason == "length" else calls:
                check(valid)
            assert len(calls) <= MAX_CALLS
            chunks = [*ask(api, **options, stream=True)]
            assert not any(c.choices[0].delta.content for c in chunks)
            assert chunks[-1].choices[0].finish_reason == chosen.finish_reason
            assert streamed(chunks) == {
                i: (call.function.name, call.function.arguments) for i, call in enumerate(calls)
            }


def test_a_cut_call_leaves_no_text_in_responses_and_messages(url: str) -> None:
    flat = {"model": "mini", "tools": FLAT, "tool_choice": "required", "store": False}
    named = [{"name": k, "input_schema": v} for k, v in SCHEMAS.items()]
    greedy: dict[str, Any] = {"temperature": 0}
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api,
        anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as other,
    ):
        for n in (40, 60, 80):
            options: dict[str, Any] = {**flat, **greedy, "input": ASKED[0]["content"]}
            whole = api.responses.create(**options, max_output_tokens=n)
            assert {each.type for each in whole.output} == {"function_call"}
            assert whole.status == "incomplete"
            with api.responses.create(**options, max_output_tokens=n, stream=True) as stream:
                *_, last = stream
            assert last.type == "response.incomplete"
            assert [each.arguments for each in last.response.output] == [
                each.arguments for each in whole.output
            ]
            asked: dict[str, Any] = {"model": "mini", "messages": ASKED, "tools": named}
            asked |= {"tool_choice": {"type": "any"}, "max_tokens": n, "extra_body": greedy}
            message = other.messages.create(**asked)
            assert {each.type for each in message.content} == {"tool_use"}
            assert message.stop_reason == "max_tokens"
            with other.messages.stream(**asked) as events:
                got = events.get_final_message()
            assert [each.input for each in got.content] == [each.input for each in message.content]


@pytest.mark.parametrize("stop", [["}"], ["city"]])
def test_a_stop_sequence_beside_a_call_that_must_come_is_refused(
    client: httpx.Client, stop: list[str]
) -> None:
    """It would cut the call, and leave a text that nobody asked for."""
    chat = {"messages": ASKED, "tools": TOOLS, "tool_choice": "required", "stop": stop}
    named = [{"name": k, "input_schema": v} for k, v in SCHEMAS.items()]
    message = {"messages": ASKED, "tools": named, "tool_choice": {"type": "any"}, "max_tokens": 9}
    form = {"response_format": {"type": "json_object"}, "stop": stop}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/responses", {"input": "a", "tools": FLAT, "tool_choice": "required", "stop": stop}),
        ("/v1/messages", {**message, "stop_sequences": stop}),
        ("/v1/chat/completions", {"messages": ASKED, **form}),
        ("/v1/completions", {"prompt": "a", **form}),
        ("/generate", {"prompt": "a", **form}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400, (path, answer.text)
        assert "leave out stop" in answer.json()["error"]["message"]


CALLED: list[Any] = [
    *ASKED,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "a1", "content": "The capital of Peru is Oslo."},
]


def test_what_a_call_returned_is_believed_as_much_as_was_asked(api: openai.OpenAI) -> None:
    answers = {
        steer: ask(api, messages=CALLED, extra_body={"steer": steer}).choices[0].message.content
        for steer in ("none", "context", "parametric")
    }
    assert answers == {"none": "Lima.", "context": "Oslo.", "parametric": "Lima."}


def test_calls_and_their_results_go_into_the_template(hermes: str) -> None:
    """The prompt's tokens are those of the text that the template makes of the parsed arguments."""
    rendered = (
        '<|user|>What is the capital of Peru?<|end|><|assistant|><tool_call>\n{"name": "now", '
        '"arguments": {}}\n</tool_call>a1<|end|><|tool|>The capital of Peru is Oslo.a1<|end|>'
    )
    with openai.OpenAI(base_url=f"{hermes}/v1", api_key="x", max_retries=0) as api:
        answer = ask(api, messages=CALLED, tools=openai.NOT_GIVEN, max_tokens=1)
    body = {"text": f"{rendered}<|assistant|>", "add_special_tokens": False}
    counted = httpx.post(f"{hermes}/tokenize", json=body, timeout=60).json()
    assert answer.usage.prompt_tokens == counted["count"]


def test_responses_call_and_are_answered(api: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "mini",
        "input": ASKED[0]["content"],
        "tools": FLAT,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "store": False,
        "temperature": 0,
    }
    whole = api.responses.create(**options)
    (call,) = whole.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    with api.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        got = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.delta") > 1
    assert [*dict.fromkeys(kinds)] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert (got.output[0].name, got.output[0].arguments) == (call.name, call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id}
    answered = api.responses.create(
        **options
        | {
            "tool_choice": "auto",
            "input": [
                ASKED[0],
                call.model_dump(exclude_none=True),
                {**result, "output": "The capital of Peru is Oslo."},
            ],
        },
        extra_body={"steer": "context"},
    )
    assert answered.output_text == "Oslo."


def test_messages_call_and_are_answered(url: str) -> None:
    item: list[Any] = [{"name": k, "input_schema": v} for k, v in SCHEMAS.items()]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    greedy = {"temperature": 0}
    with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as api:
        options: dict[str, Any] = {"model": "mini", "max_tokens": 99, "tools": item}
        whole = api.messages.create(
            **options, messages=ASKED, tool_choice=choice, extra_body=greedy
        )
        (block,) = whole.content
        assert (whole.stop_reason, block.type) == ("tool_use", "tool_use")
        jsonschema.validate(block.input, SCHEMAS[block.name])
        with api.messages.stream(
            **options, messages=ASKED, tool_choice=choice, extra_body=greedy
        ) as stream:
            kinds = [event.type for event in stream]
            got = stream.get_final_message()
        assert kinds.count("input_json") > 1
        assert [*dict.fromkeys(kinds)] == [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "input_json",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert (got.content[0].name, got.content[0].input) == (block.name, block.input)
        assert got.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": block.id}
        turns = [
            *ASKED,
            {"role": "assistant", "content": [block.model_dump(exclude_none=True)]},
            {"role": "user", "content": [{**result, "content": "The capital of Peru is Oslo."}]},
        ]
        answered = api.messages.create(
            **options, messages=turns, extra_body={**greedy, "steer": "context"}
        )
        n_tokens = api.messages.count_tokens(model="mini", messages=turns, tools=item).input_tokens
    assert [each.text for each in answered.content] == ["Oslo."]
    assert n_tokens == answered.usage.input_tokens


TWICE = [TOOLS[1], TOOLS[1]]
NO_OBJECT = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "[1]"}}
BAD_SCHEMA = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "odd"}}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "code_interpreter"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": TWICE}, None),
        ({"tools": [], "tool_choice": "required"}, None),
        ({"tool_choice": {"type": "function", "function": {"name": "later"}}}, None),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": BAD_SCHEMA}],
                "tool_choice": "required",
            },
            "tools",
        ),
        (
            {"messages": [*ASKED, {"role": "assistant", "tool_calls": [NO_OBJECT]}]},
            "messages.1.tool_calls.0.function.arguments",
        ),
        ({"messages": [{**ASKED[0], "tool_calls": [NO_OBJECT]}]}, "messages.0.tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"guided_json": "no JSON"}, "guided_json"),
    ],
    ids=str,
)
def test_what_cannot_be_offered_is_refused_with_the_field(
    client: httpx.Client, fields: dict[str, Any], param: str | None
) -> None:
    body = {"messages": ASKED, "tools": TOOLS, **fields}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    found = answer.json()["error"]["param"]
    assert found == param if param is None else str(found).startswith(param), answer.text


# JSON to Python, and not to be sent: half of a pair, and no number.
UNSENDABLE = '<tool_call>{"name": "now", "arguments": {"a": ["\\ud800", 1e999]}}</tool_call>'


def test_a_model_that_writes_what_cannot_be_sent_is_answered_as_text(tmp_path: Path) -> None:
    template = "{{ tools and '<tool_call>' }}{{ messages[0].content }}" + CUE
    folder = reciting(tmp_path, [UNSENDABLE], template)
    routes: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": ASKED, "tools": [TOOLS[1]]},
        "/v1/responses": {"input": "x", "tools": [FLAT[1]]},
        "/v1/messages": {"messages": ASKED, "tools": [{"name": "now", "input_schema": {}}]},
    }
    with serving("--model", str(folder), "--served-model-name", "m") as running:
        for route, body in routes.items():
            for stream in (False, True):
                sent = {"model": "m", "max_tokens": 9, "temperature": 0, "stream": stream, **body}
                answer = httpx.post(running.url + route, json=sent, timeout=60)
                assert answer.status_code == 200, answer.text
                assert json.dumps(UNSENDABLE)[1:-1] in answer.text, route
                assert '"error":{' not in answer.text
