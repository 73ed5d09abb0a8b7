"""The known formats of rows, each recognised by its columns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from juice.data.example import ConflictExample, parse_example
from juice.data.readers import confiqa, faitheval, memotrap, nqswap, paraconflict
from juice.data.readers.rows import Row
from juice.errors import ExampleError


@dataclass(frozen=True)
class Format:
    """A format: the columns that every row has, and how to make an example from a row.

    `read_row` takes a row, its place and its file's name.
    """

    name: str
    columns: tuple[str, ...]
    read_row: Callable[[dict[str, Any], str, str], ConflictExample | str]


OURS = Format(
    "JuICE",
    ("subject", "parametric_answer", "context_answer", "prompts"),
    lambda row, where, _name: parse_example(row, where),
)
FORMATS = (
    OURS,
    Format("ParaConflict", paraconflict.COLUMNS, paraconflict.read_row),
    Format("NQ-Swap", nqswap.COLUMNS, nqswap.read_row),
    Format("MemoTrap", memotrap.COLUMNS, memotrap.read_row),
    Format("ConFiQA", confiqa.COLUMNS, confiqa.read_row),
    Format("FaithEval", faitheval.COLUMNS, faitheval.read_row),
)


def format_of(row: Row) -> Format:
    """Return the format whose columns a row has; raises ExampleError that lists the known ones."""
    found = row.values.keys()
    for known in FORMATS:
        if found >= set(known.columns):
            return known
    if found & set(OURS.columns[1:]):
        return OURS  # what is missing is named
    expected = "; ".join(f"{known.name} ({', '.join(known.columns)})" for known in FORMATS)
    raise ExampleError(
        f"{row.where}: the columns {', '.join(map(str, found)) or 'none'} are of no known format; "
        f"expected those of one of {expected}"
    )


def examples_of(files: Iterable[tuple[str, list[Row]]], source: str) -> list[ConflictExample]:
    """Make examples from the rows of named files, each in the format of its first row.

    Rows that hold no conflict are left out, with one warning. Raises ExampleError for a malformed
    row, and when no row is left.
    """
    examples, reasons = [], []
    for name, rows in files:
        if not rows:
            raise ExampleError(f"{name} are empty; expected one example per row")
        known = format_of(rows[0])
        for where, values in rows:
            if lacking := [column for column in known.columns if column not in values]:
                raise ExampleError(
                    f"{where}: {lacking[0]} is missing; expected the columns of {known.name}: "
                    f"{', '.join(known.columns)}; got {', '.join(map(str, values)) or 'none'}"
                )
            example = known.read_row(values, where, name)
            if isinstance(example, str):
                reasons.append(f"{where}: {example}")
            else:
                examples.append(example)
    if not examples:
        raise ExampleError(f"{source} holds no example that can be used; first: {reasons[0]}")
    if reasons:
        warnings.warn(
            f"{source}: {len(reasons)} rows are left out; first: {reasons[0]}", stacklevel=3
        )
    return examples
