"""`juice inspect`: what is in a head set, and its scores as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from juice.cli import console, heat_map, options
from juice.cli.head_set_page import check_page, facts, figure_of, write_page
from juice.errors import UsageError

if TYPE_CHECKING:
    from juice.head_set import HeadSet


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
    from juice.head_set.lookup import find_head_set

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
        _draw(chosen, plot)
        console.note(f"head scores drawn to {plot}")
    if json:
        console.answer_json(chosen.model_dump(mode="json"))
        return
    for label, value in facts(chosen):
        console.answer_fact(label, value)
    if layers := heat_map.window(chosen):
        first, last = min(layers), max(layers)
        console.answer_fact(
            "clean run",
            f"beside the steered one in layers {first} to {last}: "
            f"{len(layers)} of {chosen.model.n_layers} layers work twice",
        )
    if chosen.scores is not None:
        heat_map.show(chosen.scores, chosen)


def _draw(head_set: HeadSet, path: Path) -> None:
    figure = figure_of(head_set)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot draw to {path}: {error}") from error
