"""`juice inspect`: a head set for people, as lines and pictures in the terminal, or as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from juice.cli import console, options
from juice.errors import UsageError
from juice.files import check_writable, write_lines
from juice.formula import METHODS, OTHER, Target

if TYPE_CHECKING:
    import torch

    from juice.head_set.head_set import HeadSet
    from juice.head_set.schema import Head, HeadLists, Validation
    from juice.head_set.scores import HeadScores

SHADES = " ░▒▓█"
CELL = 3  # a mark, a shade, a mark
WINNERS: dict[Target, str] = {"context": "the context", "parametric": "memory"}
BESIDE = "│"  # at the layers in which the clean run goes along


def show(scores: HeadScores, head_set: HeadSet) -> None:
    """Print the scores, the mean over conflict types, with the meaning of signs and colours."""
    screen = console.answering()
    plus, minus = scores.plus.mean(0), scores.minus.mean(0)  # (n_layers, n_heads) each
    added = dict.fromkeys(head_set.heads.plus, "[]")
    taken = dict.fromkeys(head_set.heads.minus, "()")
    maps = [("+ heads", plus, added), ("- heads", minus, taken)]
    if bool((plus + minus).abs().max() < 1e-6):  # they say the same of both signs
        maps = [("all heads", plus, added | taken)]
    n_heads = plus.shape[1]
    if CELL * n_heads + 10 > max(80, screen.width):
        screen.print(f"{n_heads} heads a layer are too wide for this terminal; draw them: --plot")
        return
    beside = window(head_set)
    for name, table, marks in maps:
        screen.print(f"\n{name}: layers by heads, from blank to █ {float(table.abs().max()):.3g}")
        for layer, line in enumerate(_rows(table, marks, head_set.target)):
            row = Text().append(f"{layer:9}", "dim")
            row.append(BESIDE if layer in beside else " ", "red").append_text(line)
            screen.print(row, soft_wrap=True)
        numbers = "".join(f"{head:^{CELL}}" for head in range(n_heads))
        screen.print(Text(f"{'':10}{numbers}", "dim"), soft_wrap=True)
    screen.print(_legend(head_set, beside))


def window(head_set: HeadSet) -> range:
    """Return the layers in which the clean run goes along; without betas there are none."""
    from juice.engine.steer import Steer, resolve

    if head_set.betas() is None:
        return range(0)
    return resolve(Steer(target=head_set.target), head_set).window


def _legend(head_set: HeadSet, beside: range) -> Text:
    more, less = head_set.target, OTHER[head_set.target]
    legend = Text("[ ] chosen, to be added; ( ) chosen, to be taken away; ")
    legend.append("█", console.COLOURS[more]).append(f" above zero, toward {WINNERS[more]}; ")
    legend.append("█", console.COLOURS[less]).append(f" and - below zero, toward {WINNERS[less]}")
    if beside:
        legend.append("; ").append(BESIDE, "red")
        legend.append(" the clean run goes along in these layers")
    return legend


def _rows(scores: torch.Tensor, marks: Mapping[Head, str], target: Target) -> list[Text]:
    """Return one line a layer for scores of shape (n_layers, n_heads)."""
    from juice.head_set.schema import Head

    most = float(scores.abs().max()) or 1.0
    rows = []
    for layer, of_layer in enumerate(scores.tolist()):
        line = Text()
        for head, score in enumerate(of_layer):
            shade = SHADES[round(abs(score) / most * (len(SHADES) - 1))]
            mark = marks.get(Head(layer, head), "  ")
            sign = "-" if score < 0 and shade != " " and mark == "  " else mark[0]
            colour = console.COLOURS[target if score >= 0 else OTHER[target]]
            line.append(sign, "bold").append(shade, colour).append(mark[1], "bold")
        rows.append(line)
    return rows


def check_page(path: Path, *, overwrite: bool) -> None:
    """Raise an error, before any work is done, if no page can be made or written there."""
    from juice.evaluation.options import require_extra

    require_extra()
    check_writable(path, overwrite=overwrite)


def write_page(path: Path, head_sets: Sequence[HeadSet], *, overwrite: bool) -> None:
    """Write one page about head sets of a model; raises OutputError."""
    from juice.evaluation.report.parts import Section, page

    first = Section(f"Head sets of {head_sets[0].model.id}")
    write_lines(path, [page([first, *map(_section, head_sets)])], overwrite=overwrite)


def _section(head_set: HeadSet) -> Any:
    from juice.evaluation.report.parts import Picture, Section, Table

    tables = [Table(("", ""), facts(head_set))]
    if measured := head_set.validation():
        before, after = measured.accuracy_unsteered, measured.accuracy
        rows = [(kind, f"{before[kind]:.2f}", f"{value:.2f}") for kind, value in after.items()]
        rows += [
            (f"{kind} (should not change)", f"{was:.2f}", f"{now:.2f}")
            for kind, (was, now) in measured.side_effects.items()
            if kind not in after
        ]
        tables.append(Table((f"{head_set.target} answers", "unsteered", "steered"), rows))
        if measured.harm:
            harm = [
                (s, f"{h.divergence:.3f}", f"{h.perplexity:.3f}") for s, h in measured.harm.items()
            ]
            tables.append(Table(("strength", "divergence, nats a token", "perplexity x"), harm))
    pictures = []
    for method in METHODS:
        measured = head_set.validation(method)
        if measured and measured.line:
            caption = f"{method}: accuracy against harm; the dashed line is what may be"
            drawn = partial(line_of, measured)
            pictures.append(Picture(f"line_{head_set.name}_{method}", caption, drawn))
    if head_set.scores is not None:
        caption = f"Head scores; dots are the chosen heads toward {head_set.target}"
        pictures.append(Picture(f"scores_{head_set.name}", caption, partial(figure_of, head_set)))
    return Section(head_set.name, tables=tables, pictures=pictures)


def line_of(measured: Validation) -> Any:
    """Draw the line of accuracy against harm that a learned set was chosen from."""
    from juice.evaluation.report import figures

    points = [point.model_dump() for point in measured.line]
    return figures.line(points, measured.allowed or 0.0)


def figure_of(head_set: HeadSet) -> Any:
    """Draw the scores of a head set that has some; raises UsageError without matplotlib."""
    from juice.evaluation.report import figures

    scores = head_set.scores
    assert scores is not None
    tables = {
        "kind": scores.kind,
        "conflict_types": scores.conflict_types,
        "plus": scores.plus.tolist(),
        "minus": scores.minus.tolist(),
        "chosen": head_set.heads.model_dump(mode="json"),
    }
    try:
        figure = figures.heads(tables, head_set.target)
    except ImportError as error:
        raise UsageError(
            "plots need matplotlib; install it with: pip install 'juice-steering[eval]'"
        ) from error
    figure.suptitle(f"{head_set.model.id}: heads toward {head_set.target} (dots: chosen)")
    return figure


def facts(head_set: HeadSet) -> list[tuple[str, str]]:
    """Return the facts of a head set, as names and values."""
    model, heads = head_set.model, head_set.heads
    shape = f"{model.architecture}, {model.n_layers} layers of {model.n_heads} heads"
    lines = [
        ("name", f"{head_set.name}, toward {head_set.target}"),
        ("model", f"{model.id} ({shape})"),
        ("fingerprint", model.fingerprint or "none: matched by architecture and shape"),
        *_heads("", heads),
    ]
    for method, given in head_set.methods.given.items():
        if given.heads != heads:
            lines += _heads(f"{method} ", given.heads)
        lines.append((f"{method} betas", str(given.betas or "untuned")))
    lines.append(("default", f"method {head_set.method}"))
    if found := head_set.identification:
        alphas = " ".join(f"{alpha:g}" for alpha in (*found.alphas_plus, *found.alphas_minus))
        how = f"by {found.method}{f' (alphas {alphas})' if alphas else ''}"
        types = ", ".join(found.conflict_types)
        template = found.chat_template_sha256 or "none: identified on plain prompts"
        lines += [
            ("identified on", f"{found.n_examples} examples, seed {found.seed}, {how}, {types}"),
            ("chat template", template),
        ]
    if head_set.source:
        lines.append(("source", head_set.source))
    for method in METHODS:
        if measured := head_set.validation(method):
            changes = ", ".join(
                f"{t} {measured.accuracy_unsteered[t]:.2f} -> {after:.2f}"
                for t, after in measured.accuracy.items()
            )
            judged = f"{head_set.target} answer, {measured.n_examples} validation facts"
            lines.append((f"{method} did", f"{changes} ({judged})"))
            if measured.coverage:
                lines.append((f"{method} covers", measured.coverage))
            if measured.left_alone:
                lines.append((f"{method} keeps", f"{measured.left_alone} (should not change)"))
            lines += [(f"{method} harm", line) for line in measured.harm_lines]
        if gate := head_set.gate(method):
            lines += [(f"{method} gate", str(rule)) for rule in gate.rules]
    return lines


def _heads(method: str, heads: HeadLists) -> list[tuple[str, str]]:
    return [
        (f"{method}{sign} heads", " ".join(map(str, chosen)) or "none")
        for sign, chosen in (("+", heads.plus), ("-", heads.minus))
    ]


def run(
    head_set: options.HeadSetArgument,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the head scores to this file (.png, .svg, .pdf).")
    ] = None,
    html: options.Html = None,
    head_sets: options.HeadSets = None,
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Show a head set: its model, heads, betas, provenance and validation results."""
    from juice.head_set.library import find_head_set

    folder, chosen = find_head_set(head_set, head_sets)
    if html is not None:
        check_page(html, overwrite=force)
        write_page(html, [chosen], overwrite=force)
        console.note(f"a page about it is in {html}")
    if plot is not None:
        if chosen.scores is None:
            raise UsageError(
                f"{folder} has no scores to plot; only sets made by `juice identify` have"
            )
        try:
            figure_of(chosen).savefig(plot, dpi=130)
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot draw to {plot}: {error}") from error
        console.note(f"head scores drawn to {plot}")
    if json:
        console.answer_json(chosen.model_dump(mode="json"))
        return
    for label, value in facts(chosen):
        console.answer_fact(label, value)
    if layers := window(chosen):
        beside = console.working_twice(layers, chosen.model.n_layers)
        console.answer_fact("clean run", f"beside the steered one in {beside}")
    if chosen.scores is not None:
        show(chosen.scores, chosen)
