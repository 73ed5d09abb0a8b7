"""The results of an evaluation: one table of its numbers, and the folder that keeps them.

The table (`measured`) has a row for every number and seed:

    target, method   whose answer counts as right, and what was done
    measure          `accuracy`, or a situation in which steering is not needed (harm)
    domain           a relation; `average` is the mean over the relations, as in the paper
    conflict_type    of the prompts
    seed             the first seed's rows have all columns, the others' the accuracy alone
    n, accuracy, low, high, p_parametric, p_context, context_reliance

Every other table is a part of it (accuracy, harm, seeds), or has a row for each answer or
checkpoint. They are written as CSV beside results.json, and `Store.to_frame` returns them.

results.json grows by units of work and is never half written. A unit is a path into the document;
what is there is not computed again. The document names all that its numbers depend on; a folder
that holds another evaluation is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, reduce
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from juice.data.example import ConflictExample, context_end
from juice.errors import OutputError, UsageError
from juice.evaluation.answers import Answer
from juice.evaluation.options import require_extra
from juice.evaluation.splits import domain_of
from juice.files import write_lines
from juice.formula import OTHER, ConflictType, Target
from juice.identification.outcomes import share_interval

if TYPE_CHECKING:
    from pandas import DataFrame

FORMAT = "juice.evaluation/2"
FILE = "results.json"
REPORT = ("report.md", "report.html")
AVERAGE = "average"
ACCURACY = "accuracy"
N_POPULARITY_BINS = 3
KEYS = ("target", "method", "measure", "domain", "conflict_type")
BOUNDS = ("low", "high")
CELL = ("n", "accuracy", *BOUNDS)
PROBABILITIES = ("p_parametric", "p_context", "context_reliance")
TableName = Literal["accuracy", "harm", "answers", "seeds", "checkpoints"]
COLUMNS: dict[TableName, tuple[str, ...]] = {
    "accuracy": ("target", "method", "domain", "conflict_type", *CELL, *PROBABILITIES),
    "harm": ("target", "method", "situation", "conflict_type", *CELL),
    "answers": (
        *("target", "method", "conflict_type", "subject", "relation", "context", "question"),
        *("expected", "answer", "is_right", "p_parametric", "p_context"),
    ),
    "seeds": (*KEYS, "seed", "accuracy"),
    "checkpoints": (
        *("name", "n", "clean_accuracy", "counterfactual_accuracy", "parametric_accuracy"),
        *("context_reliance", "attention_context", "attention_subject"),
    ),
}
Cell = dict[str, Any]
Answers = Mapping[ConflictType, Sequence[Answer | None]]


def _scored(examples: Sequence[ConflictExample], answers: Answers) -> DataFrame:
    """Return a row for each answer: where it belongs, its verdict and its probabilities."""
    import pandas

    rows = [
        (domain_of(e), t, float(a.is_correct), a.p_parametric, a.p_context, a.context_reliance)
        for t, given in answers.items()
        for e, a in zip(examples, given, strict=True)
        if a is not None
    ]
    names = ["domain", "conflict_type", ACCURACY, *PROBABILITIES]
    return pandas.DataFrame(rows, columns=names).astype(dict.fromkeys(names[2:], float))


def _cell(scored: DataFrame) -> Cell:
    """Return {n, accuracy, interval, p_parametric, p_context, context_reliance} of some answers.

    Domains count alike: numbers are means of the domains' means.
    """
    domains = scored.groupby("domain")
    means = domains[[ACCURACY, *PROBABILITIES]].mean().mean()
    groups = [values.tolist() for _, values in domains.accuracy]
    cell = {"n": len(scored), "interval": share_interval(*groups), **means.to_dict()}
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in cell.items()}


def table(
    examples: Sequence[ConflictExample], answers: Answers
) -> dict[str, dict[ConflictType, Cell]]:
    """Return one method's table, {domain: {conflict type: cell}}, with `average` last."""
    scored = _scored(examples, answers)
    domains = sorted({domain_of(e) for e in examples})
    parts = {domain: scored[scored.domain == domain] for domain in domains}
    return {
        name: {t: _cell(rows) for t, rows in part.groupby("conflict_type", sort=False)}
        for name, part in {**parts, AVERAGE: scored}.items()
    }


