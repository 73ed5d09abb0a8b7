"""Streamed text is the decoded text, wherever tokens split characters and stop strings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from juice.engine.answer import Completion, ScoredToken
from juice.engine.request import Request
from juice.engine.text import TextStream, Transcript
from tests.support import tiny
from tests.support.spellings import SPELLINGS

TOKENIZER = tiny.tiny_tokenizer()


@given(st.text(max_size=40), st.text(max_size=6))
def test_bytes_of_any_text_stream_to_that_text(text: str, prompt: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    stream = TextStream(TOKENIZER, TOKENIZER(prompt)["input_ids"])
    assert "".join([*map(stream.push, ids), stream.finish()]) == text == stream.text


def by_fallback() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes, each spelled `<0x..>`."""
    names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made)


FALLBACK = by_fallback()


@pytest.mark.parametrize("spelled", ["as bytes", "by fallback"])
@given(st.text("a é€😀", min_size=1, max_size=12), st.integers(0, 40))
def test_a_character_that_the_prompt_begins_is_whole_in_the_answer(
    spelled: str, text: str, n_prompt: int
) -> None:
    """The oracle: what is not whole in the prompt's bytes."""
    data = text.encode()
    tokenizer = TOKENIZER if spelled == "as bytes" else FALLBACK
    ids = TOKENIZER(text)["input_ids"] if spelled == "as bytes" else [1 + byte for byte in data]
    stream = TextStream(tokenizer, ids[:n_prompt])
    answer = "".join([*map(stream.push, ids[n_prompt:]), stream.finish()])
    complete = data[:n_prompt].decode(errors="ignore")
    assert answer == text[len(complete) :]


def test_each_token_has_its_share_of_the_text() -> None:
    """As Llama 2's and Mistral's tokenizers spell: alone, each word would lose its space."""
    words = [
        "<unk>",
        "</s>",
        "▁by",
        "▁Charles",
        "▁Dickens",
        ".",
        *(f"<0x{i:02X}>" for i in range(256)),
    ]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    ids = [3, 4, *(6 + byte for byte in "é".encode()), 5, 1]
    assert [tokenizer.decode([each]) for each in ids[:2]] == ["Charles", "Dickens"]
    done: list[Completion] = []
    transcript = Transcript(
        Request.of(prompt_ids=(2,)),
        TextStream(tokenizer, (2,)),
        frozenset({1}),
        lambda update: done.extend([update.completion] if update.completion else []),
    )
    transcript.add([ScoredToken(each, 0.0) for each in ids])
    transcript.complete()
    shares = [token.text for token in done[0].tokens]
    assert shares == [" Charles", " Dickens", "", "é", ".", ""]
    assert "".join(shares) == done[0].text == " Charles Dickensé."


@given(st.lists(st.integers(1, 256), max_size=30))
def test_any_tokens_stream_to_their_decoded_text(ids: list[int]) -> None:
    stream = TextStream(TOKENIZER, ())
    assert "".join([*map(stream.push, ids), stream.finish()]) == TOKENIZER.decode(ids)


@given(
    st.text(alphabet="abc", max_size=20),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=3), min_size=1, max_size=3),
    st.sampled_from([0, 1, 3, 7]),
)
def test_text_ends_before_the_first_stop_string_and_no_piece_shows_its_beginning(
    text: str, stops: list[str], n_early: int
) -> None:
    """The oracle searches the whole text for the first character that completes a stop string,
    where no more than the first ones may not stop.
    """
    stream = TextStream(TOKENIZER, (), stops)
    pieces = []
    for i, token in enumerate(TOKENIZER(text)["input_ids"]):
        pieces.append(stream.push(token, may_stop=i >= n_early))
        if stream.stopped_by:
            break
    else:
        pieces.append(stream.finish())
    ends = range(n_early + 1, len(text) + 1)
    complete = next((n for n in ends if text[:n].endswith(tuple(stops))), None)
    expected = (
        text
        if complete is None
        else text[: min(complete - len(s) for s in stops if text[:complete].endswith(s))]
    )
    assert "".join(pieces) == expected
    assert bool(stream.stopped_by) == (complete is not None)
    assert complete is None or text[:complete].endswith(stream.stopped_by)


def read(tokenizer: PreTrainedTokenizerFast, ids: list[int], **options: Any) -> tuple[str, int]:
    """Stream tokens; return their text, and how many were decoded, those that were so again too."""
    n_decoded, decode = 0, tokenizer.decode

    def counting(tokens: list[int], **how: Any) -> str:
        nonlocal n_decoded
        n_decoded += len(tokens)
        return decode(tokens, **how)

    tokenizer.decode = counting
    try:
        stream = TextStream(tokenizer, tokenizer("Hi")["input_ids"], **options)
        text = "".join([*map(stream.push, ids), stream.finish()])
    finally:
        del tokenizer.decode
    assert text == stream.text
    return text, n_decoded


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("stop", [(), ("Lima Lima Lima", "\n\n\n")])
def test_a_token_costs_the_same_at_the_end_of_a_long_answer(
    spelling: str, stop: tuple[str, ...]
) -> None:
    """Kills: decoding the whole answer again for each token, or what a stop string may need."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=SPELLINGS[spelling]())
    words = tokenizer("é Lima  a. Lima\n" * 200, add_special_tokens=False)["input_ids"]
    costs = {n: read(tokenizer, words[:n], stop=stop)[1] for n in (300, 900)}
    assert len(words) >= 900
    assert costs[300] < 8 * 300
    assert costs[900] < 3.1 * costs[300]


def test_text_that_never_becomes_whole_costs_no_more_the_longer_it_is() -> None:
    """A client can bias toward half a character.

    Each token is decoded a bounded number of times, and nothing is lost or invented.
    """
    tokenizer = tiny.tiny_tokenizer()
    half, special = tokenizer("é")["input_ids"][0], frozenset(tokenizer.all_special_ids)
    unknown = len(tokenizer)  # some models have more tokens than their tokenizers
    for ids in (
        *([half] * 500, [half, half, 5] * 200, [0] * 500, [0, 65, half] * 100),
        *([unknown] * 500, [unknown, half] * 200, [half, *[unknown] * 50, 65] * 10),
    ):
        text, n_decoded = read(tokenizer, ids, special_ids=special)
        assert n_decoded < 150 * len(ids)
        assert text == tokenizer.decode(ids, skip_special_tokens=True)
