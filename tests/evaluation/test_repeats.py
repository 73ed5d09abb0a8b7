"""The evaluation under several seeds: each is the evaluation with that seed, and nothing is asked
twice.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from scipy import stats

import juice
from juice.data.example import ConflictExample
from juice.engine.own.thread import BatchingEngine
from juice.engine.request import Request
from juice.errors import UsageError
from juice.evaluation import side_effects
from juice.evaluation.results import over_seeds, spread
from tests.support.marks import FEW_EXAMPLES

pytestmark = FEW_EXAMPLES
SEEDS = (3, 4, 5)
# Nothing is tuned: that is the same code under every seed, and takes most of the time.
WANTED: dict[str, Any] = {"methods": ("original", "served"), "texts": ["Lima."]}


@pytest.fixture(scope="module")
def few(pool: list[ConflictExample]) -> list[ConflictExample]:
    """Return six facts each about capitals and authors: about half of them are tested on."""
    return [*pool[:6], *pool[60:66]]


@pytest.fixture(scope="module", autouse=True)
def short_continuations() -> Iterator[None]:
    """Continue answers by 8 tokens instead of 64: they take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_effects, "N_NEW_TOKENS", 8)
        yield


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    return []


@pytest.fixture(scope="module")
def store(
    model: juice.SteeredModel,
    few: list[ConflictExample],
    asked: list[Request],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """Evaluate with three seeds, and keep every request that was run."""
    run = BatchingEngine.generate

    def generate(self: BatchingEngine, requests: Any, **options: Any) -> Any:
        asked.extend(requests)
        return run(self, requests, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchingEngine, "generate", generate)
        out = tmp_path_factory.mktemp("repeats") / "out"
        return juice.evaluate(model, few, out, seed=SEEDS[0], n_seeds=len(SEEDS), **WANTED)


def results_of(store: Any, seed: int) -> dict[str, Any]:
    place = store.folder if seed == SEEDS[0] else store.folder / "seeds" / str(seed)
    found: dict[str, Any] = json.loads((place / "results.json").read_text())
    return found


@pytest.mark.long
def test_every_seed_is_the_evaluation_with_that_seed_alone(
    store: Any, model: juice.SteeredModel, few: list[ConflictExample], tmp_path: Path
) -> None:
    """Kills: answers remembered for another prompt, target or method; a seed that stays."""
    alone = juice.evaluate(model, few, tmp_path / "alone", seed=5, **WANTED).results
    found = results_of(store, 5)
    assert found["data"] == alone["data"]
    assert found["data"]["test"] != results_of(store, 4)["data"]["test"]
    for target in ("parametric", "context"):
        for name, method in alone["targets"][target]["methods"].items():
            of_method = found["targets"][target]["methods"][name]
            for conflict_type, answers in method["answers"].items():
                expected = [[a and a[:2] for a in answers], [a and a[2:] for a in answers]]
                given = of_method["answers"][conflict_type]
                assert [a and a[:2] for a in given] == expected[0], (target, name)
                for p, q in zip(
                    (a[2:] for a in given if a), filter(None, expected[1]), strict=True
                ):
                    assert p == pytest.approx(q, rel=1e-3, abs=1e-6)  # batches differ
            assert of_method["collateral"] == method["collateral"]


def test_the_answers_are_those_of_plain_requests(store: Any, model: juice.SteeredModel) -> None:
    """Kills: an answer remembered for another steering."""
    given, prompts, steers = list[str](), list[str](), list[str]()
    for seed in SEEDS:
        results = results_of(store, seed)
        for target in ("parametric", "context"):
            for name, steer in (("original", "none"), ("served", target)):
                rows = results["targets"][target]["methods"][name]["answers"]["coherent"]
                given += [row[0] for row in rows]
                prompts += [e["prompts"]["coherent"] for e in results["data"]["test"]]
                steers += [steer] * len(rows)
    done = model.generate(prompts, steer=steers, max_tokens=15)
    assert given == [c.text for c in done]


def test_the_summary_is_that_of_the_seeds(store: Any) -> None:
    summary = store.results["seeds"]
    assert summary["seeds"] == list(SEEDS)
    every = [results_of(store, seed) for seed in SEEDS]
    for target in ("parametric", "context"):
        for name, of_method in summary["targets"][target].items():
            methods = [r["targets"][target]["methods"][name] for r in every]
            for domain in ("average", "world_capital"):
                values = [m["table"][domain]["coherent"]["accuracy"] for m in methods]
                cell = of_method["table"][domain]["coherent"]
                assert cell["values"] == values
                assert cell["mean"] == pytest.approx(fmean(values))
                assert cell["worst"] == min(values)
            harm = [m["collateral"]["true_context"]["coherent"]["accuracy"] for m in methods]
            assert of_method["collateral"]["true_context"]["coherent"]["values"] == harm


def test_no_answer_is_asked_for_twice(store: Any, asked: list[Request]) -> None:
    """The seeds share most test facts; unsteered, both targets ask the same."""
    assert store.results["is_complete"]
    counts = Counter(
        (
            r.prompt_ids,
            r.options.watch,
            str({k: v.tolist() for k, v in r.steering.coefficients.items()}),
            r.gate and r.gate.threshold,
        )
        for r in asked
        if len(r.options.watch) == 2 and r.options.max_tokens == 15
    )
    assert max(counts.values()) == 1
    methods = [
        method
        for seed in SEEDS
        for of_target in results_of(store, seed)["targets"].values()
        for method in of_target["methods"].values()
    ]
    n_answers = sum(a is not None for m in methods for rows in m["answers"].values() for a in rows)
    n_harm = sum(c["n"] for m in methods for row in m["collateral"].values() for c in row.values())
    assert len(counts) < 0.7 * (n_answers + n_harm)


def test_what_is_there_is_not_computed_again_and_seeds_can_be_added(
    store: Any, model: juice.SteeredModel, few: list[ConflictExample], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(store.folder, tmp_path / "out"))
    again = juice.evaluate(model, few, folder, seed=3, n_seeds=3, **WANTED)
    assert again.n_computed == 0
    more = juice.evaluate(model, few, folder, seed=3, n_seeds=4, **WANTED)
    assert more.n_computed == 2 * 2 * 3  # a choice, the answers and the harm, of each method
    assert more.results["seeds"]["seeds"] == [3, 4, 5, 6]
    assert (
        more.results["seeds"]["targets"]["context"]["served"]["table"]["average"]["coherent"]["n"]
        == 4
    )


def test_the_report_and_the_tables_have_the_seeds(store: Any) -> None:
    cell = store.results["seeds"]["targets"]["context"]["served"]["table"]["average"]["coherent"]
    shown = f"{100 * cell['mean']:.1f}"
    markdown = (store.folder / "report.md").read_text()
    rows = markdown.partition("### Over 3 seeds, context")[2].partition("\n#")[0]
    (row,) = [line for line in rows.splitlines() if line.startswith("| served | ")][:1]
    assert f"{shown} (" in row
    assert f"worst {100 * cell['worst']:.1f}" in row
    frame = store.to_frame("seeds")
    rows = frame.query(
        "target == 'context' and method == 'served' and measure == 'accuracy'"
        " and domain == 'average' and conflict_type == 'coherent'"
    )
    assert rows.seed.tolist() == list(SEEDS)
    assert rows.accuracy.tolist() == cell["values"]


@pytest.mark.parametrize("n", [2, 3, 10, 31, 40])
def test_the_interval_is_students(n: int) -> None:
    values = [0.5 + 0.01 * (i % 7) for i in range(n)]
    found = spread(values)
    assert found is not None
    low, high = stats.t.interval(0.95, n - 1, fmean(values), stats.sem(values))
    assert found["interval"] == pytest.approx((low, high), abs=1e-9)


def test_the_interval_of_three_seeds_is_that_of_a_printed_table() -> None:
    """t of 2 degrees of freedom at 97.5 % is 4.3027."""
    found = spread([0.5, 0.6, 0.7])
    assert found is not None
    half = 4.3027 * 0.1 / 3**0.5
    assert found["interval"] == pytest.approx((0.6 - half, 0.6 + half), abs=1e-5)


def test_seeds_without_a_value_count_nowhere() -> None:
    found = spread([None, 0.5, 0.7])
    assert found is not None
    assert (found["n"], found["mean"], found["worst"]) == (2, pytest.approx(0.6), 0.5)
    assert found["values"] == [None, 0.5, 0.7]
    assert spread([None]) is None
    assert (spread([0.5]) or {})["interval"] is None


def test_no_seed_is_refused(model: juice.SteeredModel, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="n_seeds is 0: Input should be greater than or equal to 1"
    ):
        juice.evaluate(model, "mini", tmp_path / "out", n_seeds=0)


def test_a_resumed_evaluation_gives_no_seed_the_numbers_of_another() -> None:
    """Kills: a method that only the second seed has, credited to the first."""

    def found(seed: int, **methods: float) -> dict[str, Any]:
        table = {
            name: {"table": {"all": {"clean": {"n": 9, "accuracy": share, "interval": None}}}}
            for name, share in methods.items()
        }
        return {"identity": {"seed": seed}, "targets": {"context": {"methods": table}}}

    first, second = found(3, original=0.5), found(4, original=0.7, served=0.9)
    fresh = over_seeds({3: first, 4: second})
    assert fresh["targets"]["context"]["served"]["table"]["all"]["clean"]["values"] == [None, 0.9]
    assert over_seeds({3: {**first, "seeds": fresh}, 4: second}) == fresh
