"""The ordinary text that learning protects, in pieces between lines of four dashes."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "juice" / "identification" / "text"
AT_LEAST = {"prose": 70, "dialogue": 35, "code": 30, "lists": 30}


def pieces(name: str) -> list[str]:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8").split("\n----\n")


def test_there_is_a_file_of_each_kind_and_no_other() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(AT_LEAST)


@pytest.mark.parametrize("name", AT_LEAST)
def test_every_piece_is_of_about_a_hundred_words_or_of_about_five_hundred(name: str) -> None:
    """Some prose is long: who is told of at its end was named at its beginning."""
    found = pieces(name)
    assert len(found) >= AT_LEAST[name]
    n_long = 0
    for piece in found:
        assert "----" not in piece.splitlines()
        # Of UTF-8, since Chinese says as much in a third of the characters.
        n_bytes = len(piece.encode())
        assert 250 <= n_bytes <= 900 or 2000 <= n_bytes <= 3600, piece
        n_long += n_bytes > 900
    assert n_long == (10 if name == "prose" else 0)


def test_no_two_pieces_are_the_same_or_begin_with_the_same_sentence() -> None:
    starts = [piece.strip()[:40] for name in AT_LEAST for piece in pieces(name)]
    assert len(set(starts)) == len(starts)


def test_no_piece_has_a_special_token() -> None:
    for name in AT_LEAST:
        for piece in pieces(name):
            assert not any(mark in piece for mark in ("<|", "|>", "<s>", "</s>", "[INST]", "<bos>"))
