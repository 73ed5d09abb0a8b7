"""Reading examples, drawing from them, and their hash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from juice.data.example import draw, examples_sha256
from juice.data.judging import normalise
from juice.data.readers.sources import read_examples
from juice.errors import ExampleError

ROW = {
    "subject": "Peru",
    "parametric_answer": ["Lima"],
    "context_answer": "Oslo",
    "prompts": {"clean": "The capital of Peru is"},
}


def write(path: Path, *rows: dict) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_a_row_may_give_one_answer_or_several_and_any_prompts(tmp_path: Path) -> None:
    extra = {
        **ROW,
        "context": "c",
        "question": "q",
        "relation": "capital",
        "popularity": 3,
        "parametric_answer": ["Lima", "Ciudad de Lima"],
    }
    first, second = read_examples(write(tmp_path / "e.jsonl", ROW, {**extra, "subject": "Perú"}))
    assert first.context_answer == ("Oslo",)
    assert first.answer("context") == "Oslo"
    assert second.accepted("parametric") == ("Lima", "Ciudad de Lima")
    assert second.popularity == 3


def test_duplicate_subjects_are_kept_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="1 subjects appear more than once"):
        assert len(read_examples(write(tmp_path / "e.jsonl", ROW, ROW))) == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompts": {}}, "prompts"),
        ({"prompts": {"dirty": "x"}}, "prompts"),
        ({"parametric_answer": [""]}, "parametric_answer"),
        ({"context_answer": []}, "context_answer"),
        ({"controls": {"false": "x"}}, "controls"),
        ({"parametric_answer": []}, "example: parametric_answer is empty"),
        ({"context_answer": ["", "x"]}, "context_answer"),
        ({"context_answer": 3}, "context_answer"),
        ({"subject": None}, "subject"),
        ({"popularity": "high"}, "popularity"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path: Path, changes: dict, named: str) -> None:
    with pytest.raises(ExampleError, match=rf"e\.jsonl:2: {named}"):
        read_examples(write(tmp_path / "e.jsonl", ROW, {**ROW, **changes}))


def test_bytes_that_are_not_utf8_are_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "raw.jsonl").write_bytes(b'{"subject": "Per\xfa"}')
    with pytest.raises(ExampleError, match="UTF-8"):
        read_examples(tmp_path / "raw.jsonl")


def test_the_bundled_examples_cover_the_six_relations_and_the_capitals_of_the_world() -> None:
    examples = read_examples("mini")
    by_relation = {
        relation: [e for e in examples if e.relation == relation]
        for relation in {e.relation for e in examples}
    }
    assert len(by_relation) == 6
    assert all(len(each) >= 150 for each in by_relation.values())
    capitals = {e.subject for e in by_relation["world_capital"]}
    assert len(capitals) == 231
    assert capitals >= {"Afghanistan", "Brazil", "Fiji", "Nauru", "Peru", "South Sudan", "Zimbabwe"}
    for example in by_relation["world_capital"]:
        assert example.prompts["clean"] == f"The name of the capital city of {example.subject} is"
    for example in examples:
        assert set(example.prompts) == {"clean", "substitution", "coherent"}
        assert not set(map(normalise, example.parametric_answer)) & set(
            map(normalise, example.context_answer)
        )


def test_a_draw_is_the_same_for_the_same_seed_and_leaves_the_others() -> None:
    examples = read_examples("mini")[:30]
    drawn, rest = draw(examples, 4, seed=1)
    assert draw(examples, 4, seed=1) == (drawn, rest)
    assert draw(examples, 4, seed=2)[0] != drawn
    assert sorted(e.subject for e in drawn + rest) == sorted(e.subject for e in examples)
    assert examples_sha256(drawn) != examples_sha256(rest)
    with pytest.raises(ExampleError, match="at least 1"):
        draw(examples, 0, seed=0)


def test_the_hash_that_head_sets_carry_does_not_change() -> None:
    first = read_examples("mini")[:4]
    assert (
        examples_sha256(first) == "d03c34ec610306fcaf86729ef3357a3181c69d4cb020c9dd69091ae0ad023bf2"
    )
    assert examples_sha256(
        [e.model_copy(update={"match": "begins"}) for e in first]
    ) != examples_sha256(first)
