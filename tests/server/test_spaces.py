"""Spaces of answers, however tokenizers spell them: none is lost or doubled, streamed or whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from tests.support import tiny
from tests.support.on_vllm import wide
from tests.support.serving import events, serving
from tests.support.spellings import PIECES, SPELLINGS

TEMPLATE = "{% for m in messages %}user: {{ m.content }}\n{% endfor %}assistant:"


@dataclass(frozen=True)
class Spelling:
    """A served model with a tokenizer of some kind."""

    url: str
    tokenizer: PreTrainedTokenizerFast

    def post(self, route: str, **body: Any) -> Any:
        answer = httpx.post(f"{self.url}{route}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def streamed(self, route: str, **body: Any) -> list[str]:
        """Return the joined pieces of each choice."""
        texts: dict[int, str] = {}
        asked = {**body, "stream": True}
        with httpx.stream("POST", f"{self.url}{route}", json=asked, timeout=60) as answer:
            for event in events(answer):
                for choice in event.get("choices", [event]):
                    text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    at = choice.get("index", 0)
                    texts[at] = texts.get(at, "") + text
        return [texts[at] for at in sorted(texts)]

    @property
    def sampling(self) -> dict[str, Any]:
        """Options of 32 answers that are made of PIECES."""
        pieces = [piece.replace(" ", space) for piece in PIECES for space in (" ", "▁", "Ġ")]
        known = self.tokenizer.get_vocab()
        bias = {str(known[piece]): 100 for piece in pieces if piece in known}
        assert len(bias) > 6
        return {
            "n": 32, "max_tokens": 20, "temperature": 2.0, "seed": 1,
            "ignore_eos": True, "logit_bias": bias,
        }  # fmt: skip

    def text_of(self, prompt: list[int], answer: list[int]) -> str:
        """Return what an answer adds to its prompt, decoded as a whole."""
        both, before = (self.tokenizer.decode(ids) for ids in (prompt + answer, prompt))
        assert both.startswith(before)
        return both[len(before) :]


@pytest.fixture(scope="module", params=SPELLINGS)
def spelling(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Spelling]:
    made = PreTrainedTokenizerFast(
        tokenizer_object=SPELLINGS[request.param](),
        eos_token=tiny.END,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    assert len(made) <= tiny.VOCAB_SIZE
    folder = tiny.save(tmp_path_factory.mktemp("spelling"), wide("Llama").build(), made)
    with serving("--model", str(folder)) as running:
        yield Spelling(running.url, made)


@pytest.mark.parametrize("prompt", ["x", "x ", " Lima", "x  "])
def test_an_answer_is_what_its_tokens_add_to_the_prompt(spelling: Spelling, prompt: str) -> None:
    """The oracle decodes prompt and answer as a whole."""
    asked = {"prompt": prompt, **spelling.sampling}
    ids = spelling.post("/tokenize", prompt=prompt)["tokens"]
    choices = spelling.post("/generate", **asked, logprobs=0)["choices"]
    texts = [choice["text"] for choice in choices]
    tokens = [[token["id"] for token in choice["logprobs"]] for choice in choices]
    assert texts == [spelling.text_of(ids, each) for each in tokens]
    assert any(text.startswith(" ") for text in texts)
    assert any("  " in text for text in texts)
    assert spelling.streamed("/generate", **asked) == texts
    theirs = spelling.post("/v1/completions", **asked)["choices"]
    assert [choice["text"] for choice in theirs] == texts
    assert spelling.streamed("/v1/completions", **asked) == texts


def test_a_reply_is_what_its_tokens_add_to_the_chat(spelling: Spelling) -> None:
    turns = {"messages": [{"role": "user", "content": "x"}]}
    ids = spelling.post("/tokenize", **turns)["tokens"]
    completions = spelling.post("/v1/completions", prompt=ids, **spelling.sampling)["choices"]
    chat = {**turns, **spelling.sampling}
    choices = spelling.post("/v1/chat/completions", **chat)["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    assert texts == [choice["text"] for choice in completions]
    assert any(text.startswith(" ") for text in texts)
    assert spelling.streamed("/v1/chat/completions", **chat) == texts
