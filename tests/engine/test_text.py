"""Streamed text is the decoded text, wherever tokens split characters and stop strings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from juice.engine.text import TextStream
from tests.support import tiny

TOKENIZER = tiny.tiny_tokenizer()


@given(st.text(max_size=40), st.text(max_size=6))
def test_bytes_of_any_text_stream_to_that_text(text: str, prompt: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    stream = TextStream(TOKENIZER, TOKENIZER(prompt)["input_ids"])
    assert "".join([*map(stream.push, ids), stream.finish()]) == text == stream.text


@given(st.lists(st.integers(1, 256), max_size=30))
def test_any_tokens_stream_to_their_decoded_text(ids: list[int]) -> None:
    stream = TextStream(TOKENIZER, ())
    assert "".join([*map(stream.push, ids), stream.finish()]) == TOKENIZER.decode(ids)


@given(
    st.text(alphabet="abc", max_size=20),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop_string_and_no_piece_shows_its_beginning(
    text: str, stops: list[str]
) -> None:
    """The oracle searches the whole text for the first character that completes a stop string."""
    stream = TextStream(TOKENIZER, (), stops)
    pieces = []
    for token in TOKENIZER(text)["input_ids"]:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    else:
        pieces.append(stream.finish())
    complete = next((n for n in range(len(text) + 1) if any(s in text[:n] for s in stops)), None)
    expected = (
        text
        if complete is None
        else text[: min(text[:complete].find(s) for s in stops if s in text[:complete])]
    )
    assert "".join(pieces) == expected
    assert stream.stopped == (complete is not None)


def test_text_that_never_becomes_whole_costs_no_more_the_longer_it_is() -> None:
    """A client can bias toward half a character.

    Each token is decoded a bounded number of times, and nothing is lost or invented.
    """
    tokenizer = tiny.tiny_tokenizer()
    half = tokenizer("é")["input_ids"][0]
    decoded = 0
    decode = tokenizer.decode

    def counting(ids, **options):
        nonlocal decoded
        decoded += len(ids)
        return decode(ids, **options)

    tokenizer.decode = counting
    for ids in ([half] * 500, [half, half, 5] * 200, [0] * 500, [0, 65, half] * 100):
        stream = TextStream(tokenizer, [70, 71], special_ids=frozenset(tokenizer.all_special_ids))
        decoded = 0
        text = "".join(stream.push(token) for token in ids) + stream.finish()
        assert decoded < 150 * len(ids)
        assert text == stream.text == decode(ids, skip_special_tokens=True)
