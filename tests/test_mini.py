"""The bundled model on facts that neither identification nor tuning saw: rows of its model card.

The bounds are those of the whole set; the sample is fixed, so the figures do not move unless the
code or the weights do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import juice
from benchmarks.quality import measure
from juice.head_set.lookup import shipped_folder

MINI = Path(juice.__file__).parent / "models" / "mini"


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return measure(limit=120)


def test_the_unsteered_model_knows_its_facts_and_a_conflict_divides_it(
    measured: dict[str, Any],
) -> None:
    memory, context = measured["unsteered"]["parametric"], measured["unsteered"]["context"]
    assert memory["clean"] >= 0.95
    assert max(memory["substitution"], context["substitution"]) <= 0.85
    assert context["coherent"] > 0.5 > memory["coherent"]


def test_parametric_steering_brings_memory_back_under_every_conflict(
    measured: dict[str, Any],
) -> None:
    steered = measured["steer_parametric"]["parametric"]
    assert steered["clean"] >= 0.95
    assert steered["substitution"] >= 0.90
    assert steered["coherent"] >= 0.90


def test_context_steering_makes_the_context_win(measured: dict[str, Any]) -> None:
    steered, plain = measured["steer_context"]["context"], measured["unsteered"]["context"]
    for conflict_type in ("substitution", "coherent"):
        assert steered[conflict_type] >= max(0.90, plain[conflict_type] + 0.05)


def test_the_dual_run_is_no_worse_than_the_single_run(measured: dict[str, Any]) -> None:
    """On the whole set no type is worse by more than a point.

    On 120 facts a point is 1.2 of them, so three are allowed.
    """
    dual, once = (
        measured["steer_parametric"]["parametric"],
        measured["run_once_parametric"]["parametric"],
    )
    assert sum(dual.values()) >= sum(once.values()) - 0.025
    assert all(dual[t] >= once[t] - 0.025 for t in dual)


def test_true_contexts_stay_true_under_context_steering(measured: dict[str, Any]) -> None:
    assert measured["true_context"]["context"]["substitution"] >= 0.95
    assert measured["true_context"]["context"]["coherent"] >= 0.95


def test_the_shipped_sets_come_from_four_world_capitals_and_fit_the_shipped_model() -> None:
    model = juice.load("mini", head_sets=shipped_folder())
    for target in ("context", "parametric"):
        head_set = model.head_sets.get(target)
        assert head_set.identification.n_examples == 4
        assert head_set.model.fingerprint == model.loaded.identity.fingerprint
        plus, minus = juice.select_heads(
            head_set.scores.plus, head_set.scores.minus, top_k=head_set.identification.top_k
        )
        assert (tuple(plus), tuple(minus)) == (head_set.heads.plus, head_set.heads.minus)


def test_the_weights_are_small_enough_to_ship() -> None:
    assert (MINI / "model.safetensors").stat().st_size <= 10_000_000