def by_popularity(
    examples: Sequence[ConflictExample], answers: Answers
) -> list[dict[str, Any]] | None:
    """Return accuracy by tercile of popularity, least popular first.

    None where fewer than three examples have a popularity.
    """
    known = sorted((e.popularity, i) for i, e in enumerate(examples) if e.popularity is not None)
    if len(known) < N_POPULARITY_BINS:
        return None
    bounds = [round(k * len(known) / N_POPULARITY_BINS) for k in range(N_POPULARITY_BINS + 1)]
    bins = []
    for start, end in pairwise(bounds):
        chosen = [i for _, i in known[start:end]]
        in_bin = {t: [given[i] for i in chosen] for t, given in answers.items()}
        cells = _scored([examples[i] for i in chosen], in_bin).assign(domain="all")
        bins.append(
            {
                "from": known[start][0],
                "to": known[end - 1][0],
                "n": end - start,
                "cells": {t: _cell(rows) for t, rows in cells.groupby("conflict_type", sort=False)},
            }
        )
    return bins


def measured(results: Mapping[str, Any]) -> DataFrame:
    """Return the one table of the numbers, over all seeds."""
    import pandas

    methods = {t: found.get("methods", {}) for t, found in results.get("targets", {}).items()}
    seeds = results.get("seeds", {"seeds": [], "targets": {}})
    first = results.get("identity", {}).get("seed")
    rows = [
        {**keys, "seed": first, **cell, **dict(zip(BOUNDS, cell["interval"] or (), strict=False))}
        for keys, cell in _cells(methods)
    ]
    rows += [
        {**keys, "seed": seed, ACCURACY: value}
        for keys, spread_of in _cells(seeds["targets"])
        for seed, value in zip(seeds["seeds"], spread_of["values"], strict=True)
        if seed != first and value is not None
    ]
    return pandas.DataFrame(rows, columns=[*KEYS, "seed", *CELL, *PROBABILITIES])


