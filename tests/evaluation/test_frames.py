"""The results as CSV files and as pandas frames, from a real evaluation."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest
from datasets import Dataset

import juice
from juice.data.example import to_json_line
from juice.data.judging import contains_answer
from juice.errors import ExampleError, UsageError
from juice.evaluation.results import KEYS, measured
from tests.support.marks import FEW_EXAMPLES

pytestmark = FEW_EXAMPLES
SITUATIONS = {
    "clean",
    "true_context",
    "irrelevant_context",
    "irrelevant_truth",
    "unknown_subject",
}
WANTED: dict[str, Any] = {"methods": ("original", "cad", "served"), "limit": 6, "texts": ["Lima."]}


@pytest.fixture(scope="module")
def store(
    model: juice.SteeredModel,
    pool: list[juice.ConflictExample],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """Evaluate a data set of `datasets`."""
    data = Dataset.from_list([json.loads(to_json_line(e)) for e in pool])
    return juice.evaluate(model, data, tmp_path_factory.mktemp("frames") / "out", **WANTED)


@pytest.mark.long
def test_rows_and_paths_are_the_same_evaluation(
    store: Any, model: juice.SteeredModel, pool: list[juice.ConflictExample], tmp_path: Path
) -> None:
    """The folder of the data set's evaluation is resumed: it is of the same data."""
    file = tmp_path / "pool.jsonl"
    file.write_text("".join(map(to_json_line, pool)))
    rows = [json.loads(to_json_line(e)) for e in pool]
    for given in (rows, file, str(file)):
        again = juice.evaluate(model, given, store.folder, **WANTED)
        assert (again.n_computed, again.results["data"]) == (0, store.results["data"])
    with pytest.raises(ExampleError, match="row 1: subject is missing; expected the columns"):
        juice.evaluate(model, rows, store.folder, validation=[{**rows[0], "subject": None}])


def test_the_accuracy_is_that_of_the_tables(store: Any) -> None:
    frame = store.to_frame()
    tables = store.results["targets"]
    assert len(frame) == sum(
        len(cells)
        for of_target in tables.values()
        for method in of_target["methods"].values()
        for cells in method["table"].values()
    )
    row = frame.set_index(["target", "method", "domain", "conflict_type"]).loc[
        ("context", "served", "average", "coherent")
    ]
    cell = tables["context"]["methods"]["served"]["table"]["average"]["coherent"]
    assert (row.accuracy, row.n) == (cell["accuracy"], cell["n"])
    assert (row.low, row.high) == tuple(cell["interval"])


def test_every_answer_is_a_row_with_its_prompt_and_a_verdict_that_can_be_checked(
    store: Any, pool: list[juice.ConflictExample]
) -> None:
    frame = store.to_frame("answers")
    by_subject = {(e.relation, e.subject): e for e in pool}
    assert len(frame) == 6 * (2 * 3 + 3 * 2)  # two methods with clean prompts, three without
    for row in frame.itertuples():
        e = by_subject[row.relation, row.subject]
        context = row.context if isinstance(row.context, str) else ""
        assert context + row.question == e.prompts[row.conflict_type]
        expected = row.expected.split(" | ")
        assert tuple(expected) == e.accepted(row.target)
        assert row.is_right == contains_answer(row.answer, expected)
    conflicts = frame[frame.conflict_type != "clean"]
    assert all("claims" not in q and len(q) < 120 for q in conflicts.question)
    assert conflicts.context.notna().all()
    assert frame[frame.conflict_type == "clean"].context.isna().all()


def test_the_files_hold_what_the_frames_do(store: Any) -> None:
    written = {path.stem for path in store.folder.glob("*.csv")}
    assert written == {"accuracy", "harm", "answers"}
    for name in written:
        frame = store.to_frame(name)
        read = pandas.read_csv(store.folder / f"{name}.csv", keep_default_na=False, dtype=str)
        assert list(read.columns) == list(frame.columns)
        for given, expected in zip(read.to_dict("records"), frame.to_dict("records"), strict=True):
            for column, value in expected.items():
                shown = "" if value is None or value != value else str(value)
                assert given[column] == shown
    with (store.folder / "harm.csv").open(newline="") as file:
        assert {row["situation"] for row in csv.DictReader(file)} == SITUATIONS


def test_the_one_table_has_each_number_once_and_the_others_are_its_parts(store: Any) -> None:
    numbers = measured(store.results)
    assert not numbers.duplicated([*KEYS, "seed"]).any()
    parts = {"accuracy": numbers.measure == "accuracy", "harm": numbers.measure != "accuracy"}
    for name, is_part in parts.items():
        frame = store.to_frame(name)
        assert frame.accuracy.tolist() == numbers[is_part].accuracy.tolist()
    assert set(numbers[parts["harm"]].measure) == SITUATIONS


def test_what_there_is_nothing_of_has_no_rows_but_its_columns(store: Any) -> None:
    frame = store.to_frame("seeds")
    assert len(frame) == 0
    assert "seed" in frame.columns


def test_an_unknown_table_and_a_missing_pandas_say_what_to_do(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no table 'verdicts'; expected one of accuracy, harm"):
        store.to_frame("verdicts")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"needs pandas; .*pip install 'juice-steering\[eval\]'"):
        store.to_frame("harm")
