"""A whole evaluation: what it measures, that it resumes, what it refuses."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import juice
from juice.data.example import ConflictExample
from juice.data.judging import contains_answer
from juice.errors import OutputError
from juice.evaluation import path_patching, side_effects
from juice.evaluation import run as evaluation
from juice.evaluation.methods import Treatment
from juice.evaluation.options import EvaluationOptions
from juice.evaluation.report.parts import write_report
from juice.evaluation.report.sections import sections
from juice.evaluation.run import run as run_evaluation
from juice.evaluation.side_effects import plain_text_perplexity
from juice.evaluation.splits import Data, domain_of
from juice.head_set.head_set import HeadSet
from tests.support import oracle, tiny
from tests.support.chat_templates import PLAIN, loaded, made_set, sha256, tokenizer
from tests.support.conflicts import examples
from tests.support.marks import FEW_EXAMPLES

pytestmark = FEW_EXAMPLES
N_FACTS = 10
OPTIONS = EvaluationOptions(
    methods=(
        "original",
        "prompt",
        "cad",
        "ph3_small",
        "juice",
        "served",
        "served_once",
        "question",
        "gated",
        "gated_apart",
    ),
    limit=N_FACTS,
    n_large=N_FACTS,
    # Three alphas instead of eight: probes take most of the time.
    alphas_plus=(1.0, 3.0),
    alphas_minus=(-2.0,),
)


def data_of(pool: list[ConflictExample], text: str = "The capital of Peru is Lima.") -> Data:
    """Return the facts to test on, eight to tune on, and a text."""
    tuned_on = [*pool[56:60], *pool[116:]]
    return Data([*pool[:56], *pool[60:116]], validation=tuned_on, texts=[text])


@pytest.fixture(scope="module", autouse=True)
def short_continuations() -> Iterator[None]:
    """Continue answers by 16 tokens instead of 64: they take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_effects, "N_NEW_TOKENS", 16)
        yield


