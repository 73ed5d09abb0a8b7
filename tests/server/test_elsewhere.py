"""Fields of other servers: each is served, with an effect, or refused by name; none passes over."""

from __future__ import annotations

import inspect
import json
from types import ModuleType
from typing import Any

import httpx
import pytest

from juice import steered_model as requests
from juice.model import prompts
from juice_server import chat_prompt as chats
from juice_server import requests as translation
from juice_server.chat import RESERVED
from juice_server.fields import MAX_KEYS, NEARLY_STEER, UNSUPPORTED
from juice_server.routes import stream as sse
from juice_server.routes.responses import ResponsesRequest

TURNS = [{"role": "user", "content": "The capital of Peru is Cairo. What is the capital of Peru?"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The capital of Peru is"},
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/responses": {"input": TURNS[0]["content"]},
    "/v1/messages": {"messages": TURNS},
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
TOOL = {"name": "f", "parameters": SCHEMA}
# A value of each that asks for something.
ASKED: dict[str, Any] = {
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "max_output_tokens"), 1),
    **dict.fromkeys(("n_predict", "num_predict"), 1),
    **dict.fromkeys(("min_new_tokens", "max_tool_calls"), 1),
    **dict.fromkeys(("grammar", "ebnf"), 'root ::= "yes"'),
    **dict.fromkeys(("regex", "format", "structural_tag", "guided_whitespace_pattern"), "a"),
    **dict.fromkeys(("json_schema", "response_schema"), SCHEMA),
    **{key: ["a"] for key in ("choice", "bad_words", "stop_sequences")},
    "output_format": FORMAT,
    "output_config": {"format": FORMAT},
    "text": {"format": {"name": "x", **FORMAT}},
    **dict.fromkeys(("json_object", "echo", "use_beam_search", "enable_thinking", "think"), True),
    **dict.fromkeys(("include_stop_str_in_output", "logprobs", "continue_final_message"), True),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), True),
    **dict.fromkeys(("do_sample", "include_reasoning", "add_generation_prompt"), False),
    "spaces_between_special_tokens": False,
    **dict.fromkeys(("thinking_budget", "thinking_token_budget", "truncate_prompt_tokens"), 10),
    **dict.fromkeys(("reasoning_effort", "effort", "verbosity"), "low"),
    "reasoning": {"effort": "low"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "chat_template": "{{ 1 }}",
    "chat_template_kwargs": {"bos_token": "<|begin|><|begin|>"},
    "documents": [{"text": "The capital of Peru is Cairo."}],
    "add_special_tokens": True,
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": "required",
    "functions": [TOOL],
    "function_call": {"name": "f"},
    **dict.fromkeys(("system", "instructions", "input", "prompt", "suffix"), "Be brief."),
    "messages": TURNS,
    **dict.fromkeys(("negative_prompt", "prompt_embeds", "lora_path", "lora_adapter"), "x"),
    "adapter_id": "x",
    **{key: [300] for key in ("allowed_token_ids", "suppress_tokens")},
    **dict.fromkeys(("best_of", "length_penalty", "repeat_penalty", "guidance_scale"), 2),
    **dict.fromkeys(("top_a", "typical_p", "dry_multiplier", "xtc_probability"), 0.5),
    **dict.fromkeys(("mirostat", "prompt_logprobs", "top_logprobs"), 1),
    **dict.fromkeys(("eos_token_id", "random_seed"), 7),
    "logits_processors": ["x"],
    "truncation": "auto",
    "audio": {"voice": "a", "format": "wav"},
    "modalities": ["audio"],
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {"search_context_size": "low"},
    # What belongs into steer.
    "extra_body": {"steer": "context"},
    **dict.fromkeys(("target", "head_set", "method"), "context"),
    "head_sets": {"context": "context"},
    **dict.fromkeys(("strength", "beta", "beta_plus", "beta_minus"), 2.0),
    "gate": "auto",
    "positions": "question",
    "heads": {"plus": [[0, 0]]},
    "coefficients": [[0, 0, 1.0]],
}
# As the route has them that serves them, with what they need.
FORMS: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/completions", "add_special_tokens"): {"add_special_tokens": False},
    ("/v1/completions", "logprobs"): {"logprobs": 1},
    ("/v1/chat/completions", "top_logprobs"): {"top_logprobs": 1, "logprobs": True},
    ("/v1/responses", "tools"): {"tools": [{"type": "function", **TOOL}]},
    ("/v1/messages", "tools"): {"tools": [{"name": "f", "input_schema": SCHEMA}]},
    ("/v1/messages", "tool_choice"): {"tool_choice": {"type": "any"}},
}
for served_route in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
    own_tools = FORMS.get((served_route, "tools"), {"tools": ASKED["tools"]})
    choice = FORMS.get((served_route, "tool_choice"), {"tool_choice": "required"})
    FORMS[served_route, "tool_choice"] = {**own_tools, **choice}
