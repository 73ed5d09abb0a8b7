"""The report folder's `results.json`, which grows by units of work and is never half written.

A unit is a path into the document. What is there is not computed again, so an interrupted run
continues where it stopped. The document names all that its numbers depend on (model, data,
settings, versions); a folder that holds another evaluation is refused, never overwritten.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from juice.errors import OutputError, UsageError
from juice.evaluation.frames import COLUMNS, TableName, rows_of
from juice.files import write_lines

if TYPE_CHECKING:
    from pandas import DataFrame

FORMAT = "juice.evaluation/2"
FILE = "results.json"


class Store:
    """The results of one evaluation in one folder."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self.n_cached = 0
        self.n_computed = 0
        self.results: dict[str, Any] = {
            "format": FORMAT,
            "identity": json.loads(json.dumps(identity)),
            "is_complete": False,
        }

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, Any], *, overwrite: bool = False) -> Store:
        """Open a folder for an evaluation.

        Raises OutputError for a folder that cannot be made or, without `overwrite`, that holds
        another evaluation or something else.
        """
        store = cls(folder, identity)
        if folder.exists() and not folder.is_dir():
            raise OutputError(f"{folder} is a file; give a folder for the report with --out")
        if folder.is_dir() and not overwrite:
            if (folder / FILE).exists():
                store._resume(read_results(folder))
            elif any(folder.iterdir()):
                raise OutputError(
                    f"the folder {folder} is not empty and holds no {FILE}; "
                    "give another --out, or --force"
                )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"cannot make the folder {folder}: {error}; give another --out"
            ) from error
        return store

    def _resume(self, found: dict[str, Any]) -> None:
        mine, theirs = self.results["identity"], found.get("identity", {})
        for name in mine:
            if mine[name] != theirs.get(name):
                raise OutputError(
                    f"{self.folder} holds another evaluation: its {name} is "
                    f"{_short(theirs.get(name))}, this one's is {_short(mine[name])}; "
                    "give another --out, or --force to start anew"
                )
        self.results = {**found, "is_complete": False}

    def check(self, name: str, value: str) -> None:
        """Record something else that the numbers depend on.

        Raises OutputError where the document has another value.
        """
        noted = self.results.setdefault("depends_on", {})
        if noted.setdefault(name, value) != value:
            raise OutputError(
                f"{self.folder} was made with another {name.replace('_', ' ')}; "
                "give another --out, or --force to start anew"
            )

    def unit(self, *path: str, make: Callable[[], Any]) -> Any:
        """Return a unit of work from the document, or make and save it now.

        A number that is not finite becomes None.
        """
        parent = self.results
        for name in path[:-1]:
            parent = parent.get(name, {})
        if path[-1] in parent:
            self.n_cached += 1
            return parent[path[-1]]
        made = _plain(make())  # first, so that a failure leaves no empty place
        parent = self.results
        for name in path[:-1]:
            parent = parent.setdefault(name, {})
        parent[path[-1]] = made
        self.n_computed += 1
        self.save()
        return made

    def to_frame(self, table: TableName = "accuracy") -> DataFrame:
        """Return a table of the results as a pandas frame, as in the CSV files of the folder.

        Args:
            table: `accuracy`, `harm`, `answers`, `seeds` or `checkpoints`.

        Raises:
            UsageError: There is no such table, or pandas is not installed.
        """
        rows = rows_of(self.results, table)
        try:
            import pandas
        except ImportError as error:
            raise UsageError(
                "a frame needs the package pandas; install it with: pip install pandas, or read "
                f"{self.folder / f'{table}.csv'}"
            ) from error
        return pandas.DataFrame(rows, columns=list(COLUMNS[table]))

    def save(self) -> None:
        """Write the document in one step. Raises OutputError when it cannot be written."""
        write_lines(
            self.folder / FILE,
            [json.dumps(_plain(self.results), ensure_ascii=False, allow_nan=False)],
            overwrite=True,
        )


def read_results(folder: Path) -> dict[str, Any]:
    """Read a report folder's document. Raises OutputError for one of another format."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OutputError(
            f"cannot read {folder / FILE}: {error}; give another --out, or --force"
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise OutputError(
            f"{folder / FILE} is not of the format {FORMAT}; give another --out, or --force"
        )
    return found


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: lists for tuples, None for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def sha256(text: str) -> str:
    """Return the hash of a text, as the document writes hashes."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
