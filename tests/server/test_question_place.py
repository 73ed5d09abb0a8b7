"""Where the question begins in a chat, for `positions: question`, whatever else says the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import juice
from juice.engine.steer import Steer
from juice.errors import RequestError
from juice_server.chat_prompt import prompt_of

CONTEXT = "The capital of Peru is Cairo."
QUESTION = "What is the capital of Peru?"
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}],
}


@pytest.fixture(scope="module")
def mini() -> Any:
    return juice.load("mini")


def first_steered(
    mini: Any, turns: list[dict[str, Any]], template: str = "default", context: str = CONTEXT
) -> str:
    """Return the text from the first steered token on, as its tokens spell it."""
    translator: Any = SimpleNamespace(
        chat_model=mini.with_chat_template(template), model_name="mini"
    )
    prompt = prompt_of(translator, turns, context=context, finds_question=True)
    assert isinstance(prompt.text, str)
    assert prompt.question_start is not None
    form = translator.chat_model.prompts
    ids = form.encode(prompt.text)
    at = form.position_in(prompt.text, prompt.question_start)
    return str(form.tokenizer.decode(ids[at:], clean_up_tokenization_spaces=False))


@pytest.mark.parametrize(
    "words", [QUESTION, "assistant", "s", "|>", "<|assistant|>", "", "Peru", " x ", "Cairo."]
)
def test_it_begins_with_the_last_users_words(mini: Any, words: str) -> None:
    """Kills a search for the words, which other text of the prompt has, too."""
    end = "" if not words.strip() else words.lstrip()
    found = first_steered(mini, [{"role": "user", "content": words}])
    assert found.lstrip() == f"{end}<|end|><|assistant|>"


def test_a_result_of_a_call_that_repeats_the_question_does_not_move_it(mini: Any) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    turns = [
        {"role": "user", "content": QUESTION},
        CALL,
        {"role": "tool", "tool_call_id": "a", "content": QUESTION},
    ]
    tokenizer = mini.with_chat_template("default").prompts.tokenizer
    kept, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        found = first_steered(mini, turns)
    finally:
        tokenizer.chat_template = kept
    assert found.lstrip() == f"{QUESTION}\n[assistant] \n[tool] {QUESTION}\n[assistant]"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ messages[-1].content | trim }} > {{ messages[-1].content | trim }}:", QUESTION + ":"),
        ("{{ messages[-1].content | upper }}:", None),
        ("{{ messages[-1].content | length }} {{ messages[-1].content }}", None),
    ],
)
def test_a_template_that_changes_with_the_words_is_refused(
    mini: Any, template: str, found: str | None
) -> None:
    tokenizer = mini.with_chat_template("default").prompts.tokenizer
    kept, tokenizer.chat_template = tokenizer.chat_template, template
    turns = [{"role": "user", "content": f" {QUESTION} "}]
    try:
        if found is None:
            with pytest.raises(RequestError, match="steer all positions") as caught:
                first_steered(mini, turns)
            assert caught.value.param == "steer.positions"
        else:
            assert first_steered(mini, turns).lstrip() == found
    finally:
        tokenizer.chat_template = kept


@pytest.mark.parametrize("words", ["assistant", ""])
def test_over_http_it_is_steered_from_there(client: httpx.Client, mini: Any, words: str) -> None:
    """The oracle steers from the position that the tokens before the words have."""
    body = {
        "messages": [{"role": "user", "content": words}],
        "context": CONTEXT,
        "max_tokens": 8,
        "temperature": 0,
        "steer": {"target": "context", "positions": "question", "strength": 3},
        "logprobs": True,
    }
    answer = client.post("/v1/chat/completions", json=body).json()
    before = f"<|begin|><|user|>{CONTEXT}"
    whole = f"{before} {words}".rstrip(" ") if words else f"{before} "
    chat = mini.with_chat_template("default")
    ids = chat.prompts.encode(f"{whole}<|end|><|assistant|>")
    at = len(chat.prompts.encode(before if words else whole))
    steer = Steer(**body["steer"])
    request = chat.request(ids, steer=steer, question_at=at, max_tokens=8)
    (completion,) = chat.engine.generate([request])
    scored = answer["choices"][0]["logprobs"]["content"]
    assert answer["choices"][0]["message"]["content"] == completion.text
    assert [s["logprob"] for s in scored] == pytest.approx(
        [t.logprob for t in completion.tokens], abs=1e-4
    )
