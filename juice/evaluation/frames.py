"""The results as tables for other programs: a row for every number, or for every answer.

accuracy     by target, method, domain (`average` among them) and conflict type
harm         the same where steering is not needed, by situation
answers      every answer with its prompt (`context` and `question` together; all of it is the
             question where the context cannot be told apart), what is expected, and the verdict
seeds        the accuracy under every seed, by `measure`: accuracy, or a situation of harm
checkpoints  context reliance over checkpoints

They are written as CSV beside results.json, and `Store.to_frame` gives them as pandas frames.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from juice.data.contexts import context_end
from juice.data.example import ConflictExample
from juice.errors import UsageError
from juice.files import write_lines

TableName = Literal["accuracy", "harm", "answers", "seeds", "checkpoints"]
CELL = ("n", "accuracy", "low", "high")
PROBABILITIES = ("p_parametric", "p_context", "context_reliance")
COLUMNS: dict[TableName, tuple[str, ...]] = {
    "accuracy": ("target", "method", "domain", "conflict_type", *CELL, *PROBABILITIES),
    "harm": ("target", "method", "situation", "conflict_type", *CELL),
    "answers": (
        *("target", "method", "conflict_type", "subject", "relation", "context", "question"),
        *("expected", "answer", "is_right", "p_parametric", "p_context"),
    ),
    "seeds": ("target", "method", "measure", "domain", "conflict_type", "seed", "accuracy"),
    "checkpoints": (
        *("name", "n", "clean_accuracy", "counterfactual_accuracy", "parametric_accuracy"),
        *("context_reliance", "attention_context", "attention_subject"),
    ),
}
Row = dict[str, Any]


def rows_of(results: Mapping[str, Any], name: TableName) -> list[Row]:
    """Return the rows of a table, each with all its columns; empty where there is nothing of it.

    Raises UsageError for an unknown table.
    """
    if name not in COLUMNS:
        raise UsageError(f"there is no table {name!r}; expected one of {', '.join(COLUMNS)}")
    found = {
        "accuracy": _accuracy,
        "harm": _harm,
        "answers": _answers,
        "seeds": _seeds,
        "checkpoints": _checkpoints,
    }[name](results)
    return [{column: row.get(column) for column in COLUMNS[name]} for row in found]


def write_tables(folder: Path, results: Mapping[str, Any]) -> list[str]:
    """Write every table that has rows as CSV; return the names of the files.

    Raises OutputError where the folder cannot be written.
    """
    written = []
    for name, columns in COLUMNS.items():
        rows = rows_of(results, name)
        if not rows:
            continue
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_lines(folder / f"{name}.csv", [text.getvalue()], overwrite=True)
        written.append(f"{name}.csv")
    return written


def _methods(results: Mapping[str, Any]) -> Iterator[tuple[Row, Mapping[str, Any]]]:
    for target, own in results.get("targets", {}).items():
        for method, measured in own.get("methods", {}).items():
            yield {"target": target, "method": method}, measured


def _cells(cells: Mapping[str, Mapping[str, Any]], row: Row) -> Iterator[Row]:
    for conflict_type, cell in cells.items():
        low, high = cell["interval"] or (None, None)
        yield {**row, "conflict_type": conflict_type, **cell, "low": low, "high": high}


def _accuracy(results: Mapping[str, Any]) -> Iterator[Row]:
    for row, measured in _methods(results):
        for domain, cells in measured.get("table", {}).items():
            yield from _cells(cells, {**row, "domain": domain})


def _harm(results: Mapping[str, Any]) -> Iterator[Row]:
    for row, measured in _methods(results):
        for situation, cells in measured.get("collateral", {}).items():
            yield from _cells(cells, {**row, "situation": situation})


def _answers(results: Mapping[str, Any]) -> Iterator[Row]:
    test = [ConflictExample.model_validate(e) for e in results.get("data", {}).get("test", [])]
    for row, measured in _methods(results):
        for conflict_type, answers in measured.get("answers", {}).items():
            for example, answer in zip(test, answers, strict=True):
                if answer is None:
                    continue
                prompt, end = example.prompts[conflict_type], context_end(example, conflict_type)
                yield {
                    **row,
                    "conflict_type": conflict_type,
                    "subject": example.subject,
                    "relation": example.relation,
                    "context": prompt[: end or 0] or None,
                    "question": prompt[end or 0 :],
                    "expected": " | ".join(example.accepted(row["target"])),
                    **dict(zip(COLUMNS["answers"][-4:], answer, strict=True)),
                }


def _seeds(results: Mapping[str, Any]) -> Iterator[Row]:
    repeated = results.get("seeds", {})
    for target, methods in repeated.get("targets", {}).items():
        for method, parts in methods.items():
            named = [
                *(("accuracy", domain, cells) for domain, cells in parts["table"].items()),
                *(
                    (situation, "average", cells)
                    for situation, cells in parts["collateral"].items()
                ),
            ]
            for measure, domain, cells in named:
                for conflict_type, own in cells.items():
                    for seed, value in zip(repeated["seeds"], own["values"], strict=True):
                        yield {
                            "target": target,
                            "method": method,
                            "measure": measure,
                            "domain": domain,
                            "conflict_type": conflict_type,
                            "seed": seed,
                            "accuracy": value,
                        }


def _checkpoints(results: Mapping[str, Any]) -> Iterator[Row]:
    yield from results.get("checkpoints", [])
