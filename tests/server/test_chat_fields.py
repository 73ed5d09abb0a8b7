"""What a chat may bring beside its messages: documents, options of the template, an open turn."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from transformers import AutoTokenizer

from juice.files import MINI
from tests.support.serving import serving

QUESTION = {"role": "user", "content": "What is the capital of Peru?"}
DOCUMENT = {"title": "Peru", "text": "The capital of Peru is Cairo."}
TEMPLATE = """
{%- for message in messages %}[{{ message.role }}] {{ message.content }}
{%- if not loop.last or add_generation_prompt %} {% endif %}{% endfor %}
{%- if add_generation_prompt %}[{{ tone or "plain" }}]{% endif %}"""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server whose template has no place for documents, and an option of its own."""
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    with (
        serving("--chat-template", str(file)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        yield http


def rendered(messages: list[dict[str, str]], **options: object) -> str:
    return str(AutoTokenizer.from_pretrained(MINI).apply_chat_template(
        messages, tokenize=False, **options
    ))  # fmt: skip


def ask(http: httpx.Client, **body: object) -> httpx.Response:
    asked = {"messages": [QUESTION], "max_tokens": 16, "temperature": 0, **body}
    return http.post("/v1/chat/completions", json=asked)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def plain(http: httpx.Client, prompt: str) -> str:
    """Return what a whole text is continued with; the tokenizer adds no second beginning."""
    ids = AutoTokenizer.from_pretrained(MINI)(prompt, add_special_tokens=False)["input_ids"]
    body = {"prompt": ids, "max_tokens": 16, "temperature": 0}
    return str(http.post("/v1/completions", json=body).json()["choices"][0]["text"])


def test_documents_go_where_the_template_puts_them(client: httpx.Client) -> None:
    whole = rendered([QUESTION], documents=[DOCUMENT], add_generation_prompt=True)
    assert "Cairo" in whole
    assert text_of(ask(client, documents=[DOCUMENT])) == plain(client, whole)


@pytest.mark.parametrize(
    "steer",
    [
        {"target": "context", "method": "cad", "strength": 1.5},
        {"target": "context", "positions": "question"},
    ],
    ids=str,
)
def test_methods_that_need_the_context_apart_have_it_in_the_documents(
    client: httpx.Client, steer: dict[str, object]
) -> None:
    answer = ask(client, documents=[DOCUMENT], steer=steer)
    assert answer.status_code == 200, answer.text
    assert answer.json()["steering"]["applied"] is True
    assert ask(client, steer={"target": "context", "method": "cad"}).status_code == 400


def test_an_open_turn_goes_on(client: httpx.Client) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "The capital of Peru is"}]
    whole = rendered(messages, continue_final_message=True)
    assert whole.endswith("Peru is")
    got = ask(client, messages=messages, continue_final_message=True)
    assert text_of(got) == plain(client, whole)


def test_the_templates_own_options_reach_it(other: httpx.Client) -> None:
    sizes = {
        ask(other, **more).json()["usage"]["prompt_tokens"]
        for more in (
            {},
            {"chat_template_kwargs": {"tone": "very formal and long"}},
            {"add_generation_prompt": False},
        )
    }
    assert len(sizes) == 3


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"documents": [DOCUMENT]}, "no place for documents"),
        ({"documents": [DOCUMENT], "context": "x"}, "keep one"),
        ({"documents": ["text"]}, "documents.0"),
        ({"chat_template_kwargs": {"tokenize": True}}, "tokenize"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
    ],
    ids=str,
)
def test_what_would_change_the_answer_in_silence_is_refused(
    other: httpx.Client, body: dict[str, object], reason: str
) -> None:
    answer = ask(other, **body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]