def _cells(targets: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the cells of {target: {method: parts}}, each with its keys."""
    for target, methods in targets.items():
        for method, parts in methods.items():
            accuracy = {(ACCURACY, d): cells for d, cells in parts.get("table", {}).items()}
            harm = {(s, AVERAGE): cells for s, cells in parts.get("collateral", {}).items()}
            for (measure, domain), cells in {**accuracy, **harm}.items():
                for conflict_type, cell in cells.items():
                    values = (target, method, measure, domain, conflict_type)
                    yield dict(zip(KEYS, values, strict=True)), cell


def answers_of(results: Mapping[str, Any]) -> DataFrame:
    """Return a row for every answer: its prompt, what is expected, the other answer, the verdict.

    `fact` is the place of its example among those that are tested on. `context` and `question`
    together are the prompt; all of it is the question where the context cannot be told apart.
    """
    import pandas

    @cache
    def fact(i: int) -> ConflictExample:
        return ConflictExample.model_validate(results["data"]["test"][i])

    rows = [
        {"target": target, "method": method, **_asked(fact(i), t, target), "fact": i}
        | dict(zip(COLUMNS["answers"][-4:], answer, strict=True))
        for target, found in results.get("targets", {}).items()
        for method, parts in found.get("methods", {}).items()
        for t, given in parts.get("answers", {}).items()
        for i, answer in enumerate(given)
        if answer is not None
    ]
    return pandas.DataFrame(rows, columns=["fact", "other", *COLUMNS["answers"]])


def _asked(example: ConflictExample, conflict_type: ConflictType, target: Target) -> dict[str, Any]:
    prompt, end = example.prompts[conflict_type], context_end(example, conflict_type) or 0
    return {
        "conflict_type": conflict_type,
        "subject": example.subject,
        "relation": example.relation,
        "context": prompt[:end] or None,
        "question": prompt[end:],
        "expected": " | ".join(example.accepted(target)),
        "other": " | ".join(example.accepted(OTHER[target])),
    }


def frame_of(results: Mapping[str, Any], name: TableName) -> DataFrame:
    """Return a table with all its columns; without rows where there is nothing of it.

    Raises UsageError for an unknown table.
    """
    import pandas

    if name not in COLUMNS:
        raise UsageError(f"there is no table {name!r}; expected one of {', '.join(COLUMNS)}")
    if name == "answers":
        found = answers_of(results)
    elif name == "checkpoints":
        found = pandas.DataFrame(results.get("checkpoints", []), columns=list(COLUMNS[name]))
    else:
        found = measured(results)
        if name == "seeds":  # those of one number follow each other
            order = found.groupby([*KEYS], sort=False).ngroup().argsort(kind="stable")
            found = found.iloc[order if "seeds" in results else []]
        else:
            found = found[found.n.notna() & ((found.measure == ACCURACY) == (name == ACCURACY))]
            found = found.astype({"n": int}).rename(columns={"measure": "situation"})
    return found[[*COLUMNS[name]]].reset_index(drop=True)


def write_tables(folder: Path, results: Mapping[str, Any]) -> None:
    """Write every table that has rows as CSV.

    Raises OutputError where the folder cannot be written.
    """
    for name in COLUMNS:
        found = frame_of(results, name)
        if len(found):
            write_lines(folder / f"{name}.csv", [found.to_csv(index=False)], overwrite=True)


def spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return {n, mean, interval, worst, values} of shares, one a seed; None without any.

        mean +- t * s / sqrt(n)

    with the standard deviation s of n values and Student's t: the interval is that of the mean over
    all seeds, given the data. It says what another seed may change, not what other facts would. A
    seed without a value counts nowhere. One value alone has no interval.
    """
    import pandas
    from scipy import stats

    known = pandas.Series(values, dtype=float).dropna()
    n, mean = len(known), float(known.mean())
    if not n:
        return None
    half = float(stats.t.ppf(0.975, n - 1) * known.sem()) if n > 1 else None
    return {
        "n": n,
        "mean": mean,
        "interval": None if half is None else (max(0.0, mean - half), min(1.0, mean + half)),
        "worst": float(known.min()),
        "values": list(values),
    }


def over_seeds(every: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the spread of every number over the results of some seeds.

    {seeds, targets: {target: {method: {table: {domain: {conflict type: spread}}, collateral:
    {situation: {conflict type: spread}}}}}}
    """
    import pandas

    # The numbers of each seed alone: those of a resumed evaluation hold the others' too.
    numbers = {seed: measured({"targets": found["targets"]}) for seed, found in every.items()}
    rows = pandas.concat([found.assign(seed=seed) for seed, found in numbers.items()])
    values = rows.groupby([*KEYS, "seed"], sort=False).accuracy.first().unstack(sort=False)
    targets: dict[str, Any] = {target: {} for target in next(iter(every.values()))["targets"]}
    for (target, method, measure, domain, conflict_type), found in values.iterrows():
        parts = targets[target].setdefault(method, {"table": {}, "collateral": {}})
        part, row = ("table", domain) if measure == ACCURACY else ("collateral", measure)
        shares = [None if math.isnan(value) else value for value in found[[*every]]]
        parts[part].setdefault(row, {})[conflict_type] = spread(shares)
    return {"seeds": [*every], "targets": targets}


class Store:
    """The results of one evaluation in one folder."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self.n_cached = 0
        self.n_computed = 0
        self.results: dict[str, Any] = {
            "format": FORMAT,
            "identity": json.loads(json.dumps(identity)),
            "is_complete": False,
        }

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, Any], *, overwrite: bool = False) -> Store:
        """Open a folder for an evaluation, of which `overwrite` removes what another has written.

        Raises OutputError for a folder that cannot be made or, without `overwrite`, that holds
        another evaluation or something else.
        """
        store = cls(folder, identity)
        if folder.exists() and not folder.is_dir():
            raise OutputError(f"{folder} is a file; give a folder for the report with --out")
        if folder.is_dir() and not overwrite:
            if (folder / FILE).exists():
                store._resume(read_results(folder))
            elif any(folder.iterdir()):
                raise OutputError(
                    f"the folder {folder} is not empty and holds no {FILE}; "
                    "give another --out, or --force"
                )
        try:
            if overwrite:
                _remove(folder)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"cannot make the folder {folder}: {error}; give another --out"
            ) from error
        return store

    @property
    def files(self) -> list[str]:
        """The names of the report's files: the document, its pages, and the tables with rows."""
        tables = [name for name in COLUMNS if len(frame_of(self.results, name))]
        return [FILE, *REPORT, *(f"{name}.csv" for name in sorted(tables))]

    def _resume(self, found: dict[str, Any]) -> None:
        mine, theirs = self.results["identity"], found.get("identity", {})
        for name in mine:
            if mine[name] != theirs.get(name):
                raise OutputError(
                    f"{self.folder} holds another evaluation: its {name} is "
                    f"{_short(theirs.get(name))}, this one's is {_short(mine[name])}; "
                    "give another --out, or --force to start anew"
                )
        self.results = {**found, "is_complete": False}

    def check(self, name: str, value: str) -> None:
        """Record something else that the numbers depend on.

        Raises OutputError where the document has another value.
        """
        noted = self.results.setdefault("depends_on", {})
        if noted.setdefault(name, value) != value:
            raise OutputError(
                f"{self.folder} was made with another {name.replace('_', ' ')}; "
                "give another --out, or --force to start anew"
            )

    def unit(self, *path: str, make: Callable[[], Any]) -> Any:
        """Return a unit of work from the document, or make and save it now.

        A number that is not finite becomes None.
        """
        *parents, name = path
        found = reduce(lambda part, key: part.get(key, {}), parents, self.results)
        if name in found:
            self.n_cached += 1
            return found[name]
        made = _plain(make())  # first, so that a failure leaves no empty place
        reduce(lambda part, key: part.setdefault(key, {}), parents, self.results)[name] = made
        self.n_computed += 1
        self.save()
        return made

    def to_frame(self, table: TableName = "accuracy") -> DataFrame:
        """Return a table of the results as a pandas frame, as in the CSV files of the folder.

        Args:
            table: `accuracy`, `harm`, `answers`, `seeds` or `checkpoints`.

        Raises:
            UsageError: There is no such table, or the extra `eval` is not installed.
        """
        require_extra()
        return frame_of(self.results, table)

    def save(self) -> None:
        """Write the document in one step. Raises OutputError when it cannot be written."""
        text = json.dumps(_plain(self.results), ensure_ascii=False, allow_nan=False)
        write_lines(self.folder / FILE, [text], overwrite=True)


