"""The rules of what counts as the answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from juice.data.judging import contains_answer, is_among, is_correct, normalise


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
    assert is_correct(output, accepted, "begins") is correct


def test_each_rule_judges_what_the_other_would_not() -> None:
    assert is_correct(" the city of Paris", ["Paris"])
    assert not is_correct(" the city of Paris", ["Paris"], "begins")
    assert is_correct(" one two three four five six", ["one two three four five six"], "begins")
    assert not is_correct(" one two three four five six", ["one two three four five six"])


def test_an_answer_is_among_others_however_it_is_written() -> None:
    assert is_among("São Tomé!", ["Lima", "sao tome"])
    assert not is_among("Sao", ["sao tome"])


@given(st.text())
def test_normalising_twice_changes_nothing_more(text: str) -> None:
    once = normalise(text)
    assert normalise(once) == once
