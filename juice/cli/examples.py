"""`juice examples`: make conflict examples from a user's own questions and passages."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Annotated

import typer

from juice.cli import console, options
from juice.errors import UsageError
from juice.options import LoadOptions

if TYPE_CHECKING:
    from juice.data.conflicts import Conflicts


@options.spelled_out
def run(
    data: Annotated[str, typer.Argument(help=options.ROWS + " With question, context and answer.")],
    out: options.OutFile,
    loading: LoadOptions,
    model: options.Model = "mini",
    limit: Annotated[
        int | None, typer.Option(help="Use at most this many rows, drawn with the seed.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of what is drawn.")] = 0,
    columns: options.Columns = None,
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Make conflict examples from the questions that a model answers without their passages."""
    from juice.data.conflicts import FIELDS, REQUIRED, make_conflicts
    from juice.data.example import to_json_line
    from juice.data.fields import columns_of
    from juice.data.readers.source import read_rows
    from juice.files import check_writable, write_lines

    if limit is not None and limit < 1:
        raise UsageError(f"--limit is {limit}; expected at least 1")
    named = options.pairs("--columns", columns)
    check_writable(out, overwrite=force)
    rows = read_rows(data)
    if limit is not None and limit < len(rows):
        rows = [rows[i] for i in sorted(Random(seed).sample(range(len(rows)), limit))]
    columns_of(rows, FIELDS, REQUIRED, named)  # before the model is loaded
    loaded = options.load(model, loading)
    made = make_conflicts(loaded, rows, columns=named, seed=seed, progress=console.progress)
    write_lines(out, map(to_json_line, made.examples), overwrite=force)
    _note_counts(made, len(rows))
    if json:
        counts = {
            "n_rows": len(rows),
            "n_examples": len(made.examples),
            "n_without_coherent": made.n_without_coherent,
        }
        console.answer_json(
            {"path": str(out), "model": loaded.id, "seed": seed, **counts, "dropped": made.dropped}
        )
    else:
        console.answer(str(out))


def _note_counts(made: Conflicts, n_rows: int) -> None:
    from juice.data.conflicts import REASONS

    console.note(f"{len(made.examples)} conflict examples from {n_rows} rows")
    for reason, n in made.dropped.items():
        if n:
            console.note(f"  {n} dropped: they {REASONS[reason]}")
    if made.n_without_coherent:
        console.note(
            f"  {made.n_without_coherent} kept without a coherent prompt: "
            "their passage holds only the sentences of the answer"
        )