def read_results(folder: Path) -> dict[str, Any]:
    """Read a report folder's document. Raises OutputError for one of another format."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OutputError(
            f"cannot read {folder / FILE}: {error}; give another --out, or --force"
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise OutputError(
            f"{folder / FILE} is not of the format {FORMAT}; give another --out, or --force"
        )
    return found


def _remove(folder: Path) -> None:
    """Remove the files of the evaluation that a folder holds, and no others."""
    if not (folder / FILE).is_file():
        return
    with suppress(OSError, ValueError):  # an interrupted evaluation has none
        drawn = re.findall(r"\]\((figures/[^/)]+\.png)\)", (folder / REPORT[0]).read_text("utf-8"))
        for picture in drawn:
            (folder / picture).unlink(missing_ok=True)
    seeds = folder / "seeds"
    for seed in seeds.iterdir() if seeds.is_dir() else ():
        _remove(seed)
    for name in (*REPORT, *(f"{name}.csv" for name in COLUMNS), FILE):
        (folder / name).unlink(missing_ok=True)
    for place in (folder / "figures", seeds, folder):
        with suppress(OSError):  # it holds something else, or is not there
            place.rmdir()


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: lists for tuples, None for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def sha256(text: str) -> str:
    """Return the hash of a text, as the document writes hashes."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
