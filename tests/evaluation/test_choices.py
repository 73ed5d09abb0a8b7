"""What a method needs before it is tried, its betas and heads, and what happens without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import juice
from juice.data.example import ConflictExample
from juice.evaluation import head_sets
from juice.evaluation.choices import MethodUnavailableError, Preparer
from juice.evaluation.head_sets import finders
from juice.evaluation.options import EvaluationOptions
from juice.evaluation.run import run as run_evaluation
from juice.evaluation.splits import Data, Splits
from juice.identification.find import find
from juice.identification.options import IdentificationOptions
from tests.support.marks import FEW_EXAMPLES

pytestmark = FEW_EXAMPLES


def test_a_domain_without_validation_examples_uses_those_of_all_domains(
    model: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    splits = Splits({"parametric": pool[:4]}, [], pool[64:70], [pool[10], pool[75]])
    head_set = model.head_sets.get("parametric")
    how = IdentificationOptions(method="probe")
    preparer = Preparer(
        model=model, splits=splits, head_sets={"paper": {"parametric": head_set}}, options=how
    )
    choice = preparer.choose("june", "parametric")
    assert choice["book_author"]["tuned_on"] == "book_author"
    assert choice["world_capital"]["tuned_on"] == "all domains"
    none = Preparer(
        model=model,
        splits=Splits({"parametric": pool[:4]}, [], [], [pool[10]]),
        head_sets=preparer.head_sets,
        options=how,
    )
    untuned = none.choose("juice", "parametric")["world_capital"]
    assert (untuned["tuned_on"], untuned["n_validation"]) == (None, 0)
    betas = head_set.betas("juice")
    assert (untuned["beta_plus"], untuned["beta_minus"]) == (betas.plus, betas.minus)


@pytest.mark.long
def test_a_model_without_consistent_heads_is_reported_with_the_reason(
    tmp_path: Path, pool: list[ConflictExample]
) -> None:
    model = juice.load("mini", head_sets=tmp_path)
    options = EvaluationOptions(
        targets=("parametric",),
        methods=("original", "juice"),
        limit=4,
        n_large=0,
        alphas_plus=(1e6,),
        alphas_minus=(-1e6,),
    )
    store = run_evaluation(model, Data(pool), options, tmp_path / "out")
    assert list(store.results["targets"]["parametric"]["methods"]) == ["original"]
    assert any("no head raises" in note for note in store.results["notes"])
    assert any(
        "juice toward the parametric answer is left out" in note for note in store.results["notes"]
    )


@pytest.mark.long
def test_heads_are_found_where_no_set_is_served_on_facts_that_are_not_tested(
    tmp_path: Path, pool: list[ConflictExample], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[ConflictExample] = []

    def watched(model: Any, examples: Any, options: Any, *, validation: Any, **more: Any) -> Any:
        used.extend([*examples, *validation])
        return find(model, examples, options, validation=validation, **more)

    monkeypatch.setattr(head_sets, "find", watched)
    model = juice.load("mini", head_sets=tmp_path)
    methods = ("served", "served_once", "learned", "gated", "gated_apart")
    options = EvaluationOptions(targets=("parametric",), methods=methods, limit=8)
    data = Data([*pool[:18], *pool[60:76]])
    store = run_evaluation(model, data, options, tmp_path / "out")
    results = store.results["targets"]["parametric"]
    found = results["head_sets"]["served"]["identification"]
    assert (found["method"], found["n_examples"]) == ("attribution", 7)
    learned = results["head_sets"]["learned"]
    assert learned["identification"]["method"] == "learned"
    assert isinstance(learned["methods"]["juice"]["betas"]["plus"], list)
    assert set(results["methods"]) == {"served", "served_once", "learned", "gated", "gated_apart"}
    right = {name: method["table"]["average"] for name, method in results["methods"].items()}
    assert all(right[name]["coherent"]["accuracy"] > 0.8 for name in ("served", "learned"))
    tested = {(e["relation"], e["subject"]) for e in store.results["data"]["test"]}
    assert len(used) > 2 * 10
    assert not tested & {(e.relation, e.subject) for e in used}
    again = juice.load("mini", head_sets=tmp_path)
    assert run_evaluation(again, data, options, tmp_path / "out").n_computed == 0


def test_a_gate_of_another_form_of_prompt_is_left_out_with_the_reason(
    model: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    served = {"served": {"parametric": model.head_sets.get("parametric")}}
    preparer = Preparer(
        model=model.with_chat_template(),
        splits=Splits({"parametric": pool[:4]}, [], [], pool[10:12]),
        head_sets=served,
        options=IdentificationOptions(method="probe"),
    )
    for name in ("gated", "gated_apart"):
        with pytest.raises(MethodUnavailableError, match="another form"):
            preparer.choose(name, "parametric")
    assert preparer.choose("served", "parametric")


def test_heads_of_one_relation_are_found_on_its_examples_alone(
    model: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    """The served set's own examples hold few of the relation; the large set has more."""
    splits = Splits(
        {"parametric": [*pool[:2], *pool[60:74]]}, [*pool[20:30], *pool[80:90]], [], pool[40:42]
    )
    how = IdentificationOptions(method="probe", relation="world_capital")
    found = finders(model, splits, "parametric", how)
    assert len(found) == 4
    assert {e.relation for e in found} == {"world_capital"}
    nothing = IdentificationOptions(method="probe", relation="official_language")
    preparer = Preparer(model=model, splits=splits, head_sets={}, options=nothing)
    with pytest.raises(MethodUnavailableError, match="official_language"):
        preparer.choose("ph3_small", "parametric")


def test_gates_and_positions_reach_the_requests(
    model: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    """Kills: a gate that is asked for and dropped, a context that is not given apart."""
    served = {"served": {"parametric": model.head_sets.get("parametric")}}
    preparer = Preparer(
        model=model,
        splits=Splits({"parametric": pool[:4]}, [], [], pool[10:12]),
        head_sets=served,
        options=IdentificationOptions(method="probe"),
    )
    e, requests = pool[10], {}
    for name in ("served", "gated", "gated_apart", "question"):
        choices = preparer.choose(name, "parametric")
        made = preparer.treatments(name, "parametric", choices)["world_capital"]
        requests[name] = made.request(model, e, "coherent", max_tokens=1)
    gates = {name: request.gate for name, request in requests.items()}
    assert gates["served"] is gates["question"] is None
    assert (gates["gated"].signal, gates["gated_apart"].signal) == ("steered", "memory")
    asked = e.prompts["coherent"][e.prompts["coherent"].rindex("Question:") :]
    assert gates["gated_apart"].without_context == model.tokenize(asked)
    first = requests["question"].steering.first_position
    rest = model.description.tokenizer.decode(requests["question"].prompt_ids[first:])
    assert rest.strip() == asked
    assert requests["served"].steering.first_position == 0
