"""`--chat-template`: the tokenizer's own by `default`, a file in its place, or none at all."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.support import tiny
from tests.support.serving import Server, serving

OWN = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
OTHER = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "temperature": 0}


def used(url: str) -> tuple[str, int]:
    """Return the hash of the template that a server uses, and the tokens of a prompt through it."""
    sha256 = httpx.get(f"{url}/info").json()["model"]["chat_template_sha256"]
    answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT).json()
    return sha256, answer["usage"]["prompt_tokens"]


def test_default_is_the_tokenizers_own_and_a_file_takes_its_place(tmp_path: Path) -> None:
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.chat_template = OWN
    model = tiny.save(tmp_path / "model", tiny.tiny_model("llama"), tokenizer)
    (tmp_path / "other.jinja").write_text(OTHER + "!")
    seen = []
    for given in (
        (),
        ("--chat-template", "default"),
        ("--chat-template", str(tmp_path / "other.jinja")),
    ):
        with serving("--model", str(model), *given) as server:
            seen.append(used(server.url))
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[2][0]
    assert seen[2][1] == seen[0][1] + 1


def test_default_without_a_template_ends_the_server_with_one_line(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", tiny.tiny_model("llama"))
    server = Server("--model", str(model), "--chat-template", "default")
    assert server.process.wait(timeout=120) == 2
    assert "has no chat template" in server.errors().splitlines()[-1]


def test_a_model_without_a_template_refuses_to_chat(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model", tiny.tiny_model("llama"))
    with serving("--model", str(model)) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert "no chat template" in answer.json()["error"]["message"]


def test_a_template_that_refuses_a_users_message_leaves_out_chats_alone(tmp_path: Path) -> None:
    """Kills: a server that does not start for want of the chats that nobody sends."""
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('begin with a system message') }}"
    model = tiny.save(tmp_path / "model", tiny.tiny_model("llama"), tokenizer)
    with serving("--model", str(model)) as server:
        said = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).json()["error"]
        prompt = {"prompt": "hi", "max_tokens": 1}
        assert httpx.post(f"{server.url}/generate", json=prompt).status_code == 200
        assert "--chat-template FILE" in server.errors()
    assert said["param"] == "messages"
    assert "begin with a system message" in said["message"]


def test_functions_are_offered_through_the_template_for_them(tmp_path: Path) -> None:
    """Kills: functions through the default of two templates, or a token that only theirs writes."""
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.add_tokens(["~tool~"])
    listed = "{% for t in tools %}~tool~{{ t['function']['name'] }}{% endfor %}" + OTHER
    tokenizer.chat_template = {"default": OWN, "tool_use": listed}
    model = tiny.save(tmp_path / "model", tiny.tiny_model("llama"), tokenizer)
    asked = {**CHAT, "messages": [{"role": "user", "content": "a~tool~"}]}
    functions = {"tools": [{"type": "function", "function": {"name": "now"}}]}
    forbidden = {**functions, "tool_choice": "none"}
    with serving("--model", str(model)) as server:

        def count(**fields: object) -> int:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json={**asked, **fields})
            return answer.json()["usage"]["prompt_tokens"]

        # T: a token, which the user may not write where the template does.
        assert count() == len("[aT]") == count(**forbidden)
        assert count(**functions) == len("Tnow<a~tool~>")
        chat = {"messages": asked["messages"]}
        told = httpx.post(f"{server.url}/tokenize", json={**chat, **functions}).json()
        assert told["count"] == len("Tnow<a~tool~>")
        named = {"model": "m", "tools": [{"name": "now", "input_schema": {}}]}
        told = httpx.post(f"{server.url}/v1/messages/count_tokens", json={**chat, **named}).json()
        assert told["input_tokens"] == len("Tnow<a~tool~>")
