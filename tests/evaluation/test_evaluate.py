"""A whole evaluation: what it measures, that it resumes, what it refuses."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import juice
from juice.data.example import ConflictExample
from juice.data.judging import contains_answer
from juice.evaluation import path_patching, side_effects
from juice.evaluation.choices import Preparer
from juice.evaluation.controls import unknown_subjects
from juice.evaluation.methods import Treatment
from juice.evaluation.options import EvaluationOptions
from juice.evaluation.report import write_report
from juice.evaluation.report.sections import sections
from juice.evaluation.run import run as run_evaluation
from juice.evaluation.splits import Data, Splits, domain_of
from juice.identification import IdentificationOptions
from tests.support import oracle
from tests.support.commands import interruptible, invoke
from tests.support.marks import FEW_EXAMPLES

pytestmark = FEW_EXAMPLES


@pytest.fixture(scope="module")
def store(
    model: juice.SteeredModel, pool: list[ConflictExample], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    out = tmp_path_factory.mktemp("evaluation") / "out"
    options = EvaluationOptions(
        methods=("original", "prompt", "cad", "ph3_small", "juice"), limit=10, n_large=10
    )
    return run_evaluation(model, Data(pool), options, out, texts=["The capital of Peru is Lima."])


def test_every_answer_is_kept_with_its_verdict_and_the_table_follows_from_them(
    store: Any, model: juice.SteeredModel
) -> None:
    results = json.loads((store.folder / "results.json").read_text())
    assert results["is_complete"] is True
    test = [ConflictExample.model_validate(e) for e in results["data"]["test"]]
    assert len(test) == 10
    assert {domain_of(e) for e in test} == {"world_capital", "book_author"}
    for target, own in results["targets"].items():
        for name, method in own["methods"].items():
            for conflict_type, answers in method["answers"].items():
                assert len(answers) == 10
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
        for name in ("juice", "original")
    )
    assert steered["coherent"]["accuracy"] > plain["coherent"]["accuracy"] + 0.2


def test_the_answers_are_what_the_model_says_when_it_is_asked_alone(
    store: Any, model: juice.SteeredModel
) -> None:
    """Each method once more, by hand. Kills: a misplaced instruction, mixed-up rows or domains."""
    results = store.results
    test = [ConflictExample.model_validate(e) for e in results["data"]["test"]]
    e, i = test[7], 7
    prompt = e.prompts["coherent"]
    methods = results["targets"]["context"]["methods"]
    betas = methods["juice"]["choice"][domain_of(e)]
    steer = juice.Steer(
        target="context", beta_plus=betas["beta_plus"], beta_minus=betas["beta_minus"]
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
        model.loaded.model, list(model.tokenize(prompt)), list(model.tokenize(asked)), 1.0, 1
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


def test_an_evaluation_resumes_where_it_stopped_and_accepts_more_methods(
    store: Any, model: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    options = EvaluationOptions(
        methods=("original", "prompt", "cad", "ph3_small", "juice"), limit=10, n_large=10
    )
    again = run_evaluation(
        model, Data(pool), options, store.folder, texts=["The capital of Peru is Lima."]
    )
    assert again.n_computed == 0
    assert again.n_cached > 30
    assert again.results["targets"] == store.results["targets"]
    more = EvaluationOptions(
        methods=("original", "june"), targets=("parametric",), limit=10, n_large=10
    )
    added = run_evaluation(
        model, Data(pool), more, store.folder, texts=["The capital of Peru is Lima."]
    )
    assert added.n_computed == 5  # june: its betas, answers, collateral, continuations, perplexity
    assert "juice" in added.results["targets"]["parametric"]["methods"]


def test_a_folder_of_another_evaluation_is_refused_and_left_unchanged(
    store: Any, model: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    before = (store.folder / "results.json").read_bytes()
    texts = ["The capital of Peru is Lima."]
    with pytest.raises(
        juice.JuiceError, match="holds another evaluation: its seed is 0, this one's is 1"
    ):
        run_evaluation(
            model,
            Data(pool),
            EvaluationOptions(limit=10, n_large=10, seed=1),
            store.folder,
            texts=texts,
        )
    with pytest.raises(juice.JuiceError, match="holds another evaluation: its texts_sha256"):
        run_evaluation(
            model,
            Data(pool),
            EvaluationOptions(limit=10, n_large=10),
            store.folder,
            texts=["Another text."],
        )
    other = model.head_sets.get("context").model_copy(update={"beta": None})
    library = model.head_sets.by_name
    library["context"], own = other, library["context"]
    try:
        with pytest.raises(juice.JuiceError, match="another context head set"):
            run_evaluation(
                model,
                Data(pool),
                EvaluationOptions(limit=10, n_large=10),
                store.folder,
                texts=texts,
            )
    finally:
        library["context"] = own
    assert (store.folder / "results.json").read_bytes() == before


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


@pytest.mark.parametrize("kind", ["substitution only", "no clean", "mixed"])
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
        for i, e in enumerate(pool[:40])
    ]
    options = EvaluationOptions(limit=6, n_large=8, analyses=("reversals", "running_once"))
    store = run_evaluation(
        juice.load("mini", head_sets="head_sets"),
        Data(examples),
        options,
        tmp_path / "out",
        texts=["Lima."],
    )
    write_report(store.folder, sections(store.results))
    assert store.results["is_complete"]
    for own in store.results["targets"].values():
        assert own["methods"]["original"]["table"]["average"]
        assert "juice" in own["methods"]


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


def test_collateral_counts_right_answers_where_steering_is_not_needed(
    model: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    head_set = model.head_sets.get("parametric")
    steering = model.resolve(juice.Steer(target="parametric", head_set=head_set))
    examples = pool[4:10]
    measured = side_effects.collateral(
        model,
        examples,
        {domain_of(e): Treatment(target="parametric", steering=steering) for e in examples},
        3,
    )
    nobody = unknown_subjects(examples, 3)
    right = [
        contains_answer(
            model.generate(e.prompts["substitution"], steer="parametric", max_tokens=15)[0].text,
            e.context_answer,
        )
        for e in nobody
    ]
    assert measured["unknown_subject"]["substitution"]["accuracy"] == pytest.approx(
        sum(right) / len(right)
    )
    assert measured["clean"]["clean"]["n"] == 6


def test_perplexity_of_plain_text_is_that_of_the_steered_model(model: juice.SteeredModel) -> None:
    text = "The capital of Peru is Lima. The official language of Peru is Spanish."
    ids = list(model.tokenize(text))
    steer = juice.Steer(target="parametric", beta_minus=-2.0)
    treatment = Treatment(target="parametric", steering=model.resolve(steer))
    heads = {tuple(head): -2.0 for head in model.head_sets.get("parametric").heads.minus}
    logprobs = oracle.steered_logits(model.loaded.model, ids, heads).log_softmax(-1)
    expected = torch.exp(-logprobs[torch.arange(len(ids) - 1), ids[1:]].mean())
    assert side_effects.plain_text_perplexity(model, [text], {"a": treatment}) == pytest.approx(
        float(expected), rel=1e-4
    )
    assert side_effects.plain_text_perplexity(model, ["word " * 600], {"a": treatment}) is None


def test_a_domain_without_validation_examples_uses_those_of_all_domains(
    model: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    splits = Splits({"parametric": pool[:4]}, [], pool[64:70], [pool[10], pool[75]])
    own = Preparer(
        model=model, splits=splits, head_sets={"parametric": model.head_sets.get("parametric")}
    )
    choice = own.choose("june", "parametric")
    assert choice["book_author"]["tuned_on"] == "book_author"
    assert choice["world_capital"]["tuned_on"] == "all domains"
    none = Preparer(
        model=model,
        splits=Splits({"parametric": pool[:4]}, [], [], [pool[10]]),
        head_sets=own.head_sets,
    )
    untuned = none.choose("juice", "parametric")["world_capital"]
    assert (untuned["beta_minus"], untuned["tuned_on"], untuned["n_validation"]) == (-2.0, None, 0)


def test_a_model_without_consistent_heads_is_reported_with_the_reason(
    tmp_path: Path, pool: list[ConflictExample]
) -> None:
    model = juice.load("mini", head_sets=tmp_path)
    options = EvaluationOptions(
        targets=("parametric",),
        methods=("original", "juice"),
        limit=4,
        n_large=0,
        identification=IdentificationOptions(alphas_plus=(1e6,), alphas_minus=(-1e6,)),
    )
    store = run_evaluation(model, Data(pool), options, tmp_path / "out")
    assert list(store.results["targets"]["parametric"]["methods"]) == ["original"]
    assert any("no head raises" in note for note in store.results["notes"])
    assert any(
        "juice toward the parametric answer is left out" in note for note in store.results["notes"]
    )


def test_heads_are_found_where_no_set_is_served(
    tmp_path: Path, pool: list[ConflictExample]
) -> None:
    model = juice.load("mini", head_sets=tmp_path)
    options = EvaluationOptions(targets=("parametric",), methods=("juice",), limit=4, n_large=0)
    store = run_evaluation(model, Data(pool), options, tmp_path / "out")
    found = store.results["targets"]["parametric"]["head_set"]
    assert found["identification"]["n_examples"] == 4
    assert "juice" in store.results["targets"]["parametric"]["methods"]
    assert (
        run_evaluation(
            juice.load("mini", head_sets=tmp_path), Data(pool), options, tmp_path / "out"
        ).n_computed
        == 0
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--methods", "juise"), "juise"),
        (("--methods", ","), "is empty"),
        (("--analyses", "all,heads"), "'all'"),
        (("--head-set", "nobody"), "no head set 'nobody'"),
        (("--data", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("--text", "/nowhere.txt"), "/nowhere.txt"),
        (("--templates", "/nowhere.json"), "/nowhere.json"),
        (("--checkpoints", "/nowhere"), "no checkpoint"),
        (("--target", "context", "--head-set", "parametric"), "--target parametric"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_and_leaves_no_report(
    tmp_path: Path, arguments: tuple[str, ...], named: str
) -> None:
    code, output, error = invoke("evaluate", "--out", str(tmp_path / "out"), *arguments)
    assert code == 2, error
    assert named in error
    assert "Traceback" not in error + output
    assert not (tmp_path / "out" / "report.md").exists()


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    code, _, error = invoke("evaluate", "--out", str(tmp_path), "--limit", "2")
    assert code == 2
    assert "holds no results.json" in error
    (tmp_path / "results.json").write_text("{}")
    assert "not of the format" in invoke("evaluate", "--out", str(tmp_path), "--limit", "2")[2]


def test_an_interrupted_run_explains_how_to_resume_and_does(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("evaluate", "--out", str(out), "--limit", "6", "--methods", "original,prompt")
    process = interruptible(*arguments)
    deadline = time.monotonic() + 120
    while (
        not (out / "results.json").exists()
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 130, error
    assert "run the same command again" in error
    assert json.loads((out / "results.json").read_text())["is_complete"] is False
    code, output, error = invoke(*arguments)
    assert code == 0, error
    assert "were already in" in error
    assert "report.html" in output
    assert (out / "report.html").exists()


@pytest.mark.skipif(
    "JUICE_TEST_DATA" not in os.environ,
    reason="JUICE_TEST_DATA names no folder of third-party samples (paraconflict, memo_trap)",
)
@pytest.mark.parametrize(
    ("name", "target"), [("paraconflict", "parametric"), ("memo_trap", "context")]
)
# The data has duplicates, and rows that mini cannot score.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fifty_facts_of_the_papers_data_are_evaluated(
    tmp_path: Path, name: str, target: str
) -> None:
    """mini knows few of them: what matters is that all of it runs and that the report states it."""
    data = str(Path(os.environ["JUICE_TEST_DATA"]) / name)
    code, output, error = invoke(
        "evaluate",
        "--out",
        str(tmp_path),
        "--data",
        data,
        "--target",
        target,
        "--limit",
        "50",
        "--methods",
        "original,cad,juice",
    )
    assert code == 0, error + output
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["data"]["test"]) == 50
    assert results["data"]["left_out"]
    assert "juice" in results["targets"][target]["methods"]
    assert "left out: " in (tmp_path / "report.md").read_text()
