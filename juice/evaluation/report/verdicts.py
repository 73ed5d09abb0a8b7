"""Plain sentences on which method is best, and whether by more than chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from juice.evaluation.metrics import interval_of_groups
from juice.evaluation.report.parts import percent, words
from juice.evaluation.tables import AVERAGE

FEW = 10


def verdict(tables: Mapping[str, Any], types: Sequence[str]) -> list[str]:
    """Return plain sentences on whether JuICE is best, on average and cell by cell."""
    if "juice" not in tables or len(tables) < 2 or not types:
        return []
    average = {
        name: sum(t[AVERAGE][j]["accuracy"] for j in types) / len(types)
        for name, t in tables.items()
        if all(j in t[AVERAGE] for j in types)
    }
    if "juice" not in average:
        return []
    if (n := max(c["n"] for c in tables["juice"][AVERAGE].values())) < FEW:
        return [f"{n} facts are too few to tell methods apart."]
    best = max(average, key=lambda name: (average[name], name == "juice"))
    summary = f"On average over domains and conflict types JuICE has {percent(average['juice'])}"
    if best == "juice":
        others = {name: value for name, value in average.items() if name != "juice"}
        second = max(others, key=lambda name: others[name])
        name = words(second)
        is_tie = others[second] == average["juice"]
        summary += (
            f", as has {name}: a tie for the best."
            if is_tie
            else f" and is best; next comes {name} with {percent(others[second])}."
        )
    else:
        summary += f" and is **not** best: {words(best)} has {percent(average[best])}."
    behind = []
    for domain in (d for d in tables["juice"] if d != AVERAGE):
        for j in types:
            cells = {
                name: t[domain][j]["accuracy"]
                for name, t in tables.items()
                if j in t.get(domain, {})
            }
            top = max(cells.values(), default=0.0)
            if cells.get("juice", 0.0) < top:
                first = next(name for name in cells if cells[name] == top)
                behind.append(
                    f"{words(domain)} {j} ({words(first)} {percent(top)}, "
                    f"juice {percent(cells.get('juice'))})"
                )
    return (
        [summary, f"Another method is ahead in {len(behind)} cells: {'; '.join(behind)}."]
        if behind
        else [summary, "No other method is ahead in any cell."]
    )


def beyond_chance(
    results: Mapping[str, Any], target: str, tables: Mapping[str, Any], types: Sequence[str]
) -> list[str]:
    """Return a sentence on whether JuICE and the best other method differ by more than chance.

    It gives the interval of the difference, fact by fact.
    """
    methods, test = results["targets"][target]["methods"], results["data"]["test"]
    if "juice" not in tables or len(tables) < 2 or len(test) < FEW:
        return []
    right = {
        name: [_right(methods[name].get("answers", {}), types, i) for i in range(len(test))]
        for name in tables
    }
    best = max(
        (name for name in right if name != "juice"),
        key=lambda name: sum(v for v in right[name] if v is not None),
    )
    groups: dict[str, list[float]] = {}
    for fact, a, b in zip(test, right["juice"], right[best], strict=True):
        if a is not None and b is not None:
            groups.setdefault(fact.get("relation", ""), []).append(a - b)
    span = interval_of_groups(list(groups.values()), results["identity"]["seed"])
    if span is None:
        return []
    low, high = (100 * bound for bound in span)
    name = words(best)
    if low <= 0 <= high:
        return [
            f"Against {name}, fact by fact, the difference is within chance: "
            f"{low:+.1f} to {high:+.1f} points (95 %)."
        ]
    return [
        f"Against {name}, fact by fact, JuICE is {'ahead' if low > 0 else 'behind'}: "
        f"{low:+.1f} to {high:+.1f} points (95 %)."
    ]


def _right(answers: Mapping[str, Any], types: Sequence[str], i: int) -> float | None:
    """Return the share of a fact's prompts that were answered right."""
    own = [float(row[1]) for t in types if t in answers and (row := answers[t][i])]
    return sum(own) / len(own) if own else None
