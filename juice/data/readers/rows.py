"""The rows of a file, of a folder that holds a data set, or of a data set on the hub.

A row is its place and its values by column; the formats (juice.data.readers.formats) say what they
mean. A file whose name ends in .csv is CSV with a header, where lists and objects stand in their
cells as JSON or as Python writes them; any other is a JSON array when it begins with `[`, else JSON
lines. Text is UTF-8, with or without a byte order mark. `datasets`, of the extra `eval`, is
imported when a data set is read. A data set's own code is never run.

A field of a row is found by its name, whatever the user's column is called.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from juice.errors import ExampleError, UsageError, first_line

MAX_BYTES = 1 << 30
PREFERRED_SPLITS = ("dev", "validation", "test")
SAVED_FILES = ("dataset_info.json", "dataset_dict.json")
QUOTE = "quote cells that hold commas or line breaks"
# How NumPy writes texts: without commas, which Python would join to one, or as `array([...])`.
QUOTED = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
NUMPY = re.compile(
    rf"\[\s*{QUOTED}(?:\s+(?:{QUOTED}|\.\.\.))+\s*\]|(?:[\[{{].*[\[:,]\s*)?array\(\[.*", re.DOTALL
)


class Row(NamedTuple):
    """One row: its place, and its values by column."""

    where: str
    values: dict[str, Any]


def rows_of_file(path: Path) -> list[Row]:
    """Return the rows of a file; raises ExampleError, naming the line, where it has none."""
    text = _text(path)
    if path.suffix.lower() == ".csv":
        rows = list(_csv_rows(text, path))
    elif text.lstrip()[:1] == "[":
        values = enumerate(_parsed(text, str(path), 1), 1)
        rows = [_json_row(value, f"{path}, row {number}") for number, value in values]
    else:
        rows = [
            _json_row(_parsed(line, f"{path}:{i}", i), f"{path}:{i}")
            for i, line in enumerate(text.split("\n"), 1)
            if line.strip()
        ]
    if not rows:
        raise ExampleError(
            f"the examples file {path} is empty; expected one JSON object per line, a JSON array, "
            "or CSV with a header"
        )
    return rows


def rows_of_hub(name: str, split: str | None = None) -> list[Row]:
    """Return the rows of a hub data set.

    Without a split: those of its only one, or of the first that exists of dev, validation and test.
    Raises ExampleError when it cannot be loaded.
    """
    datasets = _datasets()
    try:
        data = datasets.load_dataset(name)
    except Exception as error:  # the network, the hub and damaged caches raise anything
        raise ExampleError(
            f"cannot load the data set {name!r}: {first_line(error)}; "
            f"where the hub cannot be reached, fetch it once where it can (`hf download {name} "
            "--repo-type dataset --local-dir FOLDER`) and give FOLDER, "
            "or let HF_HOME or HF_HUB_CACHE name a cache that holds it"
        ) from error
    return _rows_of_data_set(data, split, name)


def is_data_folder(folder: Path) -> bool:
    """Return whether a folder holds a data set: one saved by `datasets`, or parquet files."""
    return _is_saved(folder) or any(
        next(folder.glob(pattern), None) for pattern in ("*.parquet", "*/*.parquet")
    )


def rows_of_data_folder(folder: Path) -> list[Row]:
    """Return the rows of a folder that holds a data set; raises ExampleError when it is damaged."""
    datasets = _datasets()
    read = datasets.load_from_disk if _is_saved(folder) else datasets.load_dataset
    try:
        data = read(str(folder))
    except Exception as error:  # as above
        raise ExampleError(
            f"cannot read the data set in {folder}: {first_line(error)}; save or download it again"
        ) from error
    return _rows_of_data_set(data, None, str(folder))


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values less the nulls with which a table fills missing ones."""
    return {
        name: without_nulls(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if value is not None
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


def _parsed(text: str, where: str, first_line: int) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:
            # Half of an escaped surrogate pair is not a character.
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line = f"line {first_line + error.lineno - 1}, column {error.colno}"
        problem = f"not JSON ({error.msg} at {line}); expected one object per line, or an array of "
        raise ExampleError(f"{where}: {problem}objects") from error
    except RecursionError as error:
        problem = "nested too deeply; expected one flat object per line"
        raise ExampleError(f"{where}: {problem}") from error
    except ValueError as error:
        problem = f"holds a value that cannot be read ({error}); correct or remove it"
        raise ExampleError(f"{where}: {problem}") from error
    return value


def _json_row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        got = type(value).__name__
        raise ExampleError(f"{where}: got a {got}; expected a JSON object for each row")
    return Row(where, value)


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
                raise ExampleError(
                    f"{path}:{line}: the row has too {'many' if None in values else 'few'} cells; "
                    f"expected {len(columns)} cells, as in the header; {QUOTE}"
                )
            for column, cell in values.items():
                if NUMPY.fullmatch(cell):
                    raise ExampleError(
                        f"{path}:{line}: {column} is a list as NumPy writes it, {cell[:40]!r}; "
                        "write it as JSON, or save the data as JSON lines or parquet"
                    )
            read = {column: list_or_text(cell) for column, cell in values.items()}
            yield Row(f"{path}:{line}", without_nulls(read))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ExampleError(
            f"{path}:{line}: not CSV ({error}); {QUOTE}, or give JSON lines"
        ) from error


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED_FILES)


def _datasets() -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise ExampleError(
            "data sets need the package `datasets`; "
            "install it with: pip install 'juice-steering[eval]'"
        ) from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets  # type: ignore[no-any-return]


def _rows_of_data_set(data: Any, split: str | None, name: str) -> list[Row]:
    if isinstance(data, dict):
        preferred = list(data) if len(data) == 1 else [s for s in PREFERRED_SPLITS if s in data]
        chosen = split or next(iter(preferred), None)
        if chosen not in data:
            raise ExampleError(
                f"the data set {name} has no split {chosen or '/'.join(PREFERRED_SPLITS)}; "
                f"name one of: {', '.join(data)}"
            )
        data = data[chosen]
    rows = [Row(f"{name}, row {i}", without_nulls(values)) for i, values in enumerate(data, 1)]
    if not rows:
        raise ExampleError(f"the data set {name} is empty; expected one example per row")
    return rows


def columns_of(
    rows: Sequence[Row],
    fields: Mapping[str, tuple[str, ...]],
    required: Sequence[str],
    named: Mapping[str, str],
) -> dict[str, str]:
    """Return the column of every field that the rows have: as named, else the first of its own.

    Raises UsageError for an unknown field in `named`, and ExampleError when no row has a named or
    required column.
    """
    if unknown := named.keys() - fields.keys():
        raise UsageError(
            f"--columns names the field {min(unknown)!r}; expected one of {', '.join(fields)}"
        )
    there = list(dict.fromkeys(column for row in rows for column in row.values))
    if absent := set(named.values()) - set(there):
        raise ExampleError(
            f"{rows[0].where}: --columns names the column {min(absent)!r}; "
            f"the rows have {', '.join(there)}"
        )
    found = {
        field: named.get(field) or next((c for c in columns if c in there), None)
        for field, columns in fields.items()
    }
    for field in required:
        if found[field] is None:
            raise ExampleError(
                f"{rows[0].where}: there is no column {' or '.join(fields[field])}; the rows have "
                f"{', '.join(there)}: name yours with --columns {field}=NAME"
            )
    return {field: column for field, column in found.items() if column is not None}


def list_or_text(text: str) -> Any:
    """Return the list or object that a text is in JSON, or as Python writes it; else the text."""
    bare = text.strip()
    if bare[:1] + bare[-1:] not in ("[]", "{}"):
        return text
    for read in (json.loads, ast.literal_eval):
        # A prompt or an answer may be in brackets, and say what JSON has no word for.
        with (
            suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError),
            warnings.catch_warnings(action="ignore"),
        ):
            value = read(bare)
            json.dumps(value, ensure_ascii=False).encode()
            return value
    return text


def text_of(value: Any) -> str | None:
    """Return the text of a value, stripped; None if it has no text, as pandas' NaN has none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return None if value != value else str(value)
    return value.strip() or None if isinstance(value, str) else None


def texts_of(value: Any) -> tuple[str, ...]:
    """Return the distinct texts of a text, a list, a list as text, or SQuAD's `{"text": [...]}`.

    Empty when any item has no text.
    """
    if isinstance(value, str):
        value = list_or_text(value)
    if isinstance(value, dict):
        value = value.get("text")
    texts = [text_of(v) for v in value] if isinstance(value, list) else [text_of(value)]
    known = [text for text in texts if text is not None]
    return tuple(dict.fromkeys(known)) if len(known) == len(texts) else ()
