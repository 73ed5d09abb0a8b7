"""The same evaluation with other seeds, and what its numbers are over all of them.

A seed draws the examples that find heads and those that tune, what is tested on (the rest, or
`limit` of it), and the names of invented subjects. It changes neither the model nor a head set that
is served, so an answer that was given under one seed is not asked for again under another.

seeds/<seed>/results.json    the evaluation under every seed but the first, without analyses and
                             longer texts
results.json                 `seeds`: {seeds, targets: {target: {method: {table: {domain:
                             {conflict type: spread}}, collateral: {situation: {...}}}}}}
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from juice.evaluation.options import EvaluationOptions
from juice.evaluation.remembered import Remembered
from juice.evaluation.run import run
from juice.evaluation.splits import Data
from juice.evaluation.spread import spread
from juice.evaluation.store import Store
from juice.progress import Advance, Progress
from juice.steered_model import SteeredModel

FOLDER = "seeds"


def repeat(
    store: Store,
    model: SteeredModel,
    data: Data,
    options: EvaluationOptions,
    *,
    n_seeds: int,
    remembered: Remembered,
    texts: Sequence[str],
    overwrite: bool,
    progress: Progress,
) -> None:
    """Evaluate with the seeds that follow the first, and sum all of them up in its results.

    Args:
        store: The evaluation with the first seed, complete.
        model: The model.
        data: The examples.
        options: What was evaluated, with the first seed.
        n_seeds: How many seeds, the first included.
        remembered: The answers that the first seed got.
        texts: Plain texts for perplexity.
        overwrite: Start anew, whatever the folders hold.
        progress: Reports the progress of each piece of work.

    Raises:
        JuiceError: As `run`.
    """
    seeds = range(options.seed, options.seed + n_seeds)
    every = [store.results]
    for seed in seeds[1:]:
        with warnings.catch_warnings():
            # They are kept as notes; those of the first seed need not be repeated.
            warnings.simplefilter("ignore", UserWarning)
            other = run(
                model,
                data,
                options.with_seed(seed),
                store.folder / FOLDER / str(seed),
                texts=texts,
                overwrite=overwrite,
                remembered=remembered,
                progress=_named(progress, seed),
            )
        every.append(other.results)
        store.n_computed += other.n_computed
        store.n_cached += other.n_cached
    store.results["seeds"] = {"seeds": list(seeds), "targets": _summed_up(every)}
    _note(store, seeds, every)
    store.save()


def _named(progress: Progress, seed: int) -> Progress:
    def named(description: str, total: int) -> AbstractContextManager[Advance]:
        return progress(f"seed {seed}: {description}", total)

    return named


def _note(store: Store, seeds: Sequence[int], every: Sequence[Mapping[str, Any]]) -> None:
    """Keep what only other seeds warned of as notes, and warn."""
    notes: list[str] = store.results.setdefault("notes", [])
    known = set(notes)
    for seed, results in zip(seeds, every, strict=True):
        for note in results.get("notes", []):
            if note not in known and (own := f"seed {seed}: {note}") not in notes:
                notes.append(own)
                warnings.warn(own, stacklevel=3)


def _summed_up(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    summed: dict[str, Any] = {}
    for target in every[0].get("targets", {}):
        methods = [results["targets"].get(target, {}).get("methods", {}) for results in every]
        names = dict.fromkeys(name for own in methods for name in own if "table" in own[name])
        summed[target] = {
            name: {
                part: _over_seeds([own.get(name, {}).get(part, {}) for own in methods])
                for part in ("table", "collateral")
            }
            for name in names
        }
    return summed


def _over_seeds(tables: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the spread of every cell's accuracy, by row and conflict type."""

    def values(row: str, conflict_type: str) -> list[float | None]:
        cells = (own.get(row, {}).get(conflict_type) for own in tables)
        return [None if cell is None else cell["accuracy"] for cell in cells]

    cells = dict.fromkeys((row, t) for own in tables for row, cells in own.items() for t in cells)
    found: dict[str, dict[str, Any]] = {}
    for row, conflict_type in cells:
        found.setdefault(row, {})[conflict_type] = spread(values(row, conflict_type))
    return found
