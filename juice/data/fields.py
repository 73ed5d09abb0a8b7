"""The fields of a user's rows, whatever their columns are called."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from juice.data.readers.rows import Row
from juice.errors import ExampleError, UsageError

Fields = Mapping[str, tuple[str, ...]]
"""The columns to look for a field in, by field; the first that the rows have is taken."""


def columns_of(
    rows: Sequence[Row], fields: Fields, required: Sequence[str], named: Mapping[str, str]
) -> dict[str, str]:
    """Return the column of every field that the rows have.

    Args:
        rows: The rows.
        fields: The columns to look for each field in.
        required: The fields that must be found.
        named: The columns of fields whose names differ, by field.

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
            expected = " or ".join(fields[field])
            remedy = f"name yours with --columns {field}=NAME"
            raise ExampleError(
                f"{rows[0].where}: there is no column {expected}; "
                f"the rows have {', '.join(there)}: {remedy}"
            )
    return {field: column for field, column in found.items() if column is not None}


def text_of(value: Any) -> str | None:
    """Return the text of a value, stripped; None if it has no text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return value.strip() or None if isinstance(value, str) else None


def texts_of(value: Any) -> tuple[str, ...]:
    """Return the distinct texts of a text, a list, a JSON list, or SQuAD's `{"text": [...]}`.

    Empty when any item has no text.
    """
    if isinstance(value, dict):
        value = value.get("text")
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):  # an answer may begin with a bracket
            value = json.loads(value)
    texts = [text_of(v) for v in value] if isinstance(value, list) else [text_of(value)]
    known = [text for text in texts if text is not None]
    return tuple(dict.fromkeys(known)) if len(known) == len(texts) else ()
