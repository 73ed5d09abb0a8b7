"""The rows of a data set: from the hub, or from a folder saved by `datasets` or of parquet files.

`datasets` is imported when it is needed; it comes with the extra `eval`. A data set's own code is
never run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from juice.data.readers.rows import Row, without_nulls
from juice.errors import ExampleError, first_line

PREFERRED_SPLITS = ("dev", "validation", "test")
SAVED_FILES = ("dataset_info.json", "dataset_dict.json")


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
    return _rows(data, split, name)


def is_data_folder(folder: Path) -> bool:
    """Return whether a folder holds a data set: one saved by `datasets`, or parquet files."""
    return _is_saved(folder) or any(
        next(folder.glob(pattern), None) for pattern in ("*.parquet", "*/*.parquet")
    )


def rows_of_data_folder(folder: Path) -> list[Row]:
    """Return the rows of a folder that holds a data set; raises ExampleError when it is damaged."""
    datasets = _datasets()
    try:
        data = (
            datasets.load_from_disk(str(folder))
            if _is_saved(folder)
            else datasets.load_dataset(str(folder))
        )
    except Exception as error:  # as above
        raise ExampleError(
            f"cannot read the data set in {folder}: {first_line(error)}; save or download it again"
        ) from error
    return _rows(data, None, str(folder))


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


def _rows(data: Any, split: str | None, name: str) -> list[Row]:
    if isinstance(data, dict):
        chosen = split or (
            next(iter(data))
            if len(data) == 1
            else next((s for s in PREFERRED_SPLITS if s in data), None)
        )
        if chosen not in data:
            raise ExampleError(
                f"the data set {name} has no split {chosen or '/'.join(PREFERRED_SPLITS)}; "
                f"name one of: {', '.join(data)}"
            )
        data = data[chosen]
    rows = [
        Row(f"{name}, row {number}", without_nulls(values)) for number, values in enumerate(data, 1)
    ]
    if not rows:
        raise ExampleError(f"the data set {name} is empty; expected one example per row")
    return rows