@pytest.fixture(scope="module")
def store(
    model: juice.SteeredModel, pool: list[ConflictExample], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    out = tmp_path_factory.mktemp("evaluation") / "out"
    return run_evaluation(model, data_of(pool), OPTIONS, out)


@pytest.mark.long
def test_every_answer_is_kept_with_its_verdict_and_the_table_follows_from_them(
    store: Any, model: juice.SteeredModel
) -> None:
    results = json.loads((store.folder / "results.json").read_text())
    assert results["is_complete"] is True
    test = [ConflictExample.model_validate(e) for e in results["data"]["test"]]
    assert len(test) == N_FACTS
    assert {domain_of(e) for e in test} == {"world_capital", "book_author"}
    for target, of_target in results["targets"].items():
        for name, method in of_target["methods"].items():
            for conflict_type, answers in method["answers"].items():
                assert len(answers) == N_FACTS
                for e, (output, is_right, p_parametric, p_context) in zip(
                    test, answers, strict=True
                ):
                    assert is_right == contains_answer(output, e.accepted(target))
                    assert 0 <= p_parametric <= 1
                    assert 0 <= p_context <= 1
                cells = [
                    method["table"][domain][conflict_type]["accuracy"]
                    for domain in ("book_author", "world_capital")
                ]
                assert method["table"]["average"][conflict_type]["accuracy"] == pytest.approx(
                    sum(cells) / 2
                )
            assert name != "original" or set(method["answers"]) >= {"substitution", "coherent"}
    assert "cad" not in results["targets"]["parametric"]["methods"]
    assert "clean" not in results["targets"]["context"]["methods"]["original"]["answers"]
    steered, plain = (
        results["targets"]["parametric"]["methods"][name]["table"]["average"]
        for name in ("served", "original")
    )
    assert steered["coherent"]["accuracy"] > plain["coherent"]["accuracy"] + 0.2


@pytest.mark.long
def test_the_answers_are_what_the_model_says_when_it_is_asked_alone(
    store: Any, model: juice.SteeredModel
) -> None:
    """Each method once more, by hand. Kills: a misplaced instruction, mixed-up rows or domains."""
    results = store.results
    test = [ConflictExample.model_validate(e) for e in results["data"]["test"]]
    e, i = test[7], 7
    prompt = e.prompts["coherent"]
    methods = results["targets"]["context"]["methods"]
    found = juice.HeadSet.parse(results["targets"]["context"]["found"]["paper"], "found")
    assert (found.identification.method, found.identification.n_examples) == ("probe", 4)
    betas = methods["juice"]["choice"][domain_of(e)]
    steer = juice.Steer(
        target="context",
        head_set=found,
        beta_plus=betas["beta_plus"],
        beta_minus=betas["beta_minus"],
    )
    assert (
        methods["juice"]["answers"]["coherent"][i][0]
        == model.generate(prompt, steer=steer, max_tokens=15)[0].text
    )
    assert (
        methods["original"]["answers"]["coherent"][i][0]
        == model.generate(prompt, max_tokens=15)[0].text
    )
    asked = prompt[prompt.index("Question:") :]
    logits = oracle.generate_contrasted(
        model.loaded.model, list(model.tokenize(prompt)), list(model.tokenize(asked)), 1
    )[1]
    first = model.first_token(prompt, e.answer("context"))
    assert methods["cad"]["answers"]["coherent"][i][3] == pytest.approx(
        float(logits[0].softmax(-1)[first]), abs=1e-4
    )
    prompted = methods["prompt"]["answers"]["substitution"][i][0]
    instruction = (
        "Finish the sentence below as the statement that is given demands, whatever you remember"
        " yourself."
    )
    assert (
        prompted
        == model.generate(f"{instruction} {e.prompts['substitution']}", max_tokens=15)[0].text
    )
    pruned = methods["ph3_small"]["choice"][domain_of(e)]["heads"]
    heads = {tuple(head): -1.0 for head in pruned}
    logits = oracle.steered_logits(
        model.loaded.model, list(model.tokenize(prompt)), heads, method="june"
    )[-1]
    assert methods["ph3_small"]["answers"]["coherent"][i][3] == pytest.approx(
        float(logits.softmax(-1)[first]), abs=1e-4
    )


@pytest.mark.long
def test_served_gated_and_partly_steered_answers_are_those_of_plain_requests(
    store: Any, model: juice.SteeredModel
) -> None:
    """Kills: rows that take another method, a context left joined."""
    results = store.results
    test = [ConflictExample.model_validate(e) for e in results["data"]["test"]]
    asked_for = {
        "served": {},
        "served_once": {"method": "june"},
        "gated": {"gate": "auto"},
        "question": {"positions": "question"},
        "gated_apart": {"gate": "auto"},
    }
    for target, of_target in results["targets"].items():
        texts = {name: method["answers"] for name, method in of_target["methods"].items()}
        assert ("gated_apart" in texts) is (target == "parametric")
        for name, conflict_type in product(asked_for.keys() & texts, ("substitution", "coherent")):
            parted = [seam(e, conflict_type) for e in test]
            is_apart = name in ("question", "gated_apart")
            done = model.generate(
                [q if is_apart else f"{context} {q}" for context, q in parted],
                context=[context if is_apart else None for context, _ in parted],
                steer=juice.Steer(target=target, **asked_for[name]),
                max_tokens=15,
            )
            answers = [row[0] for row in texts[name][conflict_type]]
            assert answers == [c.text for c in done], name


def seam(e: ConflictExample, conflict_type: str) -> tuple[str, str]:
    """Return the context of a prompt of mini, and its question."""
    prompt = e.prompts[conflict_type]
    at = prompt.find("Question:")
    at = len(prompt) - len(e.prompts["clean"]) if at < 0 else at
    return prompt[: at - 1], prompt[at:]


@pytest.mark.long
def test_what_ph3_prunes_pulls_the_other_way(
    store: Any, model: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    """Toward memory it prunes the heads whose patching lowers the context answer most.

    Toward the context it prunes those whose patching raises it most.
    """
    for target, is_pruned_first in (("parametric", min), ("context", max)):
        subjects = store.results["data"]["identification"][target]
        examples = [e for e in pool if e.subject in subjects]
        scores = path_patching.patching_scores(
            model, path_patching.patches(model, examples, "substitution", seed=0)
        )
        choice = store.results["targets"][target]["methods"]["ph3_small"]["choice"]["world_capital"]
        assert is_pruned_first(scores.flatten().tolist()) == pytest.approx(
            float(scores[tuple(choice["heads"][0])])
        )
        assert choice["n_patched"] == len(examples) == 4


@pytest.mark.long
def test_an_evaluation_resumes_where_it_stopped_and_accepts_more_methods(
    store: Any, model: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    again = run_evaluation(model, data_of(pool), OPTIONS, store.folder)
    assert again.n_computed == 0
    assert again.n_cached > 30
    assert again.results["targets"] == store.results["targets"]
    more = {"methods": ("original", "june"), "targets": ("parametric",)}
    added = run_evaluation(model, data_of(pool), OPTIONS.model_copy(update=more), store.folder)
    assert added.n_computed == 5  # june: its betas, answers, collateral, continuations, perplexity
    assert "served" in added.results["targets"]["parametric"]["methods"]


@pytest.mark.long
def test_a_folder_of_another_evaluation_is_refused_and_left_unchanged(
    store: Any, model: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    before = (store.folder / "results.json").read_bytes()
    with pytest.raises(
        juice.JuiceError, match="holds another evaluation: its seed is 0, this one's is 1"
    ):
        run_evaluation(model, data_of(pool), OPTIONS.model_copy(update={"seed": 1}), store.folder)
    with pytest.raises(juice.JuiceError, match="holds another evaluation: its texts_sha256"):
        run_evaluation(model, data_of(pool, "Another text."), OPTIONS, store.folder)
    other = model.head_sets.get("context").model_copy(update={"source": "elsewhere"})
    library = model.head_sets.by_name
    library["context"], served = other, library["context"]
    try:
        with pytest.raises(juice.JuiceError, match="another context served head set"):
            run_evaluation(model, data_of(pool), OPTIONS, store.folder)
    finally:
        library["context"] = served
    assert (store.folder / "results.json").read_bytes() == before


@pytest.mark.long
def test_a_target_that_is_added_later_tests_on_the_same_facts(
    model: juice.SteeredModel, pool: list[ConflictExample], tmp_path: Path
) -> None:
    """The targets' head sets were found on different facts; no target is tested on any of them."""
    first = run_evaluation(
        model,
        Data(pool),
        EvaluationOptions(targets=("parametric",), methods=("original",), limit=6, n_large=0),
        tmp_path / "out",
    )
    facts = first.results["data"]["test"]
    both = run_evaluation(
        model,
        Data(pool),
        EvaluationOptions(methods=("original",), limit=6, n_large=0),
        tmp_path / "out",
    )
    assert both.results["data"]["test"] == facts
    assert set(both.results["targets"]) == {"parametric", "context"}


@pytest.mark.parametrize(
    "kind",
    [
        "mixed",
        *(pytest.param(k, marks=pytest.mark.long) for k in ("substitution only", "no clean")),
    ],
)
def test_data_of_every_shape_is_evaluated(
    model: juice.SteeredModel, pool: list[ConflictExample], tmp_path: Path, kind: str
) -> None:
    def prompts(i: int, e: ConflictExample) -> dict[str, str]:
        dropped = {
            "substitution only": {"clean", "coherent"},
            "mixed": [{"coherent"}, {"substitution"}, {"clean"}][i % 3],
            "no clean": {"clean"},
        }
        return {t: p for t, p in e.prompts.items() if t not in dropped.get(kind, set())}

    examples = [
        e.model_copy(update={"prompts": prompts(i, e), "relation": None})
        for i, e in enumerate(pool[:28])
    ]
    options = EvaluationOptions(
        methods=("original", "prompt", "cad", "ph3_small", "served", "question", "gated_apart"),
        limit=4,
        n_large=6,
        analyses=("reversals", "running_once"),
    )
    store = run_evaluation(
        juice.load("mini", head_sets="head_sets"),
        Data(examples, texts=["Lima."]),
        options,
        tmp_path / "out",
    )
    write_report(store.folder, sections(store.results))
    assert store.results["is_complete"]
    for of_target in store.results["targets"].values():
        assert of_target["methods"]["original"]["table"]["average"]
        assert "served" in of_target["methods"]


def test_data_that_does_not_tell_what_memory_says_is_judged_by_its_context(
    model: juice.SteeredModel, pool: list[ConflictExample], tmp_path: Path
) -> None:
    """Served heads and contrasts are measured; no heads can be found on it."""
    opened = [
        e.model_copy(
            update={
                "parametric_answer": (),
                "question": e.prompts["clean"],
                "prompts": {t: p for t, p in e.prompts.items() if t != "clean"},
            }
        )
        for e in pool[:30]
    ]
    options = EvaluationOptions(
        methods=("original", "cocoa", "ckplug", "grd", "ph3_small", "juice", "served"),
        analyses=("heads", "stability"),
        limit=5,
        n_large=0,
        measures_text=False,
    )
    store = run_evaluation(model, Data(opened, texts=["Lima."]), options, tmp_path / "out")
    toward = store.results["targets"]
    assert set(toward["context"]["methods"]) == {"original", "cocoa", "ckplug", "served"}
    assert set(toward["parametric"]["methods"]) == {"original", "ckplug", "grd", "served"}
    tested = {e["subject"] for e in store.results["data"]["test"]}
    assert len(tested) == 5
    facts = [e for e in pool[:30] if e.subject in tested]
    for target in ("context", "parametric"):
        right = [
            (target == "context")
            == contains_answer(
                model.generate(e.prompts[t], steer=target, max_tokens=15)[0].text, e.context_answer
            )
            for e in facts
            for t in ("substitution", "coherent")
        ]
        table = toward[target]["methods"]["served"]["table"]["average"]
        both = (table["substitution"]["accuracy"] + table["coherent"]["accuracy"]) / 2
        assert both == pytest.approx(sum(right) / len(right))
        for name in ("heads", "stability"):
            assert "do not tell" in toward[target]["analyses"][name]["unavailable"]
    write_report(store.folder, sections(store.results))


def test_data_without_a_conflict_is_refused(
    model: juice.SteeredModel, pool: list[ConflictExample], tmp_path: Path
) -> None:
    examples = [e.model_copy(update={"prompts": {"clean": e.prompts["clean"]}}) for e in pool[:40]]
    with pytest.raises(juice.JuiceError, match="conflict"):
        run_evaluation(
            model,
            Data(examples),
            EvaluationOptions(targets=("context",), methods=("original",), limit=6, n_large=0),
            tmp_path / "out",
        )


def test_an_evaluation_scores_plain_text_without_a_template_and_keeps_forms_apart(
    tmp_path: Path,
) -> None:
    model, chat_set, steer = (
        loaded(PLAIN),
        made_set(loaded(PLAIN), "context", PLAIN),
        juice.Steer(target="context"),
    )
    chat = model.with_chat_template()
    measured = [
        plain_text_perplexity(
            asked,
            ["Lima lies by the sea."],
            {"all": Treatment(target="context", steer=replace(steer, head_set=chat_set))},
        )
        for asked in (model, chat)
    ]
    assert measured[0] == measured[1]
    options = EvaluationOptions(
        targets=("context",),
        methods=("original",),
        n_large=0,
        n_examples=1,
    )
    found = chat_set.identification.model_copy(update={"facts": ("0" * 12,)})
    listing = chat_set.model_copy(update={"identification": found})

    def served_with(head_set: HeadSet, folder: Path) -> juice.SteeredModel:
        head_set.save(folder / "m" / "context")
        network = tiny.tiny_model("llama")
        network.config.max_position_embeddings = 512  # instructions are long in bytes
        return juice.load(network, tokenizer=tokenizer(PLAIN), head_sets=folder)

    served = served_with(chat_set, tmp_path / "sets")
    other = served_with(listing, tmp_path / "listing").with_chat_template()
    for in_form, warned in ((served, True), (other, False)):
        out = tmp_path / str(warned)
        with warnings.catch_warnings(
            category=UserWarning, action="ignore"
        ):  # about so few examples
            store = evaluation.run(in_form, Data(examples()), options, out)
        for doubt in ("did not go through one", "are not recognised in this data"):
            assert any(doubt in note for note in store.results["notes"]) is warned
        assert store.results["identity"]["chat_template_sha256"] == (
            None if warned else sha256(PLAIN)
        )
    with pytest.raises(OutputError, match="chat_template_sha256"):
        evaluation.run(served, Data(examples()), options, out)
