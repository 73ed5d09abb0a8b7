"""Where examples come from: the names, files, folders and data sets that `read_examples` takes.

    mini                              the facts of the bundled model
    paraconflict[:domain], nq-swap    data sets of the paper, from the hub
    faitheval                         FaithEval's counterfactual contexts, from the hub
    faitheval-unanswerable            its contexts without an answer
    faitheval-inconsistent            its contexts with two answers
    hub:owner/name[:split]            any hub data set in a known format
    FILE                              JSON lines, a JSON array or CSV, in a known format
    FOLDER                            such files, a data set saved by `datasets`, or parquet files
    ROWS                              rows in memory, such as a data set of `datasets`

A split chooses among the files of a folder whose names contain theirs, as ParaConflict's do
(`world_capital.unfiltered_test.json`); all other sources are one set, whatever the split.

Rows in memory are mappings of columns to values, in any format that files may have. A data set
needs nothing of `datasets` here: it is an iterable of rows. Its nulls are missing values.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from juice.data.example import ConflictExample
from juice.data.readers.formats import DOMAINS, examples_of
from juice.data.readers.rows import (
    Row,
    is_data_folder,
    rows_of_data_folder,
    rows_of_file,
    rows_of_hub,
    without_nulls,
)
from juice.errors import ExampleError
from juice.files import MINI

Split = Literal["test", "validation", "identification"]
MINI_EXAMPLES = MINI / "examples.jsonl"
SPLIT_PARTS: dict[Split, str] = {
    "test": ".unfiltered_test",
    "validation": ".filtered_validation",
    "identification": ".head_finding",
}
HUB_IDS = {
    "paraconflict": "gaotang/ParaConfilct",
    "nq-swap": "pminervini/NQ-Swap",
    "faitheval": "Salesforce/FaithEval-counterfactual-v1.0",
    "faitheval-unanswerable": "Salesforce/FaithEval-unanswerable-v1.0",
    "faitheval-inconsistent": "Salesforce/FaithEval-inconsistent-v1.0",
}
ENDINGS = (".jsonl", ".json", ".csv")
Examples: TypeAlias = str | Path | Iterable[ConflictExample | Mapping[str, Any]]
"""The name of a source, a file, a folder; examples; or rows, as a list or as a data set."""


def read_examples(source: Examples, *, split: Split = "test") -> list[ConflictExample]:
    """Read the examples of a source, in its order.

    Examples in memory are returned as they are; rows in memory, such as a data set of `datasets`,
    are made into examples.

    Raises ExampleError for a source that cannot be read, the first malformed row, or columns of no
    known format. Warns of rows without a conflict, which are left out, and of duplicate subjects
    (within a relation), which are kept.
    """
    if not isinstance(source, str | Path):
        return _examples_in_memory(source)
    name, domain = str(source), _domain(str(source))
    examples = [e for e in examples_of(_files(source, split), name) if domain in (None, e.relation)]
    if not examples:
        raise ExampleError(
            f"{HUB_IDS['paraconflict']} has no row of the domain {domain}; "
            "expected the column Category to name it"
        )
    counts = Counter((e.relation, e.subject) for e in examples)
    repeated = [subject for (_, subject), count in counts.items() if count > 1]
    if repeated:
        warnings.warn(
            f"{name}: {len(repeated)} subjects appear more than once ({repeated[0]!r} first); "
            "all are kept",
            stacklevel=2,
        )
    return examples


def read_rows(source: str | Path) -> list[Row]:
    """Read the rows of a file, a folder or `hub:owner/name[:split]`, whatever their columns.

    Raises ExampleError for a source that cannot be read.
    """
    return [row for _, rows in _files(source, None) for row in rows]


def prompts_without_answers(source: Examples) -> list[Row]:
    """Return the rows of a file, or in memory, whose prompts come without answers; else none.

    Raises ExampleError for a file that cannot be read.
    """
    if isinstance(source, str | Path):
        rows = read_rows(source) if Path(source).is_file() else []
    elif isinstance(source, Sequence) and all(isinstance(row, Mapping) for row in source):
        rows = [_row_in_memory(row, number) for number, row in enumerate(source, 1)]
    else:
        return []
    return rows if rows and is_without_answers(rows[0].values) else []


def is_without_answers(columns: Collection[str]) -> bool:
    """Return whether rows with these columns have prompts of one's own, without answers."""
    return "prompt" in columns and not any("answer" in column.lower() for column in columns)


