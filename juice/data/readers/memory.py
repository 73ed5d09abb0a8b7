"""Examples that are in memory: as examples, as rows, or as a data set of `datasets`.

Rows are mappings of columns to values, in any format that files may have. A data set needs nothing
of `datasets` here: it is an iterable of rows. Its nulls are missing values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from juice.data.example import ConflictExample
from juice.data.readers.formats import examples_of
from juice.data.readers.rows import Row, without_nulls
from juice.errors import ExampleError

Examples: TypeAlias = str | Path | Iterable[ConflictExample | Mapping[str, Any]]
"""The name of a source, a file, a folder; examples; or rows, as a list or as a data set."""

EXPECTED = (
    "expected examples, a list of dicts, a data set of `datasets`, or the name of a file, a folder "
    "or a data set"
)


def examples_in_memory(
    given: Iterable[ConflictExample | Mapping[str, Any]], name: str = "the examples"
) -> list[ConflictExample]:
    """Return examples as they are, and make them from rows.

    Raises ExampleError for something else, the first malformed row, or columns of no known format.
    """
    if isinstance(given, Mapping):
        raise ExampleError(
            f"{name} are one mapping, with the keys {', '.join(map(str, given)) or 'none'}; "
            "give one split of a data set, such as data['test'], or a list of rows"
        )
    if not isinstance(given, Iterable):
        raise ExampleError(f"{name} are a {type(given).__name__}; {EXPECTED}")
    found = list(given)
    own = [e for e in found if isinstance(e, ConflictExample)]
    if len(own) == len(found) and own:
        return own
    return examples_of([(name, [_row(row, i, name) for i, row in enumerate(found, 1)])], name)


def _row(row: Any, number: int, name: str) -> Row:
    if not isinstance(row, Mapping):
        remedy = "; of a pandas frame, give frame.to_dict('records')" if number == 1 else ""
        raise ExampleError(
            f"{name}, row {number}: got a {type(row).__name__}; "
            f"expected a mapping of columns to values, as all rows are{remedy}"
        )
    return Row(f"{name}, row {number}", without_nulls(row))
