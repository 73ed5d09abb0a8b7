"""`juice split`: mark which fine-tuning rows need their context."""

from __future__ import annotations

from json import dumps
from typing import Annotated

import typer

from juice.cli import console, options
from juice.options import LoadOptions


@options.spelled_out
def run(
    data: Annotated[
        str,
        typer.Argument(
            help=options.ROWS
            + " With question, context and answer, or instruction, input and output."
        ),
    ],
    out: options.OutFile,
    loading: LoadOptions,
    model: options.Model = "mini",
    share: Annotated[
        float,
        typer.Option(help="Share of the rows, those of lowest perplexity, that need no context."),
    ] = 0.25,
    drop: Annotated[
        bool, typer.Option("--drop", help="Write only the rows that need their context.")
    ] = False,
    columns: options.Columns = None,
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Mark the fine-tuning rows whose answer a model cannot give without the context."""
    from juice.data.critical import FIELDS, REASONS, check_share, mark_critical
    from juice.data.fields import columns_of
    from juice.data.readers.source import read_rows
    from juice.files import check_writable, write_lines

    check_share(share)
    named = options.pairs("--columns", columns)
    check_writable(out, overwrite=force)
    rows = read_rows(data)
    columns_of(rows, FIELDS, tuple(FIELDS), named)  # before the model is loaded
    loaded = options.load(model, loading)
    marked = mark_critical(loaded, rows, share=share, columns=named, progress=console.progress)
    written = marked.critical if drop else marked.rows
    write_lines(
        out,
        (dumps(row, ensure_ascii=False, default=str) + "\n" for row in written),
        overwrite=force,
    )
    threshold = f"{marked.threshold:.4g}" if marked.threshold is not None else "none"
    summary = f"{len(marked.critical)} of {len(rows)} rows marked context_critical"
    console.note(f"{summary}: perplexity without the context from {threshold} (--share {share:g})")
    for reason, n in marked.unmeasured.items():
        if n:
            console.note(f"  {n} not measured: they {REASONS[reason]}")
    if json:
        counts = {
            "n_rows": len(rows),
            "n_written": len(written),
            "n_critical": len(marked.critical),
            "unmeasured": marked.unmeasured,
        }
        console.answer_json(
            {
                "path": str(out),
                "model": loaded.id,
                "share": share,
                "threshold": marked.threshold,
                **counts,
            }
        )
    else:
        console.answer(str(out))