def _examples_in_memory(given: object) -> list[ConflictExample]:
    if isinstance(given, Mapping):
        raise ExampleError(
            f"the examples are one mapping, with the keys {', '.join(map(str, given)) or 'none'}; "
            "give one split of a data set, such as data['test'], or a list of rows"
        )
    if not isinstance(given, Iterable):
        raise ExampleError(
            f"the examples are a {type(given).__name__}; expected examples, a list of dicts, "
            "a data set of `datasets`, or the name of a file, a folder or a data set"
        )
    found = list(given)
    examples = [one for one in found if isinstance(one, ConflictExample)]
    if examples and len(examples) == len(found):
        return examples
    rows = [_row_in_memory(row, number) for number, row in enumerate(found, 1)]
    return examples_of([("the examples", rows)], "the examples")


def _row_in_memory(row: object, number: int) -> Row:
    where = f"the examples, row {number}"
    if not isinstance(row, Mapping):
        remedy = "; of a pandas frame, give frame.to_dict('records')" if number == 1 else ""
        raise ExampleError(
            f"{where}: got a {type(row).__name__}; "
            f"expected a mapping of columns to values, as all rows are{remedy}"
        )
    return Row(where, without_nulls(row))


def _domain(name: str) -> str | None:
    """Return the domain of `paraconflict:domain`; None for any other source."""
    source, colon, domain = name.partition(":")
    if source != "paraconflict" or not colon:
        return None
    if domain not in DOMAINS:
        raise ExampleError(
            f"{domain!r} is not a domain of ParaConflict; expected one of {', '.join(DOMAINS)}"
        )
    return domain


def _files(source: str | Path, split: Split | None) -> list[tuple[str, list[Row]]]:
    """Return the rows of every file of a source, each file with its name up to the first dot."""
    name = str(source)
    if name == "memotrap":
        raise ExampleError(
            "memotrap is not a hub data set; download its CSV files and give their folder, "
            "or one of them"
        )
    if (known := name.partition(":")[0]) in HUB_IDS:
        return [(known, rows_of_hub(HUB_IDS[known]))]
    if name.startswith("hub:"):
        hub_id, _, hub_split = name.removeprefix("hub:").partition(":")
        if not hub_id:
            raise ExampleError(
                f"{name!r} names no data set; expected hub:owner/name or hub:owner/name:split"
            )
        return [(hub_id.rsplit("/", 1)[-1], rows_of_hub(hub_id, hub_split or None))]
    path = MINI_EXAMPLES if name == "mini" else Path(source)
    if not path.is_dir():
        return [(path.name.partition(".")[0], rows_of_file(path))]
    if is_data_folder(path):
        return [(path.name, rows_of_data_folder(path))]
    return [(file.name.partition(".")[0], rows_of_file(file)) for file in _data_files(path, split)]


def _data_files(folder: Path, split: Split | None) -> list[Path]:
    # A downloaded data set may have its files in `data`.
    places = (sorted(folder.glob(glob)) for glob in ("[!.]*", "data/[!.]*"))
    readable = ([path for path in paths if path.suffix.lower() in ENDINGS] for paths in places)
    files = next(filter(None, readable), [])
    if not files:
        raise ExampleError(
            f"the folder {folder} holds no {', '.join(ENDINGS)} and no parquet files; "
            "give the folder that holds them"
        )
    named = [path for path in files if any(part in path.name for part in SPLIT_PARTS.values())]
    if not named or split is None:
        return files
    chosen = [path for path in named if SPLIT_PARTS[split] in path.name]
    if not chosen:
        raise ExampleError(
            f"the folder {folder} has no file of the {split} split (*{SPLIT_PARTS[split]}*); "
            f"it has {named[0].name} and others"
        )
    return chosen
