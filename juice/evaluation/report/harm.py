"""What each method does where steering is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from juice.evaluation.report.parts import Section, Table, percent, words

SITUATIONS = {
    "clean": "no context",
    "true_context": "true context",
    "unknown_subject": "invented subject",
}
NAMED = ("original", "juice", "served", "learned", "question", "gated", "gated_apart")
Cells = Mapping[str, Mapping[str, Any]]


def harm_section(target: str, own: Mapping[str, Any]) -> Section | None:
    """Return the table of side effects; None where none was measured."""
    measured: dict[str, Mapping[str, Cells]] = {
        name: method["collateral"]
        for name, method in own["methods"].items()
        if method.get("collateral")
    }
    kinds = [
        (situation, conflict_type)
        for situation in SITUATIONS
        for conflict_type in ("clean", "substitution", "coherent")
        if any(conflict_type in own.get(situation, {}) for own in measured.values())
    ]
    if not kinds:
        return None
    rows = [
        [words(name), *(_cell(own.get(situation, {}).get(t)) for situation, t in kinds)]
        for name, own in measured.items()
    ]
    header = [
        "method",
        *(SITUATIONS[s] if s == t else f"{SITUATIONS[s]}, {t}" for s, t in kinds),
    ]
    text = [
        (
            "Right answers in percent where steering is not needed: without a context, with one "
            "that tells the truth, and about an invented subject, of which the context is all there"
            " is. In brackets 95 % intervals."
        ),
    ]
    named = [_summed_up(name, measured[name]) for name in NAMED if name in measured]
    if named:
        text.append(f"{'; '.join(named)}.")
    title = f"Where steering toward the {target} answer is not needed"
    return Section(title, text=text, tables=[Table(header, rows)])


def _cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "–"
    low, high = cell["interval"]
    return f"{percent(cell['accuracy'])} ({percent(low)}–{percent(high)}, n = {cell['n']})"


def _summed_up(name: str, own: Mapping[str, Cells]) -> str:
    shares = [
        f"{title} {percent(sum(c['accuracy'] for c in cells.values()) / len(cells))}"
        for situation, title in SITUATIONS.items()
        if (cells := own.get(situation, {}))
    ]
    return f"{words(name)}: {', '.join(shares)}"
