"""Examples in memory: as examples, as rows, as a data set; and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from juice.data.example import ConflictExample
from juice.data.readers.sources import read_examples
from juice.errors import ExampleError
from tests.data import NQSWAP

MINI = Path(__file__).parents[2] / "juice" / "models" / "mini" / "examples.jsonl"


def rows() -> list[dict[str, Any]]:
    """Return the first facts of mini as plain data; the second has no coherent prompt."""
    found = [json.loads(line) for line in MINI.read_text().splitlines()[:4]]
    del found[1]["prompts"]["coherent"]
    for row in found:
        row["parametric_answer"] = ["first", *row["parametric_answer"]]
    return found


def as_data_set(found: list[dict[str, Any]]) -> datasets.Dataset:
    return datasets.Dataset.from_list(found)


def as_stream(found: list[dict[str, Any]]) -> datasets.IterableDataset:
    return as_data_set(found).to_iterable_dataset()


@pytest.mark.parametrize("form", [list, tuple, iter, as_data_set, as_stream])
def test_rows_of_every_form_are_the_examples_of_a_file(
    form: Callable[[Any], Any], tmp_path: Path
) -> None:
    """A table fills what a row does not have with nulls: those are no prompts."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    found = read_examples(form(rows()))
    assert found == read_examples(file)
    assert [set(e.prompts) for e in found[:2]] == [
        {"clean", "substitution", "coherent"},
        {"clean", "substitution"},
    ]


def test_examples_are_returned_as_they_are() -> None:
    examples = read_examples(rows())
    assert read_examples(examples) == examples
    assert all(a is b for a, b in zip(read_examples(examples), examples, strict=True))


def test_rows_in_a_format_of_others_are_recognised() -> None:
    found = read_examples(as_data_set([NQSWAP]))
    assert found[0].parametric_answer == ("Rosa", "Rosa Bell")
    assert found[0].context_answer == ("Hugo",)


def without(column: str) -> list[dict[str, Any]]:
    made = rows()
    for row in made:
        del row[column]
    return made


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            without("prompts"),
            r"row 1: prompts is missing; expected the columns of JuICE: subject, "
            r"parametric_answer, context_answer, prompts; got .*subject",
        ),
        (as_data_set(without("context_answer")), r"row 1: context_answer is missing; expected"),
        ([*rows(), *without("subject")], r"row 5: subject is missing"),
        ([{"q": 1, "a": 2}], r"row 1: the columns q, a are of no known format; expected those of"),
        (
            [{**NQSWAP}, {"question": "who"}],
            r"row 2: org_context is missing.*NQ-Swap.*got ques",
        ),
        ([], r"the examples are empty"),
        (as_data_set(rows()).select([]), r"the examples are empty"),
        (datasets.DatasetDict(test=as_data_set(rows())), r"keys test; give one split"),
        (rows()[0], r"one mapping, with the keys subject.*a list of rows"),
        (["subject", "prompts"], r"row 1: got a str; .*frame\.to_dict\('records'\)"),
        ([*rows(), read_examples(rows())[0]], r"row 5: got a ConflictExample"),
        (7, r"are a int; expected examples, a list of dicts"),
    ],
)
def test_what_is_wrong_is_named_with_what_was_expected(given: Any, problem: str) -> None:
    with pytest.raises(ExampleError, match=problem):
        read_examples(given)


def test_the_examples_have_the_type_that_is_promised() -> None:
    assert all(isinstance(e, ConflictExample) for e in read_examples(as_data_set(rows())))
