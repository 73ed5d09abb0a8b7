"""Output: the answer goes to standard output; progress, warnings and errors to standard error."""

from __future__ import annotations

import json
import logging
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from juice.progress import Advance

LINE_S = 10.0
LABEL = 14
_LOGS: list[logging.Logger] = []  # at most one
_STDERR = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def answer(text: str) -> None:
    """Print the answer to standard output."""
    typer.echo(text)


def answer_fact(label: str, value: str) -> None:
    """Print a name and a value; on a terminal, a long value wraps at words beside its name."""
    if not is_terminal():
        answer(f"{label:{LABEL}}{value}")
        return
    lines = textwrap.wrap(value, max(20, Console().width - LABEL), break_long_words=False) or [""]
    for i, line in enumerate(lines):
        answer(f"{'' if i else label:{LABEL}}{line}")


def answer_json(document: Any) -> None:
    """Print one JSON document to standard output."""
    typer.echo(json.dumps(document, ensure_ascii=False))


def is_terminal() -> bool:
    """Return whether the answer goes to a terminal, which shows colours."""
    return Console().is_terminal


def log_instead(log: logging.Logger) -> None:
    """From now on, send notes, warnings and errors to a log instead of standard error."""
    _LOGS[:] = [log]


def note(text: str) -> None:
    """Print a note to standard error."""
    _tell(logging.INFO, text, text)


def error(text: str) -> None:
    """Print an error to standard error, in one line."""
    line = " ".join(text.split())
    _tell(logging.ERROR, line, f"juice: error: {line}")


def _tell(level: int, message: str, line: str) -> None:
    for log in _LOGS:
        log.log(level, "%s", message.removeprefix("juice: "))
        return
    _STDERR.print(line)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,  # noqa: ARG001
    lineno: int,  # noqa: ARG001
    file: TextIO | None = None,  # noqa: ARG001
    line: str | None = None,  # noqa: ARG001
) -> None:
    """Print a warning in one line, as `warnings.showwarning`; hide those meant for developers."""
    if not issubclass(
        category, DeprecationWarning | FutureWarning | ImportWarning | ResourceWarning
    ):
        _tell(logging.WARNING, str(message), f"juice: warning: {message}")


@contextmanager
def progress(description: str, total: int) -> Iterator[Advance]:
    """Show a progress bar inside the context; when not on a terminal, a line every so often."""
    if not _STDERR.is_terminal:
        yield _Lines(description, total).advance
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_STDERR, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda n: bar.advance(task, n)


class _Lines:
    """Progress for logs: a line every LINE_S seconds, so short work has none.

    Pieces that follow one another share the time: long work made of many short ones has lines too.
    """

    said = moved = float("-inf")

    def __init__(self, description: str, total: int) -> None:
        self._description, self._total, self._done = description, total, 0
        now = time.monotonic()
        if now - _Lines.moved >= LINE_S:
            _Lines.said = now  # nothing was going on before
        _Lines.moved = now

    def advance(self, n: int) -> None:
        """Report that this many more units are done."""
        self._done += n
        _Lines.moved = now = time.monotonic()
        if now - _Lines.said >= LINE_S:
            _Lines.said = now
            note(f"juice: {self._description}: {self._done} of {self._total}")