SERVED = {
    "/v1/completions": {"add_special_tokens", "logprobs", "echo"},
    "/v1/chat/completions": {
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents"),
        *("tools", "tool_choice", "max_completion_tokens", "logprobs", "top_logprobs"),
    },
    "/v1/responses": {
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents"),
        *("tools", "tool_choice", "max_output_tokens", "instructions", "top_logprobs", "text"),
    },
    "/v1/messages": {
        *("chat_template_kwargs", "documents", "tools", "tool_choice", "stop_sequences", "system"),
        *("output_format", "output_config"),
    },
}
HARMLESS: dict[str, Any] = {
    "user": "me",
    "metadata": {"user_id": "me"},
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "me",
    "prompt_cache_key": "k",
    "reasoning": {"effort": None},
    "reasoning_effort": None,
    "cache_salt": "x",
    "echo": False,
    "best_of": 1,
    "length_penalty": 1.0,
}


def ask(client: httpx.Client, route: str, fields: dict[str, Any]) -> httpx.Response:
    body = {**ROUTES[route], "max_tokens": 24, "temperature": 0, **fields}
    return client.post(route, json=body)


def said(answer: httpx.Response) -> str:
    """Return what an answer says and counts, without what is new in each or only repeated."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: plain(each) for name, each in value.items() if name not in ("id", "call_id")
            }
        return [plain(each) for each in value] if isinstance(value, list) else value

    content = answer.json()
    kept = ("choices", "output", "content", "usage")
    return json.dumps({name: plain(content[name]) for name in kept if name in content})


@pytest.fixture(scope="module")
def usual(client: httpx.Client) -> dict[str, str]:
    """What each route answers without any of the fields."""
    found = {}
    for route in ROUTES:
        first, again = ask(client, route, {}), ask(client, route, {})
        assert first.status_code == 200, first.text
        assert said(first) == said(again)
        found[route] = said(first)
    return found


def test_every_name_is_asked_about() -> None:
    assert ASKED.keys() == UNSUPPORTED.keys() | NEARLY_STEER


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ASKED)
def test_a_field_of_another_server_has_an_effect_or_is_refused_by_name(
    client: httpx.Client, usual: dict[str, str], route: str, name: str
) -> None:
    if name in ROUTES[route]:
        return  # it is the text itself
    answer = ask(client, route, FORMS.get((route, name), {name: ASKED[name]}))
    if name in SERVED[route]:
        assert answer.status_code == 200, answer.text
        assert said(answer) != usual[route]
        return
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(f"{name}: the field {name} ")
    assert "; " in error["message"], "it says what to do"
    if route != "/v1/messages":
        assert (error["param"], error["code"]) == (name, "unsupported_field")


@pytest.mark.parametrize("route", ROUTES)
def test_what_asks_for_nothing_is_taken(
    client: httpx.Client, usual: dict[str, str], route: str
) -> None:
    absent = dict.fromkeys((name for name in ASKED if name not in ROUTES[route]), None)
    for fields in (dict([*absent.items()][:50]), dict([*absent.items()][50:]), HARMLESS):
        answer = ask(client, route, fields)
        assert answer.status_code == 200, answer.text
        assert said(answer) == usual[route]


def test_clients_that_ask_for_encrypted_thoughts_get_an_answer() -> None:
    asked = ResponsesRequest(input="x", include=["reasoning.encrypted_content"])
    assert not asked.has_logprobs
    with pytest.raises(ValueError, match="file_search"):
        ResponsesRequest(input="x", include=["file_search_call.results"])


def names_of(*modules: ModuleType) -> set[str]:
    """Return the names that the functions of modules give to their arguments."""
    functions = [
        each
        for module in modules
        for holder in (module, *(c for _, c in inspect.getmembers(module, inspect.isclass)))
        for _, each in inspect.getmembers(holder, inspect.isfunction)
    ]
    here = {module.__name__ for module in modules}
    ours = [function for function in functions if function.__module__ in here]
    return {name for our in ours for name in inspect.signature(our).parameters}


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_free_objects_may_have_the_names_of_our_own_arguments(
    client: httpx.Client, route: str
) -> None:
    """Kills: options of a template, given as arguments, met the names of the functions' own."""
    names = sorted(names_of(chats, translation, prompts, requests, sse))
    assert {"self", "translator", "request", "top_logprobs"} <= {*names}
    odd = dict.fromkeys([name for name in names if name not in RESERVED][:MAX_KEYS], 1)
    answer = ask(client, route, {"chat_template_kwargs": odd, "metadata": {"self": "1"}})
    assert answer.status_code == 200, answer.text
    document = {**dict.fromkeys(names, "x"), "text": "Lima."}
    assert ask(client, route, {"documents": [document]}).status_code == 200
    for name in RESERVED:
        answer = ask(client, route, {"chat_template_kwargs": {name: 1}})
        assert answer.status_code == 400
        assert f"names {name}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_usage_in_every_chunk_is_refused_and_its_absence_is_not(
    client: httpx.Client, route: str
) -> None:
    body = {**ROUTES[route], "max_tokens": 1, "stream": True}
    asked = {"include_usage": True, "continuous_usage_stats": True}
    refused = client.post(route, json={**body, "stream_options": asked})
    assert refused.status_code == 400
    assert "continuous_usage_stats" in refused.json()["error"]["message"]
    asked["continuous_usage_stats"] = False
    assert client.post(route, json={**body, "stream_options": asked}).status_code == 200
