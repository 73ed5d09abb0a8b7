"""The bundled model on facts that neither identification nor tuning saw: rows of its model card.

The bounds are a little below what the whole set shows; the sample is fixed, so the figures do not
move unless the code or the weights do.
"""

from __future__ import annotations

from typing import Any

import pytest

import juice
from benchmarks.quality import Share, measure
from juice.files import MINI
from juice.head_set.lookup import shipped_folder
from lab.examples import FORMS, Form

PLAIN: tuple[Form, ...] = ("canonical", "trained", "kept_out")
CONFLICTS = ("substitution", "coherent")

# A few of the shipped examples have answers that begin with the same token; they are not drawn.
pytestmark = pytest.mark.filterwarnings("ignore:5 examples cannot be scored:UserWarning")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return measure(limit=60)


def rate(share: Share) -> float:
    right, n = share
    return right / n


def test_the_unsteered_model_knows_its_facts_in_every_form(measured: dict[str, Any]) -> None:
    least = {"canonical": 0.95, "trained": 0.95, "kept_out": 0.85, "chat": 0.93}
    for form in FORMS:
        unsteered = measured["forms"][form]["unsteered"]["parametric"]
        assert rate(unsteered["clean"]) >= least[form], form


@pytest.mark.parametrize("form", ["canonical", "chat"])
def test_a_conflict_divides_the_unsteered_model(measured: dict[str, Any], form: Form) -> None:
    unsteered = measured["forms"][form]["unsteered"]
    for conflict in CONFLICTS:
        for target in ("parametric", "context"):
            assert 0.25 <= rate(unsteered[target][conflict]) <= 0.75, (target, conflict)


def test_parametric_steering_brings_memory_back_under_every_conflict(
    measured: dict[str, Any],
) -> None:
    steered = measured["forms"]["canonical"]["steer_parametric"]
    assert all(rate(steered[conflict]) >= 0.90 for conflict in ("clean", *CONFLICTS))


def test_context_steering_makes_the_context_win(measured: dict[str, Any]) -> None:
    steered = measured["forms"]["canonical"]["steer_context"]["context"]
    assert all(rate(steered[conflict]) >= 0.90 for conflict in CONFLICTS)


def test_the_dual_run_is_no_worse_than_the_single_run(measured: dict[str, Any]) -> None:
    """On 60 facts one is 1.7 points: two of them are allowed."""
    own = measured["forms"]["canonical"]
    for conflict in ("clean", *CONFLICTS):
        dual, once = own["steer_parametric"][conflict], own["run_once_parametric"][conflict]
        assert rate(dual) >= rate(once) - 0.035


def test_true_contexts_stay_true_under_context_steering(measured: dict[str, Any]) -> None:
    steered = measured["forms"]["canonical"]["true_context"]["context"]
    assert all(rate(steered[conflict]) >= 0.95 for conflict in CONFLICTS)


@pytest.mark.parametrize("form", ["canonical", "chat"])
def test_an_invented_subjects_context_is_believed(measured: dict[str, Any], form: Form) -> None:
    believed = measured["forms"][form]["invented_subject"]["none"]
    assert all(rate(believed[conflict]) >= 0.96 for conflict in CONFLICTS)


def test_a_reply_is_one_word_where_one_is_asked_for(measured: dict[str, Any]) -> None:
    assert all(rate(share) >= 0.93 for share in measured["one_word"].values())


def test_the_shipped_sets_come_from_identify_and_fit_the_shipped_model() -> None:
    with juice.load("mini", head_sets=shipped_folder()) as model:
        for target in ("context", "parametric"):
            head_set = model.head_sets.get(target)
            assert head_set.model.fingerprint == model.loaded.identity.fingerprint
            plus, minus = juice.select_heads(
                head_set.scores.plus, head_set.scores.minus, top_k=head_set.identification.top_k
            )
            assert (tuple(plus), tuple(minus)) == (head_set.heads.plus, head_set.heads.minus)


def test_the_weights_are_small_enough_to_ship() -> None:
    assert (MINI / "model.safetensors").stat().st_size <= 20_000_000
