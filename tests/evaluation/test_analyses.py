"""One value of each analysis against a slow computation, with a forward for each prompt."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

import juice
from juice.data.example import ConflictExample
from juice.data.judging import contains_answer
from juice.errors import ExampleError
from juice.evaluation import analyses
from juice.evaluation.analyses import draws as seeds
from juice.evaluation.analyses import draws as stability
from juice.evaluation.analyses import robustness
from juice.evaluation.analyses.inputs import AnalysisInputs, pool_of, score_each, scores_of
from juice.evaluation.analyses.robustness import check_templates, paraphrased
from juice.evaluation.checkpoints import attention_mass, find_checkpoints, measure_checkpoints
from juice.evaluation.choices import Preparer
from juice.evaluation.report.findings import finding
from juice.evaluation.splits import Splits
from juice.formula import Target
from juice.head_set.schema import Betas
from juice.identification.find import Found, find
from juice.identification.options import IdentificationOptions
from juice.identification.probes import score_heads
from juice.identification.task import Unfinished
from tests.support import naive_scores, oracle
from tests.support.marks import FEW_EXAMPLES

# fp32 sums in another order.
TOLERANCE = 1e-4
N_TESTED = 3
TESTED = slice(14, 14 + N_TESTED)
ALPHAS_PLUS, ALPHAS_MINUS = (1.0, 3.0), (-2.0,)
MINI = Path("juice/models/mini")
TEMPLATES = {
    "world_capital": {
        "stems": ["The capital of {subject} is"],
        "paragraphs": ["{subject} chose {context_answer}."],
        "questions": ["Which?"],
    }
}


@pytest.fixture(scope="module")
def capitals() -> list[ConflictExample]:
    return [e for e in juice.read_examples("mini") if e.relation == "world_capital"][:24]


def context(
    model: juice.SteeredModel, capitals: list[ConflictExample], target: Target, **options: Any
) -> AnalysisInputs:
    splits = Splits({target: capitals[:4]}, capitals[4:5], capitals[8:14], capitals[TESTED])
    head_set = model.head_sets.get(target)
    # Three alphas instead of eight: probes take most of the time.
    how = IdentificationOptions(method="probe", alphas_plus=ALPHAS_PLUS, alphas_minus=ALPHAS_MINUS)
    head_sets = {"paper": {target: head_set}, "served": {target: head_set}}
    preparer = Preparer(model=model, splits=splits, head_sets=head_sets, options=how)
    return AnalysisInputs(**vars(preparer), target=target, **options)


def p_after(
    model: juice.SteeredModel, prompt: str, answer: str, heads: dict, method: str = "juice"
) -> float:
    """Return the probability of an answer's first token by the oracle's two uncached runs."""
    logits = oracle.steered_logits(
        model.loaded.model, list(model.tokenize(prompt)), heads, method=method
    )[-1]
    return float(logits.softmax(-1)[model.first_token(prompt, answer)])


def test_a_head_score_is_the_mean_change_over_examples_and_alphas(
    model: juice.SteeredModel, capitals: list[ConflictExample]
) -> None:
    result = analyses.run("heads", context(model, capitals, "parametric"))
    layer, head = result["chosen"]["minus"][0]
    j = result["conflict_types"].index("coherent")
    prompts = [e.prompts["coherent"] for e in capitals[:4]]
    tokens = [
        model.first_token(p, e.answer("parametric"))
        for p, e in zip(prompts, capitals, strict=False)
    ]
    assert result["alphas"] == [*ALPHAS_PLUS, *ALPHAS_MINUS]  # mini's sets are not from probes
    expected = naive_scores.mean_changes(
        model.loaded.model,
        [model.tokenize(p) for p in prompts],
        tokens,
        ALPHAS_MINUS,
        [(layer, head)],
    )
    assert result["minus"][j][layer][head] == pytest.approx(
        float(expected[layer, head]), abs=TOLERANCE
    )


def test_a_reversal_is_what_removing_the_head_does(
    model: juice.SteeredModel, capitals: list[ConflictExample]
) -> None:
    result = analyses.run("reversals", context(model, capitals, "parametric"))
    row = result["rows"][1]
    for conflict_type in ("substitution", "coherent"):
        for answer in ("context", "parametric"):
            changes = [
                p_after(
                    model,
                    e.prompts[conflict_type],
                    e.answer(answer),
                    {tuple(row["head"]): -1.0},
                    "june",
                )
                - p_after(model, e.prompts[conflict_type], e.answer(answer), {})
                for e in capitals[TESTED]
            ]
            expected = sum(changes) / N_TESTED
            assert row[conflict_type][answer] == pytest.approx(expected, abs=TOLERANCE)
    substitution = [r["substitution"]["context"] for r in result["rows"]]
    assert substitution == sorted(substitution, reverse=True)
    turned = [
        any(r["substitution"][a] * r["coherent"][a] < 0 for a in ("context", "parametric"))
        for r in result["rows"]
    ]
    assert [r["is_reversed"] for r in result["rows"]] == turned


def test_heads_are_removed_together_in_one_run_and_in_two(
    model: juice.SteeredModel, capitals: list[ConflictExample]
) -> None:
    result = analyses.run("running_once", context(model, capitals, "parametric"))["by_type"][
        "coherent"
    ]
    heads = {tuple(head): -1.0 for head in result["heads"][:3]}
    for method in ("juice", "june"):
        values = [
            p_after(model, e.prompts["coherent"], e.answer("parametric"), heads, method)
            for e in capitals[TESTED]
        ]
        assert result[method][2] == pytest.approx(sum(values) / N_TESTED, abs=TOLERANCE)
    assert result["june"] != result["juice"]
    # With one head both ways are the same.
    assert result["juice"][0] == pytest.approx(result["june"][0], abs=TOLERANCE)


def test_a_knocked_out_component_adds_nothing(
    model: juice.SteeredModel, capitals: list[ConflictExample]
) -> None:
    result = analyses.run("knock_outs", context(model, capitals, "parametric"))
    block = model.loaded.model.model.layers[2]
    for removed, modules in (
        ("mlp", [block.mlp.down_proj]),
        ("attention", [block.self_attn.o_proj]),
        ("both", [block.mlp.down_proj, block.self_attn.o_proj]),
    ):
        changes = []
        for e in capitals[TESTED]:
            before = p_after(model, e.prompts["substitution"], e.answer("parametric"), {})
            handles = [
                m.register_forward_hook(lambda _m, _a, out: torch.zeros_like(out)) for m in modules
            ]
            changes.append(
                p_after(model, e.prompts["substitution"], e.answer("parametric"), {}) - before
            )
            for handle in handles:
                handle.remove()
        removal = result["changes"]["substitution"][removed]
        assert removal["mean"][2] == pytest.approx(sum(changes) / N_TESTED, abs=TOLERANCE)
        assert removal["std"][2] == pytest.approx(
            float(torch.tensor(changes).std(correction=0)), abs=TOLERANCE
        )


@pytest.mark.long
def test_robustness_is_accuracy_with_other_heads_and_betas(
    model: juice.SteeredModel, capitals: list[ConflictExample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robustness, "SIZES", range(1, 6))
    monkeypatch.setattr(robustness, "TOP_KS", (1, 5))
    monkeypatch.setattr(robustness, "BETAS_PLUS", (0.0, 5.0))
    monkeypatch.setattr(robustness, "BETAS_MINUS", (0.0, -1.5, -5.0))
    inputs = context(model, capitals, "parametric")
    result = analyses.run("robustness", inputs)
    betas, minus = result["betas"], inputs.head_set.heads.minus
    i = betas["minus"].index(-1.5)

    def accuracy(**heads: Any) -> float:
        head_set = model.make_head_set(name="x", target="parametric", **heads)
        right = 0
        for e in capitals[TESTED]:
            for prompt in e.prompts.values():
                (done,) = model.generate(
                    prompt, steer="parametric", head_set=head_set, max_tokens=15
                )
                right += contains_answer(done.text, e.parametric_answer)
        return right / (3 * N_TESTED)

    assert betas["accuracy"][0][i] == pytest.approx(accuracy(minus=minus, beta_minus=-1.5))
    scores = score_heads(
        model,
        capitals[:4],
        targets={"parametric": ("clean", "substitution", "coherent")},
        alphas_plus=inputs.options.alphas_plus,
        alphas_minus=inputs.options.alphas_minus,
    )["parametric"]
    plus, strongest = juice.select_heads(scores.plus, scores.minus, top_k=1)
    tuned = inputs.head_set.betas()
    expected = accuracy(plus=plus, minus=strongest, beta_plus=tuned.plus, beta_minus=tuned.minus)
    assert {row["k"]: row["accuracy"] for row in result["heads"]}[1] == pytest.approx(expected)
    assert {row["n"] for row in result["examples"]} == {1, 2, 3, 4, 5}
    assert betas["accuracy"][0][0] == pytest.approx(result["unsteered"])
    assert len({accuracy for row in betas["accuracy"] for accuracy in row}) > 1


def test_the_scores_of_a_set_are_the_mean_of_its_examples_scores(
    model: juice.SteeredModel, capitals: list[ConflictExample]
) -> None:
    inputs = context(model, capitals, "parametric")
    pool = pool_of(inputs, 3)
    together = score_heads(
        model,
        pool,
        targets={"parametric": ("clean", "substitution", "coherent")},
        alphas_plus=ALPHAS_PLUS,
        alphas_minus=ALPHAS_MINUS,
    )["parametric"]
    apart = scores_of(score_each(inputs, pool))
    torch.testing.assert_close(apart.plus, together.plus, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(apart.minus, together.minus, rtol=0, atol=TOLERANCE)
    assert {e.subject for e in pool} & {e.subject for e in inputs.splits.test} == set()


def test_stability_is_the_mean_overlap_of_all_pairs(
    model: juice.SteeredModel, capitals: list[ConflictExample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stability, "N_POOL", 6)
    chosen: list[Any] = []
    select = stability.select_heads

    def spy(*args: Any, **options: Any) -> Any:
        chosen.append(select(*args, **options))
        return chosen[-1]

    monkeypatch.setattr(stability, "select_heads", spy)
    result = analyses.run("stability", context(model, capitals, "parametric"))
    first = [
        {*(("+", h) for h in plus), *(("-", h) for h in minus)}
        for plus, minus in chosen[: stability.N_DRAWS]
    ]
    overlaps = [len(a & b) / len(a | b) for a, b in combinations(first, 2) if a | b]
    assert result["sizes"]["1"]["overlap"]["both"] == pytest.approx(sum(overlaps) / len(overlaps))
    assert result["sizes"]["4"]["overlap"]["minus"] > result["sizes"]["4"]["by_chance"]
    top = result["sizes"]["1"]["frequency"][0]
    assert top["share"] == pytest.approx(
        sum((top["sign"], tuple(top["head"])) in heads for heads in first) / stability.N_DRAWS
    )


@FEW_EXAMPLES
@pytest.mark.long
def test_each_seed_finds_a_set_that_is_tested_on_the_same_facts(
    model: juice.SteeredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    capitals = [e for e in juice.read_examples("mini") if e.relation == "world_capital"][:44]
    found = []

    def watched(*arguments: Any, **options: Any) -> Any:
        made = find(*arguments, **options)
        found.append(made.head_sets)
        return made

    monkeypatch.setattr(seeds, "N_SEEDS", 2)
    monkeypatch.setattr(seeds, "find", watched)
    inputs = context(model, capitals, "context")
    inputs = replace(inputs, splits=replace(inputs.splits, large=capitals[20:]))
    result = analyses.run("seeds", inputs)
    assert [sets["context"].name for sets in found] == ["attribution-0", "attribution-1"]
    assert len({sets["context"].scores_sha256 for sets in found}) == 2
    expected = []
    for head_set in [None, *(sets["context"] for sets in found)]:
        steer = juice.Steer(target="context", head_set=head_set) if head_set else "none"
        right = [
            contains_answer(
                model.generate(e.prompts[t], steer=steer, max_tokens=15)[0].text, e.context_answer
            )
            for e in inputs.splits.test
            for t in ("substitution", "coherent")
        ]
        expected.append(sum(right) / len(right))
    way = result
    assert way["way"] == "attribution"
    assert [result["unsteered"], *(row["accuracy"] for row in way["seeds"])] == pytest.approx(
        expected
    )
    assert (way["mean"], way["worst"]) == pytest.approx((sum(expected[1:]) / 2, min(expected[1:])))
    low, high = way["interval"]
    assert low < way["mean"] <= high


def test_transfer_tests_the_heads_of_each_relation_on_all(
    model: juice.SteeredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_relation = {
        relation: [e for e in juice.read_examples("mini") if e.relation == relation][:15]
        for relation in ("world_capital", "book_author")
    }
    others, tested = [], []
    for facts in by_relation.values():
        others += facts[:12]
        tested += facts[12:]
    found = []

    def quickly(_model: Any, pool: list[ConflictExample], *_more: Any, **_options: Any) -> Any:
        """Return a head set that depends on the relation: finding one takes long."""
        betas = Betas(plus=0.5 + len(found), minus=-1.0 * len(found))
        made = model.head_sets.get("context").with_betas("juice", betas)
        found.append(({e.relation for e in pool}, made))
        return Found(head_sets={"context": made}, unreached={}, unfinished=Unfinished())

    monkeypatch.setattr(seeds, "find", quickly)
    inputs = context(model, others, "context")
    splits = replace(inputs.splits, large=others[4:], validation=[], test=tested)
    result = analyses.run("transfer", replace(inputs, splits=splits))
    names = sorted(by_relation)
    assert [relations for relations, _ in found] == [{name} for name in names]
    steers = ["none", *(juice.Steer(target="context", head_set=s) for _, s in found), "context"]
    right = {
        name: [
            [
                sum(
                    contains_answer(
                        model.generate(e.prompts[t], steer=steer, max_tokens=15)[0].text,
                        e.context_answer,
                    )
                    for t in ("substitution", "coherent")
                )
                / 2
                for e in by_relation[name][12:]
            ]
            for steer in steers
        ]
        for name in names
    }
    rows = [
        result["unsteered"],
        *(result["found_on"][name]["accuracy"] for name in names),
        result["served"],
    ]
    for row, i in zip(rows, range(len(steers)), strict=True):
        assert row == pytest.approx({name: fmean(right[name][i]) for name in names})
    author, capital = (right[name] for name in names)
    before = (fmean(author[0]) + fmean(capital[0])) / 2
    home = (fmean(author[1]) + fmean(capital[2])) / 2
    elsewhere = (fmean(author[2]) + fmean(capital[1])) / 2
    assert result["gain_at_home"] == pytest.approx(home - before)
    assert result["gain_elsewhere"] == pytest.approx(elsewhere - before)
    low, high = result["interval"]
    assert low <= home - elsewhere <= high
    assert result["n_examples"] == dict.fromkeys(names, 3)
    section = finding("transfer", "context", result)
    (table,) = section.tables
    assert [row[0] for row in table.rows] == [
        "none, unsteered",
        "book author",
        "world capital",
        "served head set",
    ]
    assert table.rows[1][1:] == [f"{100 * fmean(right[name][1]):.1f}" for name in names]
    assert f"gain {100 * (home - before):+.1f} points there" in section.text[1]
    for interval, told in (
        (
            (0.01, 0.2),
            "+1.0 to +20.0 (95 %), fact by fact. Find heads on examples of your own task",
        ),
        ((-0.03, 0.07), "These facts do not tell whether heads found elsewhere help less"),
        ((-0.2, -0.01), "Heads found elsewhere help more"),
    ):
        section = finding("transfer", "context", {**result, "interval": interval})
        assert section.text[1].endswith(f"{told}.")

    def knows_one(model: Any, pool: list[ConflictExample], *more: Any, **options: Any) -> Any:
        if pool[0].relation == "book_author":
            raise ExampleError("the model answers none of its clean prompts right")
        return quickly(model, pool, *more, **options)

    monkeypatch.setattr(seeds, "find", knows_one)
    result = analyses.run("transfer", replace(inputs, splits=splits))
    assert "answers none" in result["found_on"]["book_author"]["problem"]
    assert result["found_on"]["book_author"]["accuracy"] == result["unsteered"]
    assert "betas" in result["found_on"]["world_capital"]
    few = replace(splits, large=splits.large[:4])
    reason = analyses.run("transfer", replace(inputs, splits=few))["unavailable"]
    assert "expected at least 2" in reason


def test_paraphrased_prompts_are_other_words_for_the_same_fact(
    model: juice.SteeredModel, capitals: list[ConflictExample]
) -> None:
    result = analyses.run(
        "paraphrases", context(model, capitals, "parametric", templates=TEMPLATES)
    )
    right = 0
    for e in capitals[TESTED]:
        prompt = (
            f"{e.subject} chose {e.context_answer[0]}. Question: Which? Answer: The capital of"
            f" {e.subject} is"
        )
        right += contains_answer(model.generate(prompt, max_tokens=15)[0].text, e.parametric_answer)
    assert result["methods"]["original"]["average"]["coherent"]["accuracy"] == pytest.approx(
        right / N_TESTED
    )
    first = paraphrased(capitals[:1], TEMPLATES, seed=0)[0]
    stem = f"The capital of {first.subject} is"
    assert first.prompts["substitution"] == f"{stem} {first.context_answer[0]}. {stem}"
    assert "unavailable" in analyses.run(
        "paraphrases", context(model, capitals, "parametric", templates={})
    )


@pytest.mark.parametrize(
    ("templates", "named"),
    [
        ([], "expected an object"),
        ({"r": {}}, "r.stems"),
        ({"r": {**TEMPLATES["world_capital"], "stems": ["{object} is"]}}, "other fields"),
    ],
)
def test_templates_that_cannot_be_used_are_refused(templates: Any, named: str) -> None:
    with pytest.raises(juice.JuiceError, match=named):
        check_templates(templates, "templates.json")


def test_attention_mass_is_that_of_the_tokens_within_a_span() -> None:
    model = juice.load("mini", attn_implementation="eager")
    given, asked = (
        "The name of the capital city of Peru is Oslo.",
        " The name of the capital city of Peru is",
    )
    ids = torch.tensor([model.tokenize(given + asked)])
    with torch.no_grad():
        layers = model.loaded.model(ids, output_attentions=True).attentions
    n_given = len(model.tokenize(given))
    given_mass, begin_mass = (
        float(torch.stack([layer[0, :, -1, part].sum(-1).mean() for layer in layers]).mean())
        for part in (slice(1, n_given), slice(1))
    )
    context, rest = attention_mass(
        model.loaded, given + asked, [(0, len(given)), (len(given), len(given + asked))]
    )
    assert context == pytest.approx(given_mass, abs=1e-5)
    assert context + rest == pytest.approx(1.0 - begin_mass, abs=1e-5)


def test_checkpoints_are_measured_in_the_order_of_their_numbers_and_resumed(
    tmp_path: Path, capitals: list[ConflictExample]
) -> None:
    for step in (10, 9):
        (tmp_path / "series" / f"step-{step}").mkdir(parents=True)
        for file in MINI.iterdir():
            (tmp_path / "series" / f"step-{step}" / file.name).write_bytes(file.read_bytes())
    found = find_checkpoints([tmp_path / "series"])
    assert [path.name for path in found] == ["step-9", "step-10"]
    store = measure_checkpoints(found, capitals[:6], tmp_path / "out")
    first, second = store.results["checkpoints"]
    assert {**first, "name": ""} == {**second, "name": ""}
    model, reliance = juice.load("mini"), []
    for e in capitals[:6]:
        for conflict_type in ("substitution", "coherent"):
            given, known = (
                p_after(model, e.prompts[conflict_type], e.answer(t), {})
                for t in ("context", "parametric")
            )
            reliance.append(given / (given + known))
    assert first["context_reliance"] == pytest.approx(sum(reliance) / 12, abs=TOLERANCE)
    again = measure_checkpoints(found, capitals[:6], tmp_path / "out")
    assert (again.n_cached, again.n_computed) == (2, 0)
    with pytest.raises(juice.JuiceError, match="no checkpoint"):
        find_checkpoints([tmp_path])
