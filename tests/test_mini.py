"""The bundled model on facts that neither identification nor tuning saw: rows of its model card.

The bounds are a little below what the whole set shows; the sample is fixed, so the figures do not
move unless the code or the weights do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import juice
from benchmarks.quality import Share, in_form, measure, shares, unseen_subjects
from juice.engine.steer import Steer
from juice.files import MINI
from juice.formula import CONFLICTS
from juice.head_set.library import shipped_folder
from lab.examples import Form
from tests.support.marks import FEW_EXAMPLES

N_FACTS = 20

# A few of the shipped examples have answers that begin with the same token; they are not drawn.
pytestmark = FEW_EXAMPLES


@pytest.fixture(scope="module")
def model() -> Iterator[juice.SteeredModel]:
    with juice.load("mini") as model:
        yield model


@pytest.fixture(scope="module")
def subjects(model: juice.SteeredModel) -> list[tuple[str | None, str]]:
    return unseen_subjects(model, N_FACTS)


@pytest.fixture(scope="module")
def measured(model: juice.SteeredModel, subjects: list[tuple[str | None, str]]) -> dict[str, Any]:
    return measure(model, subjects, forms=("canonical", "chat"))


def rate(share: Share) -> float:
    right, n = share
    return right / n


@pytest.mark.parametrize("form", ["canonical", "chat"])
def test_the_unsteered_model_knows_its_facts(measured: dict[str, Any], form: Form) -> None:
    assert rate(measured["forms"][form]["unsteered"]["parametric"]["clean"]) >= 0.95


@pytest.mark.parametrize(("form", "least"), [("trained", 0.95), ("kept_out", 0.85)])
def test_the_unsteered_model_knows_them_in_other_wordings(
    model: juice.SteeredModel,
    subjects: list[tuple[str | None, str]],
    form: Form,
    least: float,
) -> None:
    examples = in_form(subjects, form)
    right = shares(model, examples, "parametric", Steer(target="none"), ("clean",))
    assert rate(right["clean"]) >= least


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
    """One fact, 5 points, is allowed."""
    numbers = measured["forms"]["canonical"]
    for conflict in ("clean", *CONFLICTS):
        dual, once = numbers["steer_parametric"][conflict], numbers["run_once_parametric"][conflict]
        assert rate(dual) >= rate(once) - 1.1 / N_FACTS


def test_gates_keep_conflicts_and_save_what_steering_would_break(
    measured: dict[str, Any],
) -> None:
    numbers = measured["forms"]["canonical"]
    for where in ("joined", "apart"):
        assert all(rate(numbers["gated_parametric"][where][c]) >= 0.85 for c in CONFLICTS)
    for conflict in CONFLICTS:
        believed = numbers["invented_subject"]
        assert rate(believed["apart"][conflict]) >= 0.85
        assert rate(believed["joined"][conflict]) > rate(believed["parametric"][conflict])
    assert all(rate(numbers["gated_context"]["context"][c]) >= 0.90 for c in CONFLICTS)
    assert rate(numbers["gated_context"]["parametric"]["clean"]) >= 0.95


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
