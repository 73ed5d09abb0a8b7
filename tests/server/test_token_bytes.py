"""Tokens that are parts of characters: their bytes, their names, and where they begin in a text."""

from __future__ import annotations

from random import Random
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from juice.engine.text import INCOMPLETE, TextStream
from juice_server.requests import Offsets, TokenTexts
from tests.support import tiny

ODD = "é漢😀 x‰"
TURNS = [{"role": "user", "content": "x"}]


def with_bytes_as_last_resort() -> PreTrainedTokenizerFast:
    """Return a tokenizer such as Llama's: pieces, and a token for each byte."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Lima", "a", "▁", "é", "漢"]
    made = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


@pytest.mark.parametrize("n", [20_000, pytest.param(100_000, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("made", "is_exact"), [(tiny.tiny_tokenizer(), True), (with_bytes_as_last_resort(), False)]
)
def test_bytes_are_the_answers_and_offsets_stay_within_it(
    made: PreTrainedTokenizerFast, is_exact: bool, n: int
) -> None:
    """Kills: the bytes of a replacement character, offsets that fall or run past the text."""
    texts, rng = TokenTexts(made), Random(0)
    n_whole = 0
    known = [token for token in range(len(made)) if token not in made.all_special_ids]
    for _ in range(n):
        ids = [rng.choice(known) for _ in range(rng.randrange(1, 8))]
        pieces = [texts.bytes_of(token) for token in ids]
        stream = TextStream(made, made("a")["input_ids"])
        answer = "".join(map(stream.push, ids)) + stream.finish()
        joined = b"".join(pieces).decode("utf-8", "replace")
        # Where bytes are no text, tokenizers differ in how many replacements they write.
        assert joined == answer or (INCOMPLETE in answer and not is_exact)
        n_whole += INCOMPLETE not in answer
        offsets = Offsets().of(pieces)
        assert offsets == sorted(offsets)
        assert offsets[-1] <= len(answer)
    assert n_whole > 100


def test_a_part_of_a_character_is_named_by_its_bytes() -> None:
    texts = TokenTexts(tiny.tiny_tokenizer())
    parts = [token for token in range(1, 257) if texts.name_of(token).startswith("bytes:")]
    names = [texts.name_of(token) for token in parts]
    assert len(names) == len(set(names)) == 128
    assert names[0][6:8] == "\\x"


@pytest.mark.parametrize("made", [tiny.tiny_tokenizer(), with_bytes_as_last_resort()])
def test_a_token_that_the_tokenizer_does_not_know_has_no_text_and_a_name_of_its_own(
    made: PreTrainedTokenizerFast,
) -> None:
    """Kills: the word None, for each of those that only fill the output layer."""
    texts, unknown = TokenTexts(made), range(len(made), len(made) + 5)
    assert {texts.bytes_of(token) for token in unknown} == {b""}
    assert {texts[token] for token in unknown} == {""}
    assert [texts.name_of(token) for token in unknown] == [f"token_id:{i}" for i in unknown]


def ask(url: str, route: str, **body: Any) -> Any:
    answer = httpx.post(
        f"{url}{route}", json={"model": "mini", "guided_choice": [ODD], "temperature": 0, **body}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_a_completion_says_where_each_part_begins(url: str) -> None:
    choice = ask(url, "/v1/completions", prompt="x", max_tokens=40, logprobs=5)
    assert choice["text"] == ODD
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(ODD)
    assert len(set(offsets)) >= len(ODD) - 1
    assert all(len(top) >= 5 for top in choice["logprobs"]["top_logprobs"]), "each its key"


def test_a_streamed_completion_says_the_same(url: str) -> None:
    whole = ask(url, "/v1/completions", prompt="x", max_tokens=40, logprobs=2)["logprobs"]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as api:
        chunks = api.completions.create(
            model="mini", prompt="x", max_tokens=40, logprobs=2, temperature=0, stream=True,
            extra_body={"guided_choice": [ODD]},
        )  # fmt: skip
        parts = [one.choices[0].logprobs for one in chunks if one.choices[0].logprobs]
    assert [at for part in parts for at in part.text_offset] == whole["text_offset"]
    assert [name for part in parts for name in part.tokens] == whole["tokens"]


def test_the_bytes_of_a_chats_tokens_are_its_answer(url: str) -> None:
    choice = ask(
        url, "/v1/chat/completions", messages=TURNS, max_tokens=40, logprobs=True, top_logprobs=3
    )
    places = choice["logprobs"]["content"]
    assert bytes(byte for place in places for byte in place["bytes"]).decode() == ODD
    assert choice["message"]["content"] == ODD
