"""Plain sentences on which method is best, and whether by more than chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from juice.evaluation.report.parts import percent, words
from juice.evaluation.tables import AVERAGE
from juice.identification.intervals import difference_interval

FEW = 10


def champion(tables: Mapping[str, Any]) -> str | None:
    """Return the method that the verdict is about: the served head set, else the paper's JuICE."""
    return next((name for name in ("served", "juice") if name in tables), None)


def verdict(tables: Mapping[str, Any], types: Sequence[str]) -> list[str]:
    """Return plain sentences on whether ours is best, on average and cell by cell.

    Methods that answer only some of its prompts are left out: they had other facts.
    """
    ours = champion(tables)
    if ours is None or len(tables) < 2 or not types:
        return []
    answered = {
        name: [t[AVERAGE][j]["n"] if j in t[AVERAGE] else 0 for j in types]
        for name, t in tables.items()
    }
    tables = {name: t for name, t in tables.items() if answered[name] == answered[ours]}
    if not all(answered[ours]):
        return []
    average = {
        name: sum(t[AVERAGE][j]["accuracy"] for j in types) / len(types)
        for name, t in tables.items()
    }
    if (n := max(c["n"] for c in tables[ours][AVERAGE].values())) < FEW:
        return [f"{n} facts are too few to tell methods apart."]
    if len(tables) < 2:
        return []
    best = max(average, key=lambda name: (average[name], name == ours))
    summary = f"On average over domains and conflict types {ours} has {percent(average[ours])}"
    if best == ours:
        others = {name: value for name, value in average.items() if name != ours}
        second = max(others, key=lambda name: others[name])
        name = words(second)
        is_tie = others[second] == average[ours]
        summary += (
            f", as has {name}: a tie for the best."
            if is_tie
            else f" and is best; next comes {name} with {percent(others[second])}."
        )
    else:
        summary += f" and is **not** best: {words(best)} has {percent(average[best])}."
    behind = []
    for domain in (d for d in tables[ours] if d != AVERAGE):
        for j in types:
            cells = {
                name: t[domain][j]["accuracy"]
                for name, t in tables.items()
                if j in t.get(domain, {})
            }
            top = max(cells.values(), default=0.0)
            if cells.get(ours, 0.0) < top:
                first = next(name for name in cells if cells[name] == top)
                behind.append(
                    f"{words(domain)} {j} ({words(first)} {percent(top)}, "
                    f"{ours} {percent(cells.get(ours))})"
                )
    return (
        [summary, f"Another method is ahead in {len(behind)} cells: {'; '.join(behind)}."]
        if behind
        else [summary, "No other method is ahead in any cell."]
    )


def beyond_chance(
    results: Mapping[str, Any], target: str, tables: Mapping[str, Any], types: Sequence[str]
) -> list[str]:
    """Return sentences on whether methods differ by more than chance, with the intervals.

    Ours against the best other method, and two runs against one with the same heads.
    """
    ours = champion(tables)
    if ours is None or len(tables) < 2 or len(results["data"]["test"]) < FEW:
        return []
    own = results["targets"][target]["methods"]
    right = {
        name: [
            _right(own[name].get("answers", {}), types, i)
            for i in range(len(results["data"]["test"]))
        ]
        for name in tables
    }
    asked = [i for i, value in enumerate(right[ours]) if value is not None]
    others = {
        name: sum(float(own[i] or 0) for i in asked)
        for name, own in right.items()
        if name != ours and all(own[i] is not None for i in asked)
    }
    pairs = [(ours, max(others, key=lambda name: others[name]))] if others else []
    pairs = list(dict.fromkeys([*pairs, ("served", "served_once"), ("juice", "june")]))
    return [
        sentence
        for a, b in pairs
        if a in right and b in right and (sentence := _against(results, right, a, b))
    ]


def _against(
    results: Mapping[str, Any], right: Mapping[str, Sequence[float | None]], a: str, b: str
) -> str | None:
    groups: dict[str, list[float]] = {}
    for fact, one, other in zip(results["data"]["test"], right[a], right[b], strict=True):
        if one is not None and other is not None:
            groups.setdefault(fact.get("relation", ""), []).append(one - other)
    interval = difference_interval(*groups.values())
    if interval is None:
        return None
    low, high = (100 * bound for bound in interval)
    how = "not apart by more than chance" if low <= 0 <= high else "ahead" if low > 0 else "behind"
    return f"{a} against {words(b)}, fact by fact: {how}, {low:+.1f} to {high:+.1f} points (95 %)."


def _right(answers: Mapping[str, Any], types: Sequence[str], i: int) -> float | None:
    """Return the share of a fact's prompts that were answered right."""
    own = [float(row[1]) for t in types if t in answers and (row := answers[t][i])]
    return sum(own) / len(own) if own else None
