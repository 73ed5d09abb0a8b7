"""The scores of a head set's heads in a terminal: layers by heads, the chosen ones marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    import torch

    from juice.head_set import HeadScores, HeadSet

SHADES = " ░▒▓█"
CELL = 3  # a mark, a shade, a mark
COLOURS = {True: "yellow", False: "cyan"}  # by whether a score is positive


def show(scores: HeadScores, head_set: HeadSet) -> None:
    """Print the scores, the mean over conflict types; [ ] are the + heads, ( ) the - heads."""
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
    for name, own, chosen in maps:
        console.print(f"\n{name}: layers by heads, from blank to █ {float(own.abs().max()):.3g}")
        for layer, line in enumerate(_rows(own, chosen)):
            console.print(Text(f"{layer:9} ", "dim") + line, soft_wrap=True)
        numbers = "".join(f"{head:^{CELL}}" for head in range(n_heads))
        console.print(Text(f"{'':10}{numbers}", "dim"), soft_wrap=True)


def _rows(scores: torch.Tensor, marks: dict[tuple[int, int], str]) -> list[Text]:
    most = float(scores.abs().max()) or 1.0
    rows = []
    for layer, own in enumerate(scores.tolist()):
        line = Text()
        for head, score in enumerate(own):
            shade = SHADES[round(abs(score) / most * (len(SHADES) - 1))]
            mark = marks.get((layer, head), "  ")
            sign = "-" if score < 0 and shade != " " and mark == "  " else mark[0]
            line.append(sign, "bold").append(shade, COLOURS[score >= 0]).append(mark[1], "bold")
        rows.append(line)
    return rows
