"""Output: the answer goes to standard output; progress, warnings and errors to standard error.

Three answers side by side have each token coloured by where it comes from.
"""

from __future__ import annotations

import json
import logging
import math
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import typer
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from juice.progress import Advance

if TYPE_CHECKING:
    from juice.engine.answer import Completion
    from juice.formula import SteerTarget
    from juice.origins import Origin
    from juice.steered_model import SteeredModel

LINE_S = 10.0
LABEL = 14
_LOGS: list[logging.Logger] = []  # at most one
_STDERR = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def answer(text: str) -> None:
    """Print the answer to standard output."""
    typer.echo(text)


def answer_fact(label: str, value: str) -> None:
    """Print a name and a value; on a terminal, a long value wraps at words beside its name."""
    screen, lines = answering(), [value]
    if screen.is_terminal:
        lines = textwrap.wrap(value, max(20, screen.width - LABEL), break_long_words=False) or [""]
    for i, line in enumerate(lines):
        answer(f"{'' if i else label:{LABEL}}{line}")


def working_twice(layers: Sequence[int], n_layers: int) -> str:
    """Return what two runs in a window of layers cost, in words."""
    rate = n_layers / (n_layers + len(layers))
    return (
        f"layers {layers[0]} to {layers[-1]}: {len(layers)} of {n_layers} layers work twice, "
        f"at best {rate:.2f} of the rate of one run"
    )


def answer_json(document: Any) -> None:
    """Print one JSON document to standard output."""
    answer(json.dumps(document, ensure_ascii=False))


def answer_either(text: str, document: Any, *, as_json: bool) -> None:
    """Print the answer as text, or as one JSON document."""
    if as_json:
        answer_json(document)
    else:
        answer(text)


def answering() -> Console:
    """Return standard output as Rich prints to it; a terminal shows colours."""
    return Console(highlight=False)


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
    """Progress for logs: a line every LINE_S seconds, over pieces that follow one another."""

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


TITLES: dict[SteerTarget, str] = {
    "parametric": "Memory",
    "none": "Unsteered",
    "context": "Context",
}
COLOURS = {"parametric": "yellow", "none": "default", "context": "cyan"}
FROM_CONTEXT, FROM_MEMORY = "black on bright_cyan", "black on bright_yellow"
# By how many nats the context must make a token likelier, or less likely, to colour it.
THRESHOLD = 1.0
PARTS = "┃"  # before the token in which memory and context part
N_CANDIDATES, BAR = 3, 6


def show_three(
    model: SteeredModel,
    completions: Sequence[Completion],
    whole: Sequence[int],
    alone: Sequence[int] | None,
) -> None:
    """Print answers to one prompt: a line each, or on a terminal side by side, with a verdict.

    On a terminal the answers are read once more, unsteered, for the origin of each token.

    Args:
        model: The model.
        completions: The answers, with the candidates for their first tokens.
        whole: The tokens of the prompt with its context.
        alone: Those of the prompt without it; None, without a context: tokens have no colour.
    """
    screen = answering()
    if not screen.is_terminal:
        for one in completions:
            answer(f"{one.steering.target:11}{one.text.strip()}")
        return
    found = {target: one for one in completions if (target := one.steering.target)}
    origins: dict[SteerTarget, list[Origin]] = {}
    if alone is not None:
        origins = dict(zip(found, _origins(model, completions, whole, alone), strict=True))
    parting = _parting(found)
    table = Table(expand=True)
    cells = []
    for target, title in TITLES.items():
        if target in found:
            table.add_column(title, header_style=f"bold {COLOURS[target]}", ratio=1)
            marked = None if target == "none" else parting
            shown = _shown_answer(found[target], origins.get(target), marked)
            first = _candidates(found[target], model.description.tokenizer)
            cells.append(Group(shown, "", first))
    table.add_row(*cells)
    screen.print(table)
    screen.print(_verdict(found))
    screen.print(_legend(has_origins=alone is not None, has_parting=parting is not None))


def _origins(
    model: SteeredModel,
    completions: Sequence[Completion],
    whole: Sequence[int],
    alone: Sequence[int],
) -> list[list[Origin]]:
    from juice.origins import origin_requests, origins_of

    answers = [one.token_ids for one in completions]
    requests = origin_requests(model, whole, alone, answers)
    return origins_of(model.engine.generate(requests), answers)


def _shown_answer(
    completion: Completion, origins: Sequence[Origin] | None, parting: int | None
) -> Text:
    """Return an answer in whole characters, each coloured by the tokens that complete it."""
    text, first = Text(), 0
    for last, token in enumerate(completion.tokens):
        if not token.text:
            continue
        gain = sum(origin.gain for origin in origins[first : last + 1]) if origins else 0.0
        style = FROM_CONTEXT if gain > THRESHOLD else FROM_MEMORY if gain < -THRESHOLD else ""
        if parting is not None and first <= parting <= last:
            text.append(PARTS, "red")
        text.append(token.text, style)
        first = last + 1
    return text


def _candidates(completion: Completion, tokenizer: Any) -> Text:
    """Return the likeliest first tokens, one a line, cut off where the column is narrow."""
    text = Text(no_wrap=True, overflow="ellipsis").append("first token", "dim")
    for token, logprob in completion.tokens[0].top[:N_CANDIDATES]:
        share = math.exp(logprob)
        name = tokenizer.decode([token]).strip() or "␣"
        blocks = "█" * round(share * BAR) or "▏"
        text.append(f"\n{blocks:{BAR}}", COLOURS[completion.steering.target or "none"])
        text.append(f"{share:4.0%} {name}" if share >= 0.005 else f" <1% {name}")
    return text


def _parting(found: dict[SteerTarget, Completion]) -> int | None:
    """Return the first token in which memory and context differ."""
    if not {"parametric", "context"} <= found.keys():
        return None
    pairs = zip(found["parametric"].token_ids, found["context"].token_ids, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), None)


def _verdict(found: dict[SteerTarget, Completion]) -> str:
    texts = {target: answer.text.strip() for target, answer in found.items()}
    if len(texts) < len(TITLES):
        return "One of the two targets has no head set of its name."
    if texts["parametric"] == texts["context"]:
        return "Memory and context say the same: no conflict, or none that these heads decide."
    if texts["none"] == texts["context"]:
        return "Unsteered, this model believes what it was given here."
    if texts["none"] == texts["parametric"]:
        return "Unsteered, this model trusts its memory here."
    return "Unsteered, this model says something other than either."


def _legend(*, has_origins: bool, has_parting: bool) -> Text:
    legend = Text()
    if has_origins:
        legend.append("likelier with the context", FROM_CONTEXT).append("  ")
        legend.append("likelier without it", FROM_MEMORY)
        legend.append(f", by more than {THRESHOLD:g} nat as the unsteered model reads it")
    else:
        legend.append("Without a --context apart, tokens have no colour")
    if has_parting:
        legend.append("; ").append(PARTS, "red").append(" here memory and context part")
    return legend
