"""What every method is over several seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from juice.evaluation.report.harm import SITUATIONS
from juice.evaluation.report.parts import Section, Table, percent, words
from juice.evaluation.tables import AVERAGE


def seeds_section(results: Mapping[str, Any], target: str) -> Section | None:
    """Return the means over the seeds with their intervals and the worst; None for one seed."""
    own = results.get("seeds", {}).get("targets", {}).get(target)
    if not own:
        return None
    seeds = results["seeds"]["seeds"]
    accuracy = {name: method["table"].get(AVERAGE, {}) for name, method in own.items()}
    types = list(dict.fromkeys(t for cells in accuracy.values() for t in cells))
    rows = [
        [words(name), *(_cell(cells.get(t), len(seeds)) for t in types)]
        for name, cells in accuracy.items()
    ]
    text = [
        f"Seeds {seeds[0]} to {seeds[-1]}: each draws which examples find heads and tune, and what "
        "is tested on. Average accuracy in percent: the mean over the seeds, in brackets its 95 % "
        "interval (Student's t), and the worst seed.",
    ]
    tables = [Table(("method", *types), rows)]
    harm = {name: method["collateral"] for name, method in own.items() if method["collateral"]}
    if harm:
        text.append("The second table is of right answers where steering is not needed.")
        tables.append(_harm(harm, len(seeds)))
    return Section(
        f"Over {len(seeds)} seeds, {target}",
        level=3,
        text=text,
        tables=tables,
        in_terminal=True,
    )


def _harm(harm: Mapping[str, Any], n_seeds: int) -> Table:
    kinds = [
        (situation, t)
        for situation in SITUATIONS
        for t in dict.fromkeys(t for own in harm.values() for t in own.get(situation, {}))
    ]
    rows = [
        [words(name), *(_cell(own.get(situation, {}).get(t), n_seeds) for situation, t in kinds)]
        for name, own in harm.items()
    ]
    named = [SITUATIONS[s] if s == t else f"{SITUATIONS[s]}, {t}" for s, t in kinds]
    return Table(("method", *named), rows)


def _cell(own: Mapping[str, Any] | None, n_seeds: int) -> str:
    if own is None:
        return "–"
    interval = own["interval"]
    bounds = f" ({percent(interval[0])}–{percent(interval[1])})" if interval else ""
    missing = f", {own['n']} seeds" if own["n"] < n_seeds else ""
    return f"{percent(own['mean'])}{bounds}, worst {percent(own['worst'])}{missing}"
