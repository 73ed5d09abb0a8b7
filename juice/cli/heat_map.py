"""The scores of a head set's heads in a terminal: layers by heads, the chosen ones marked."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from juice.methods import Target

if TYPE_CHECKING:
    import torch

    from juice.head_set import HeadScores, HeadSet
    from juice.head_set.betas import Sign

SHADES = " ░▒▓█"
CELL = 3  # a mark, a shade, a mark
WINNERS: dict[Target, str] = {"context": "the context", "parametric": "memory"}
COLOURS: dict[Target, str] = {"context": "cyan", "parametric": "yellow"}
OTHER: dict[Target, Target] = {"context": "parametric", "parametric": "context"}
BESIDE = "│"  # at the layers in which the clean run goes along


def show(scores: HeadScores, head_set: HeadSet) -> None:
    """Print the scores, the mean over conflict types, and what their signs and colours mean."""
    console = Console(highlight=False)
    plus, minus = scores.plus.mean(0), scores.minus.mean(0)
    marks = {(own.layer, own.index): "[]" for own in head_set.heads.plus}
    marks |= {(own.layer, own.index): "()" for own in head_set.heads.minus}
    if bool((plus + minus).abs().max() < 1e-6):  # they say the same of both signs
        maps = [("all heads", plus, marks)]
    else:
        maps = [
            (name, own, {head: mark for head, mark in marks.items() if mark == sign})
            for name, own, sign in (("+ heads", plus, "[]"), ("- heads", minus, "()"))
        ]
    n_heads = plus.shape[1]
    if CELL * n_heads + 10 > max(80, console.width):
        console.print(f"{n_heads} heads a layer are too wide for this terminal; draw them: --plot")
        return
    beside = window(head_set)
    for name, own, chosen in maps:
        console.print(f"\n{name}: layers by heads, from blank to █ {float(own.abs().max()):.3g}")
        for layer, line in enumerate(_rows(own, chosen, head_set.target)):
            row = Text().append(f"{layer:9}", "dim")
            row.append(BESIDE if layer in beside else " ", "red").append_text(line)
            console.print(row, soft_wrap=True)
        numbers = "".join(f"{head:^{CELL}}" for head in range(n_heads))
        console.print(Text(f"{'':10}{numbers}", "dim"), soft_wrap=True)
    console.print(_legend(head_set, beside))


def window(head_set: HeadSet) -> Collection[int]:
    """Return the layers in which the clean run goes along, from the first steered to the last.

    With one steered layer, or without betas, there are none.
    """
    betas = head_set.betas()
    if betas is None:
        return ()
    signs: tuple[tuple[Sign, Any], ...] = (
        ("plus", head_set.heads.plus),
        ("minus", head_set.heads.minus),
    )
    layers = {
        head.layer
        for sign, heads in signs
        for head, beta in zip(heads, betas.each(sign, len(heads)), strict=True)
        if beta
    }
    return range(min(layers), max(layers) + 1) if len(layers) > 1 else ()


def _legend(head_set: HeadSet, beside: Collection[int]) -> Text:
    more, less = head_set.target, OTHER[head_set.target]
    legend = Text("[ ] chosen, to be added; ( ) chosen, to be taken away; ")
    legend.append("█", COLOURS[more]).append(f" above zero, toward {WINNERS[more]}; ")
    legend.append("█", COLOURS[less]).append(f" and - below zero, toward {WINNERS[less]}")
    if beside:
        legend.append("; ").append(BESIDE, "red").append(
            " the clean run goes along in these layers"
        )
    return legend


def _rows(scores: torch.Tensor, marks: dict[tuple[int, int], str], target: Target) -> list[Text]:
    most = float(scores.abs().max()) or 1.0
    rows = []
    for layer, own in enumerate(scores.tolist()):
        line = Text()
        for head, score in enumerate(own):
            shade = SHADES[round(abs(score) / most * (len(SHADES) - 1))]
            mark = marks.get((layer, head), "  ")
            sign = "-" if score < 0 and shade != " " and mark == "  " else mark[0]
            colour = COLOURS[target if score >= 0 else OTHER[target]]
            line.append(sign, "bold").append(shade, colour).append(mark[1], "bold")
        rows.append(line)
    return rows
