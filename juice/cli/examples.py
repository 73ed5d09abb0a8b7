"""`juice examples` and `juice split`: data from a user's own questions and passages."""

from __future__ import annotations

from json import dumps
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from juice.cli import console, options
from juice.data.example import QUESTION_TEMPLATE
from juice.data.make import check_template
from juice.data.passages import MAX_SENTENCE_TOKENS
from juice.engine.load_options import LoadOptions
from juice.engine.sampling_options import Options
from juice.errors import UsageError

if TYPE_CHECKING:
    from juice.data.critical import Marked
    from juice.data.make import Conflicts
    from juice.steered_model import SteeredModel


FINE_TUNING = " With question, context and answer, or instruction, input and output."


class MakingFlags(Options):
    """The rows that are used, and how the model is asked about them."""

    limit: int | None = Field(
        default=None, description="Use at most this many rows, drawn with the seed."
    )
    seed: int = Field(default=0, description="Seed of what is drawn.")
    question_template: str = Field(
        default=QUESTION_TEMPLATE, description="The prompt of a question; \\n is a line end."
    )
    chat_template: str | None = Field(
        default=None,
        description="Ask in a chat through this Jinja file; else through the tokenizer's own "
        "template, if it has one; `none` for plain prompts.",
    )
    max_tokens: int = Field(
        default=MAX_SENTENCE_TOKENS,
        description="How many tokens of a reply are read for its first sentence.",
    )

    def check(self) -> None:
        """Raise UsageError for a count below 1."""
        for flag, value in (("--limit", self.limit), ("--max-tokens", self.max_tokens)):
            if value is not None and value < 1:
                raise UsageError(f"{flag} is {value}; expected at least 1")


@options.spelled_out
def run(
    data: Annotated[str, typer.Argument(help=options.ROWS + " With question, context and answer.")],
    out: options.OutFile,
    making: MakingFlags,
    loading: LoadOptions,
    model: options.Model = "mini",
    columns: options.Columns = None,
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Make conflict examples from the questions that a model answers without their passages."""
    from juice.data.example import to_json_line
    from juice.data.make import FIELDS, REQUIRED, make_conflicts
    from juice.data.readers.rows import columns_of
    from juice.data.readers.sources import read_rows
    from juice.files import check_writable, write_lines

    making.check()
    template = making.question_template.replace("\\n", "\n")
    check_template(template)
    named = options.pairs("--columns", columns)
    check_writable(out, overwrite=force)
    rows = read_rows(data)
    if making.limit is not None and making.limit < len(rows):
        drawn = Random(making.seed).sample(range(len(rows)), making.limit)
        rows = [rows[i] for i in sorted(drawn)]
    columns_of(rows, FIELDS, REQUIRED, named)  # before the model is loaded
    asked = _asked_in_chat(options.load(model, loading), making.chat_template)
    made = make_conflicts(
        asked,
        rows,
        columns=named,
        question_template=template,
        max_tokens=making.max_tokens,
        seed=making.seed,
        progress=console.progress,
    )
    write_lines(out, map(to_json_line, made.examples), overwrite=force)
    _note_made(made, len(rows))
    document = {
        "path": str(out),
        "model": asked.id,
        "chat_template_sha256": asked.chat_template_sha256,
        "seed": making.seed,
        "n_rows": len(rows),
        "n_examples": len(made.examples),
        "n_without_coherent": made.n_without_coherent,
        "dropped": made.dropped,
        "first_dropped": made.first_dropped,
    }
    console.answer_either(str(out), document, as_json=json)


def _asked_in_chat(model: SteeredModel, chat_template: str | None) -> SteeredModel:
    """Return the model with a template, by default the tokenizer's own where it has one."""
    if chat_template is None and model.own_chat_template is not None:
        chat_template = "default"
        console.note("juice: asking in a chat; --chat-template none asks plain questions")
    return options.in_chat(model, chat_template)


def _note_made(made: Conflicts, n_rows: int) -> None:
    from juice.data.make import REASONS, REMEDIES

    console.note(f"{len(made.examples)} conflict examples from {n_rows} rows")
    for reason, n in made.dropped.items():
        if n:
            console.note(f"  {n} dropped: they {REASONS[reason]}")
            console.note(f"    first {made.first_dropped[reason]}")
            console.note(f"    to keep them, {REMEDIES[reason]}")
    if by_sentence := sum(e.match == "sentence" for e in made.examples):
        console.note(
            f"  {by_sentence} kept with replies that do not begin with the answer: heads are found "
            "better where they do, such as with --question-template '{question} Answer with the "
            "name alone.'"
        )
    if made.n_without_coherent:
        console.note(
            f"  {made.n_without_coherent} kept without a coherent prompt: "
            "their passage holds only the sentences of the answer"
        )


@options.spelled_out
def split(
    data: Annotated[str, typer.Argument(help=options.ROWS + FINE_TUNING)],
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
    from juice.data.critical import CRITICAL_FIELDS, check_share, mark_critical
    from juice.data.readers.rows import columns_of
    from juice.data.readers.sources import read_rows
    from juice.files import check_writable, write_lines

    check_share(share)
    named = options.pairs("--columns", columns)
    check_writable(out, overwrite=force)
    rows = read_rows(data)
    columns_of(rows, CRITICAL_FIELDS, tuple(CRITICAL_FIELDS), named)  # before the model is loaded
    loaded = options.load(model, loading)
    marked = mark_critical(loaded, rows, share=share, columns=named, progress=console.progress)
    written = marked.critical if drop else marked.rows
    lines = (dumps(row, ensure_ascii=False, default=str) + "\n" for row in written)
    write_lines(out, lines, overwrite=force)
    _note_marked(marked, share)
    document = {
        "path": str(out),
        "model": loaded.id,
        "share": share,
        "threshold": marked.threshold,
        "n_rows": len(rows),
        "n_written": len(written),
        "n_critical": len(marked.critical),
        "unmeasured": marked.unmeasured,
    }
    console.answer_either(str(out), document, as_json=json)


def _note_marked(marked: Marked, share: float) -> None:
    from juice.data.critical import CRITICAL_REASONS

    threshold = f"{marked.threshold:.4g}" if marked.threshold is not None else "none"
    summary = f"{len(marked.critical)} of {len(marked.rows)} rows marked context_critical"
    console.note(f"{summary}: perplexity without the context from {threshold} (--share {share:g})")
    for reason, n in marked.unmeasured.items():
        if n:
            console.note(f"  {n} not measured: they {CRITICAL_REASONS[reason]}")
