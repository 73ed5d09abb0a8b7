"""The rules of what counts as the answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from juice.data.example import ConflictExample
from juice.data.judging import begins_with_answer, contains_answer, is_among, normalise


@pytest.mark.parametrize(
    ("output", "accepted", "correct"),
    [
        (" Paris.", ["Paris"], True),
        (" paris, the capital", ["Paris"], True),
        (" the city of Paris", ["Paris"], True),
        (" a b c d e Paris", ["Paris"], False),
        (" a b c d Paris", ["Paris"], True),
        (" Bogota", ["Bogotá"], True),
        (" São  Tomé", ["Sao Tome"], True),
        (" N'Djamena", ["NDjamena"], True),
        (" Port-au-Prince", ["PortauPrince"], True),
        (" London", ["Paris", "London"], True),
        (" London", ["Paris"], False),
        ("", ["Paris"], False),
        (" Paris", [], False),
        (" Paris", ["..."], False),
        (" one two three four five six", ["five six"], False),
        (" one two three four five six", ["one two three four five six"], True),
        (" It is one two three four five six", ["one two three four five six"], True),
        (" a b c d e one two three four five six", ["one two three four five six"], False),
        (" one two three four five seven", ["one two three four five six"], False),
    ],
)
def test_an_answer_counts_within_the_first_five_words(
    output: str, accepted: list[str], *, correct: bool
) -> None:
    assert contains_answer(output, accepted) is correct


@pytest.mark.parametrize(
    ("output", "accepted", "correct"),
    [
        (" fonder.", ["fonder"], True),
        (' "Fonder!" he said', ["fonder"], True),
        (" much fonder", ["fonder"], False),
        (" fonderly", ["fonder"], False),
        (" a friend in need.\n", ["a friend in need."], True),
        (" a friend in deed", ["a friend in need"], False),
        (" a friend", ["a friend in need"], False),
        (" melting-pot of", ["meltingpot"], True),
        (" neighbour's wife", ["neighbours"], True),
        (" - fonder", ["fonder"], True),
        (" café", ["cafe"], True),
        (" B. The Earth", ["B"], True),
        (" second", ["first", "second"], True),
        (" anything", ["..."], False),
        ("", ["fonder"], False),
        ("", [""], False),
    ],
)
def test_an_ending_counts_when_the_output_begins_with_it(
    output: str, accepted: list[str], *, correct: bool
) -> None:
    assert begins_with_answer(output, accepted) is correct


def example(answer: str, **rule: object) -> ConflictExample:
    return ConflictExample(
        subject="s",
        parametric_answer=answer,
        context_answer="b",
        prompts={"clean": "s is"},
        **rule,
    )


def test_each_rule_judges_what_the_other_would_not() -> None:
    six = "one two three four five six"
    assert example("Paris").is_right(" the city of Paris", "parametric")
    assert not example("Paris", match="begins").is_right(" the city of Paris", "parametric")
    assert example(six, match="begins").is_right(f" {six}", "parametric")
    assert example("Paris", match="exact").is_right(" The Paris.\nQuestion: Who", "parametric")
    assert not example("Paris", match="exact").is_right(" Paris, of course", "parametric")
    assert not example("Paris", match="exact").is_right(" one of Paris", "parametric")


def test_an_answer_longer_than_the_words_looked_at_gets_words_and_tokens_for_itself() -> None:
    long = "the return of the king to the white city of Minas Tirith"
    assert example(long).is_right(f" {long}.", "parametric")
    assert example(long).max_tokens == 2 * (5 + 12)
    assert example(long, n_words=20).max_tokens == 20


def test_a_data_set_may_look_further_than_five_words_and_gets_tokens_for_it() -> None:
    far = " ".join("abcdefghijklmnopqrs") + " Paris"
    assert (example("Paris").max_tokens, example("Paris", n_words=20).max_tokens) == (15, 20)
    assert not example("Paris").is_right(far, "parametric")
    assert example("Paris", n_words=20).is_right(far, "parametric")
    assert not example("Paris", n_words=20).is_right(f"t {far}", "parametric")


def test_an_answer_is_among_others_however_it_is_written() -> None:
    assert is_among("São Tomé!", ["Lima", "sao tome"])
    assert not is_among("Sao", ["sao tome"])


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("バリ", "パリ", False),
        ("ハリ", "パリ", False),
        ("ﾊﾟﾘ", "パリ", True),
        ("दिल्ली", "दौलेल", False),
        ("นา", "น้า", False),
        ("กา", "กี", False),
        ("ハ\u309aリ", "パリ", True),
        ("Ελλάδα", "ελλαδα", True),
        ("Йошкар", "иошкар", True),
        ("Đà Nẵng", "đa nang", True),
        ("مُحَمَّد", "محمد", True),
        ("שָׁלוֹם", "שלום", True),
        ("❤️ 1️⃣", "❤ 1", True),
    ],
)
def test_marks_are_dropped_where_they_are_accents_alone(
    one: str, other: str, *, alike: bool
) -> None:
    """Kills: Bali that counts as Paris, and words of Hindi and Thai without their vowels."""
    assert (normalise(one) == normalise(other)) is alike
    assert example(one).is_right(f" {other}.", "parametric") is alike


def test_what_is_normalised_is_composed() -> None:
    """Kills: a syllable of Korean that begins another one."""
    assert normalise("가") == "가"
    assert not example("가").is_right("각", "parametric")


@given(st.text())
def test_normalising_twice_changes_nothing_more(text: str) -> None:
    once = normalise(text)
    assert normalise(once) == once
