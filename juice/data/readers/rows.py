"""The rows of a file (JSON lines, a JSON array or CSV), each with its place.

A name that ends in .csv is CSV with a header; anything else is a JSON array when it begins with
`[`, otherwise JSON lines. Text is UTF-8, with or without a byte order mark. What rows mean is left
to the readers.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from juice.errors import ExampleError

MAX_BYTES = 1 << 30


class Row(NamedTuple):
    """One row: its place, and its values by column."""

    where: str
    values: dict[str, Any]


def rows_of_file(path: Path) -> list[Row]:
    """Return the rows of a file.

    Raises ExampleError, naming the line, for a file that cannot be read or is empty.
    """
    text = _text(path)
    if path.suffix.lower() == ".csv":
        rows = list(_csv_rows(text, path))
    elif text.lstrip()[:1] == "[":
        rows = list(_array_rows(text, path))
    else:
        rows = [
            _row(_parse(line, f"{path}:{i}", i), f"{path}:{i}")
            for i, line in enumerate(text.split("\n"), 1)
            if line.strip()
        ]
    if not rows:
        raise ExampleError(
            f"the examples file {path} is empty; expected one JSON object per line, a JSON array, "
            "or CSV with a header"
        )
    return rows


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the nulls with which a table fills missing values."""
    kept = {name: value for name, value in values.items() if value is not None}
    return {
        name: without_nulls(value) if isinstance(value, dict) else value
        for name, value in kept.items()
    }


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ExampleError(
            f"cannot read the examples {path}: {error.strerror}; "
            "give a file in UTF-8, a folder, or `mini`"
        ) from error
    if len(data) > MAX_BYTES:
        raise ExampleError(
            f"cannot read the examples {path}: it has more than {MAX_BYTES >> 20} MiB; "
            "split it, or give a part of it"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ExampleError(
            f"cannot read the examples {path}: line {line} is not UTF-8 ({error.reason}); "
            "save the file as UTF-8"
        ) from error


def _parse(text: str, where: str, first_line: int) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:
            # Half of an escaped surrogate pair is not a character.
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line = f"line {first_line + error.lineno - 1}, column {error.colno}"
        raise ExampleError(
            f"{where}: not JSON ({error.msg} at {line}); "
            "expected one object per line, or an array of objects"
        ) from error
    except RecursionError as error:
        raise ExampleError(
            f"{where}: nested too deeply; expected one flat object per line"
        ) from error
    except ValueError as error:
        raise ExampleError(
            f"{where}: holds a value that cannot be read ({error}); correct or remove it"
        ) from error
    return value


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ExampleError(
            f"{where}: got a {type(value).__name__}; expected a JSON object for each row"
        )
    return Row(where, value)


def _array_rows(text: str, path: Path) -> Iterator[Row]:
    for number, value in enumerate(_parse(text, str(path), 1), 1):
        yield _row(value, f"{path}, row {number}")


def _csv_rows(text: str, path: Path) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    line = 1
    try:
        columns = list(reader.fieldnames or ())
        if len(set(columns)) < len(columns):
            raise ExampleError(
                f"{path}:1: a column is named twice in {', '.join(columns)}; "
                "give each a name of its own"
            )
        line = reader.line_num + 1
        for values in reader:
            if None in values or None in values.values():
                expected = (
                    f"expected {len(columns)} cells, as in the header; "
                    "quote cells that hold commas or line breaks"
                )
                raise ExampleError(
                    f"{path}:{line}: the row has too {'many' if None in values else 'few'} cells; "
                    f"{expected}"
                )
            yield Row(f"{path}:{line}", dict(values))
            line = reader.line_num + 1
    except csv.Error as error:
        remedy = "quote cells that hold commas or line breaks, or give JSON lines"
        raise ExampleError(f"{path}:{line}: not CSV ({error}); {remedy}") from error
