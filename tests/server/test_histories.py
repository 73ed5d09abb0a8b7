"""What was said before, as clients send it: roles, refusals, thoughts and failed calls."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from juice_server.chat import RESERVED
from juice_server.routes.anthropic import MessagesRequest, block_of
from juice_server.routes.openai import ChatRequest
from juice_server.routes.responses import ResponsesRequest, item_of
from juice_server.tool_parser import Call, Thought, Words

ASK = {"role": "user", "content": "Hi"}
BRIEF = {"role": "system", "content": "Be brief."}


def of_chat(*turns: dict[str, Any]) -> list[dict[str, Any]]:
    return [turn.plain() for turn in ChatRequest(messages=[*turns]).messages]


def of_responses(*items: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return ResponsesRequest(input=[*items], **more).turns()


def of_messages(*turns: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return MessagesRequest(messages=[*turns], max_tokens=1, **more).turns()


def test_a_developer_is_the_system() -> None:
    assert of_chat({**BRIEF, "role": "developer"}, ASK) == [BRIEF, ASK]


def test_what_the_system_says_first_is_one_turn() -> None:
    both = {"role": "system", "content": "Answer.\n\nBe brief."}
    assert of_responses(BRIEF, ASK, instructions="Answer.") == [both, ASK]
    developer = {**BRIEF, "role": "developer"}
    assert of_responses(developer, ASK, instructions="Answer.") == [both, ASK]
    assert of_messages(BRIEF, ASK, system="Answer.") == [both, ASK]
    assert of_messages(BRIEF, ASK) == [BRIEF, ASK]
    assert of_responses(ASK, BRIEF, instructions="Answer.") == [
        {"role": "system", "content": "Answer."},
        ASK,
        BRIEF,
    ]


def test_what_a_response_had_comes_back_as_one_turn() -> None:
    """The items are those that the route itself makes."""
    given = [Thought("Hm."), Words("I ask."), Call("c1", "f", "{}")]
    items = [item_of(part).model_dump() for part in given]
    result = {"type": "function_call_output", "call_id": "c1", "output": "sun"}
    asked, answered, told = of_responses(ASK, *items, result)
    assert asked == ASK
    assert {**answered, "tool_calls": len(answered["tool_calls"])} == {
        "role": "assistant",
        "content": "I ask.",
        "reasoning_content": "Hm.",
        "tool_calls": 1,
    }
    assert told == {"role": "tool", "tool_call_id": "c1", "content": "sun"}


def test_thoughts_that_nothing_follows_are_left_out() -> None:
    thought = item_of(Thought("Hm.")).model_dump()
    assert of_responses(ASK, thought) == [ASK]
    assert of_responses(ASK, thought, ASK) == [ASK, ASK]
    only_hidden = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}
    answer = {"role": "assistant", "content": "Yes."}
    assert of_responses(ASK, only_hidden, answer, ASK) == [ASK, answer, ASK]


def test_what_a_message_had_comes_back_as_one_turn() -> None:
    given = [Thought("Hm."), Words("I ask."), Call("c1", "f", "{}")]
    blocks = [block_of(part).model_dump() for part in given]
    hidden = {"type": "redacted_thinking", "data": "x"}
    failed = {"type": "tool_result", "tool_use_id": "c1", "is_error": True, "content": "no net"}
    asked, answered, told = of_messages(
        ASK,
        {"role": "assistant", "content": [hidden, *blocks]},
        {"role": "user", "content": [failed]},
    )
    assert asked == ASK
    assert answered["reasoning_content"] == "Hm."
    assert answered["content"] == "I ask."
    assert told == {"role": "tool", "tool_call_id": "c1", "content": "Error: no net"}


@pytest.mark.parametrize("value", ['"\\ud800"', "1e999", "9" * 5000, "[" * 300])
def test_enforced_arguments_that_cannot_be_sent_are_a_block_of_text(value: str) -> None:
    """A grammar lets them pass: they are JSON, but not to every reader."""
    arguments = f'{{"a": {value}}}'
    block = block_of(Call("c1", "f", arguments)).model_dump()
    assert block == {"type": "text", "text": arguments}


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "refusal": "I can't."},
        {"role": "assistant", "refusal": "I can't."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I can't."}]},
    ],
)
def test_a_refusal_is_what_was_said(turn: dict[str, Any]) -> None:
    assert of_chat(ASK, turn)[-1] == {"role": "assistant", "content": "I can't."}


def test_a_refused_part_of_a_response_is_what_was_said() -> None:
    part = {"type": "refusal", "refusal": "I can't."}
    item = {"type": "message", "role": "assistant", "content": [part]}
    assert of_responses(ASK, item)[-1] == {"role": "assistant", "content": "I can't."}


def test_a_call_may_return_nothing() -> None:
    turn = {"role": "tool", "tool_call_id": "a", "content": None}
    assert of_chat(ASK, turn)[-1] == {**turn, "content": ""}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_of_a_chat_reach_the_template(name: str) -> None:
    turn = {"role": "assistant", "content": "Yes.", name: "Hm."}
    assert of_chat(turn)[0] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm.",
    }


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"role": "user", "content": None}, "expected text"),
        ({"role": "user", "content": None, "refusal": "no"}, "expected text"),
        ({"role": "assistant", "content": "x", "prefix": True}, "continue_final_message"),
        ({"role": "assistant", "content": None, "audio": {"id": "a"}}, "audio"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "image_url"),
    ],
)
def test_a_turn_that_cannot_be_given_as_it_is_meant_is_refused(
    turn: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        of_chat(turn)


def test_no_option_of_a_template_is_one_of_the_call_that_renders_it() -> None:
    each: set[str] = set()
    for function in (
        PreTrainedTokenizerBase.apply_chat_template,
        chat_template_utils.render_jinja_template,
    ):
        parameters = inspect.signature(function).parameters.values()
        each |= {one.name for one in parameters if one.kind is not one.VAR_KEYWORD}
    assert each | {"messages"} == RESERVED
