"""`juice examples`: make conflict examples from a user's own questions and passages."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Annotated

import typer

from juice.cli import console, options
from juice.data.asking import QUESTION_TEMPLATE, check_template
from juice.data.sentence import MAX_SENTENCE_TOKENS
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
    question_template: Annotated[
        str,
        typer.Option(help="The prompt of a question; \\n is a line end."),
    ] = QUESTION_TEMPLATE,
    chat_template: Annotated[
        str | None,
        typer.Option(
            help="Ask in a chat through this Jinja file; else through the tokenizer's own "
            "template, if it has one; `none` for plain prompts."
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="How many tokens of a reply are read for its first sentence.")
    ] = MAX_SENTENCE_TOKENS,
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
    if max_tokens < 1:
        raise UsageError(f"--max-tokens is {max_tokens}; expected at least 1")
    question_template = question_template.replace("\\n", "\n")
    check_template(question_template)
    named = options.pairs("--columns", columns)
    check_writable(out, overwrite=force)
    rows = read_rows(data)
    if limit is not None and limit < len(rows):
        rows = [rows[i] for i in sorted(Random(seed).sample(range(len(rows)), limit))]
    columns_of(rows, FIELDS, REQUIRED, named)  # before the model is loaded
    loaded = options.load(model, loading)
    if chat_template is None and loaded.own_chat_template is not None:
        chat_template = "default"
        console.note("juice: asking in a chat; --chat-template none asks plain questions")
    loaded = options.in_chat(loaded, chat_template)
    made = make_conflicts(
        loaded,
        rows,
        columns=named,
        question_template=question_template,
        max_tokens=max_tokens,
        seed=seed,
        progress=console.progress,
    )
    write_lines(out, map(to_json_line, made.examples), overwrite=force)
    _note_counts(made, len(rows))
    if json:
        counts = {
            "n_rows": len(rows),
            "n_examples": len(made.examples),
            "n_without_coherent": made.n_without_coherent,
        }
        console.answer_json(
            {
                "path": str(out),
                "model": loaded.id,
                "chat_template_sha256": loaded.chat_template_sha256,
                "seed": seed,
                **counts,
                "dropped": made.dropped,
                "first_dropped": made.first_dropped,
            }
        )
    else:
        console.answer(str(out))


def _note_counts(made: Conflicts, n_rows: int) -> None:
    from juice.data.conflicts import REASONS, REMEDIES

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
