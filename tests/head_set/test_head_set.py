"""Head sets on disk: what is written is read again, what is damaged is refused with its reason."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import juice
from juice.errors import HeadSetError, OutputError, RequestError
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Point, Validation
from tests.support.head_sets import (
    BETAS,
    HEADS,
    MEASURED,
    MODEL,
    content,
    methods,
    names_in,
    scored,
    scores_in,
    sealed,
    second_format,
    write,
)


def test_a_saved_set_loads_as_it_was(tmp_path: Path) -> None:
    head_set = scored()
    head_set.save(tmp_path / "new" / "parents" / "context")
    loaded = HeadSet.load(tmp_path / "new" / "parents" / "context")
    assert loaded.model_dump() == head_set.model_dump()
    assert torch.equal(loaded.scores.plus, head_set.scores.plus)
    assert torch.equal(loaded.scores.minus, head_set.scores.minus)
    assert loaded.heads.plus[0] == juice.Head(1, 2)
    assert str(loaded.heads.minus[0]) == "L0H3"


def test_the_file_is_the_documented_format(tmp_path: Path) -> None:
    scored().save(tmp_path / "context")
    written = json.loads((tmp_path / "context" / "head_set.json").read_text())
    assert written == json.loads(sealed(content(scores_sha256=scored().scores_sha256)))
    digits = scored().scores_sha256.removeprefix("sha256:")[:12]
    assert names_in(tmp_path / "context") == ["head_set.json", f"scores-{digits}.safetensors"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "other"),
        ("methods", methods(juice={"plus": 3.0, "minus": -1.0})),
        ("methods", {"juice": {"heads": {"plus": [[1, 3]], "minus": []}}}),
        ("method", "june"),
        ("scores_sha256", None),
        ("metrics", {"note": 1}),
        ("sha256", None),
    ],
)
def test_a_sealed_set_that_was_changed_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    scored().save(tmp_path / "context")
    file = tmp_path / "context" / "head_set.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(written.items())), indent=4))
    assert HeadSet.load(tmp_path / "context").model_dump() == scored().model_dump()
    file.write_text(json.dumps({**written, field: value}))
    with pytest.raises(HeadSetError, match="it was changed or damaged"):
        HeadSet.load(tmp_path / "context")


@pytest.mark.parametrize("file", sorted(Path("head_sets").glob("*/*/head_set.json")), ids=str)
def test_a_shipped_set_has_the_seal_of_its_file(file: Path) -> None:
    """Kills: a new field that changes the hash of sets without it."""
    assert HeadSet.load(file.parent).seal == json.loads(file.read_text())["sha256"]


def test_a_set_of_the_second_format_has_two_methods_that_share_its_heads(tmp_path: Path) -> None:
    """Its scores have no hash in their name; saved again it is of this format, and they have."""
    scores, folder = scored().scores, tmp_path / "context"
    rule = {"signal": "steered", "threshold": 0.4, "n_prompts": 8, "kept": 1.0, "side_effects": {}}
    gate = {"chat_template_sha256": None, "rules": [rule]}
    second = second_format(
        beta={"juice": BETAS, "june": {"plus": 0.0, "minus": -0.5}},
        gates={"juice": None, "june": gate},
        scores_sha256=scores.sha256(),
    )
    (write(folder, sealed(second)) / "scores.safetensors").write_bytes(scores.to_bytes())
    found = HeadSet.load(folder)
    assert (found.format, found.method) == ("juice.head_set/3", "juice")
    assert found.intervention("juice").heads == found.intervention("june").heads == found.heads
    assert found.heads.model_dump(mode="json") == HEADS
    assert (found.betas("juice").plus, found.betas("june").minus) == (2.0, -0.5)
    assert (found.gate(), found.gate("june").rules[0].threshold) == (None, 0.4)
    assert torch.equal(found.scores.plus, scores.plus)
    found.save(folder, overwrite=True)
    assert HeadSet.load(folder).model_dump() == found.model_dump()
    assert scores_in(folder).name != "scores.safetensors"
    file = folder / "head_set.json"
    file.write_text(sealed(second).replace("0.5", "0.6"))
    with pytest.raises(HeadSetError, match="it was changed or damaged"):
        HeadSet.load(folder)


def test_the_first_format_is_still_read_and_saved_as_the_third(tmp_path: Path) -> None:
    found = {
        "alphas_plus": [1.0],
        "alphas_minus": [-1.0],
        "n_examples": 4,
        "seed": 0,
        "examples_sha256": "a",
        "conflict_types": ["substitution"],
        "top_k": 5,
        "chat_template_sha256": None,
        "versions": {},
    }
    first = second_format(format="juice.head_set/1", identification=found)
    del first["gates"]
    with pytest.warns(UserWarning, match="cannot be seen"):
        old = HeadSet.load(write(tmp_path / "old", json.dumps(first)))
    assert (old.format, old.identification.method) == ("juice.head_set/3", "probe")
    old.save(tmp_path / "new")
    assert HeadSet.load(tmp_path / "new") == old


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"beta": {"cad": BETAS}}, "beta is .*expected an object with juice and june"),
        ({"gates": [1]}, "gates is"),
        ({"heads": None}, "methods.juice.heads"),
        ({"methods": methods()}, "methods is given, but the format is 'juice.head_set/2'"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_content_of_the_second_format_that_is_wrong_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(HeadSetError, match=named):
        HeadSet.load(write(tmp_path / "set", sealed(second_format(**changes))))


def test_each_method_has_heads_betas_and_a_gate_of_its_own(tmp_path: Path) -> None:
    """Kills: the heads of one method with the betas of the other."""
    dual = {"heads": HEADS, "betas": BETAS}
    single = {"heads": {"plus": [], "minus": [[2, 3]]}, "betas": {"plus": [], "minus": [-0.5]}}
    head_set = HeadSet.parse(content(method="june", methods={"juice": dual, "june": single}), "x")
    head_set.save(tmp_path / "own")
    head_set = HeadSet.load(tmp_path / "own")
    assert head_set.method == "june"
    assert head_set.heads.minus == (juice.Head(2, 3),)
    assert [str(head) for head in head_set.all_heads] == ["L0H3", "L1H2", "L2H0", "L2H3"]
    assert head_set.betas() == head_set.betas("june") != head_set.betas("juice")
    assert {layer: values.tolist() for layer, values in head_set.coefficients().items()} == {
        2: [0.0, 0.0, 0.0, -0.5]
    }
    assert {layer: values.tolist() for layer, values in head_set.coefficients("juice").items()} == {
        0: [0.0, 0.0, 0.0, -1.0],
        1: [0.0, 0.0, 2.0, 0.0],
        2: [-1.0, 0.0, 0.0, 0.0],
    }


def test_a_method_that_a_set_does_not_have_is_refused(tmp_path: Path) -> None:
    only = HeadSet.parse(content(methods={"juice": {"heads": HEADS, "betas": BETAS}}), "x")
    assert (only.betas("june"), only.gate("june"), only.layers) == (None, None, [0, 1, 2])
    with pytest.raises(RequestError, match="has no heads for method 'june'; it has juice") as error:
        only.coefficients("june")
    assert error.value.param == "steer.method"
    with pytest.raises(HeadSetError, match=r"but methods\.june is not given"):
        HeadSet.parse(content(method="june", methods={"juice": {"heads": HEADS}}), "x")
    with pytest.raises(HeadSetError, match="methods"):
        HeadSet.parse(content(methods={}), "x")


def test_the_file_that_the_weights_came_from_is_kept(tmp_path: Path) -> None:
    weights = {"sha256": "sha256:" + "c" * 64, "quantisation": "Q4_K_M", "fingerprint": "sha256:d"}
    head_set = HeadSet.parse(content(model={**MODEL.model_dump(), "weights": weights}), "x")
    head_set.save(tmp_path / "own")
    assert HeadSet.load(tmp_path / "own").model.weights.model_dump() == weights
    bad = {**weights, "sha256": "md5:1"}
    with pytest.raises(HeadSetError, match=r"model\.weights\.sha256"):
        HeadSet.parse(content(model={**MODEL.model_dump(), "weights": bad}), "x")


def test_nothing_is_overwritten_unless_asked_and_then_in_one_step(tmp_path: Path) -> None:
    folder = tmp_path / "context"
    scored().save(folder)
    with pytest.raises(OutputError, match="--force"):
        scored().save(folder)
    changed = scored().model_copy(
        update={"source": "elsewhere", "scores": None, "scores_sha256": None}
    )
    changed.save(folder, overwrite=True)
    assert HeadSet.load(folder).source == "elsewhere"
    assert names_in(tmp_path) == ["context"]
    assert names_in(folder) == ["head_set.json"]


def test_other_files_of_a_folder_stay_where_a_set_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "context"
    scored().save(folder)
    (folder / "NOTES.md").write_text("ours")
    (folder / "scores-000000000000.safetensors").write_bytes(b"of another saver")
    scored().model_copy(update={"scores": None, "scores_sha256": None}).save(folder, overwrite=True)
    assert names_in(folder) == ["NOTES.md", "head_set.json", "scores-000000000000.safetensors"]


def test_a_folder_in_which_a_save_was_cut_off_is_free(tmp_path: Path) -> None:
    """Kills: a set that can never be saved again, not even with --force."""
    folder = tmp_path / "context"
    scored().save(folder)
    (folder / "head_set.json").rename(folder / ".head_set.json.k2j4")
    scored().save(folder)
    assert HeadSet.load(folder).name == "context"


def test_a_reader_that_misses_the_scores_reads_the_json_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, whole = tmp_path / "context", scored()
    whole.save(folder)
    kept = scores_in(folder).rename(tmp_path / "kept")

    def next_saver(_seconds: float) -> None:
        whole.model_copy(update={"scores": None, "scores_sha256": None}).save(
            folder, overwrite=True
        )

    monkeypatch.setattr(time, "sleep", next_saver)
    assert HeadSet.load(folder).scores is None
    assert kept.exists()


def test_a_folder_that_is_not_a_head_set_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    with pytest.raises(OutputError, match="never overwritten"):
        scored().save(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").exists()


def test_a_failing_write_leaves_the_old_set_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored().save(tmp_path / "context")

    def full_disk(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OutputError, match="No space left"):
        scored().model_copy(update={"source": "new"}).save(tmp_path / "context", overwrite=True)
    assert HeadSet.load(tmp_path / "context").source is None
    assert names_in(tmp_path) == ["context"]
    assert names_in(tmp_path / "context") == ["head_set.json", scores_in(tmp_path / "context").name]


def betas(plus: Any, minus: Any) -> dict[str, Any]:
    return {"methods": methods(juice={"plus": plus, "minus": minus})}


def heads(*plus: Any) -> dict[str, Any]:
    return {"methods": {"juice": {"heads": {"plus": plus, "minus": []}}}}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": "juice.head_set/4"}, "format is 'juice.head_set/4'"),
        (betas([1.0, 2.0], [-1.0, -2.0]), "juice: betas.plus lists 2 betas for 1 heads"),
        (betas([1.0], -1.0), "the other does not"),
        (betas([1.0], [-1.0, 0.5]), "methods.juice.betas.minus"),
        (heads([3, 0]), "head L3H0 is out of range: some/model has 3 layers"),
        (heads([0, -1]), "L0H-1 is out of range"),
        (heads([0, 1], [0, 1]), "twice"),
        (heads(), "no heads"),
        (heads(["a", 1]), "methods.juice.heads.plus.0"),
        (betas(-1.0, 0.0), "methods.juice.betas.plus"),
        (betas(1.0, 0.5), "methods.juice.betas.minus"),
        ({"method": "cad"}, "method"),
        ({"methods": {**methods(), "cad": None}}, "methods.cad"),
        ({"target": "both"}, "target"),
        ({"name": "../escape"}, "name"),
        ({"model": {**MODEL.model_dump(), "id": "two\nlines"}}, "model.id"),
        (
            {
                "metrics": {
                    "validation_juice": {
                        "n_examples": 4,
                        "accuracy": {"clean": 1.0},
                        "accuracy_unsteered": {},
                    }
                }
            },
            "metrics",
        ),
        ({"surprise": 1}, "surprise"),
        (heads(["1", 2]), "heads.plus.0"),
        (heads([True, 2]), "heads.plus.0"),
        (heads([1.0, 2]), "heads.plus.0"),
        (betas("2", -1.0), "methods.juice.betas.plus"),
        ({"scores_sha256": "sha256:../../etc/passwd"}, "scores_sha256"),
        ({"model": {**MODEL.model_dump(), "n_heads": "4"}}, "model.n_heads"),
    ],
)
def test_content_that_is_wrong_is_refused_by_field(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(HeadSetError, match=named):
        HeadSet.load(write(tmp_path / "set", sealed(content(**changes))))


@pytest.mark.parametrize(
    "text", ["", "{", json.dumps(content())[:200], "[" * 100_000, "null", "[1]"]
)
def test_a_truncated_or_foreign_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(HeadSetError, match=r"JSON|holds a|nested"):
        HeadSet.load(write(tmp_path / "set", text))


def test_nan_is_refused_wherever_it_is(tmp_path: Path) -> None:
    text = json.dumps(content()).replace(json.dumps(BETAS), '{"plus": NaN, "minus": 0.0}')
    assert "NaN" in text
    with pytest.raises(HeadSetError, match="NaN is not a number"):
        HeadSet.load(write(tmp_path / "betas", text))
    with pytest.raises(HeadSetError, match="NaN is not a number"):
        HeadSet.load(
            write(tmp_path / "metrics", json.dumps(content(metrics={"x": {"y": float("nan")}})))
        )
    broken = scored()
    broken.scores.plus[0, 0, 0] = float("nan")
    broken.save(tmp_path / "scores")
    with pytest.raises(HeadSetError, match="not finite"):
        HeadSet.load(tmp_path / "scores")


def test_scores_that_changed_or_are_gone_are_refused(tmp_path: Path) -> None:
    scored().save(tmp_path / "context")
    path = scores_in(tmp_path / "context")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(HeadSetError, match="hash"):
        HeadSet.load(tmp_path / "context")
    path.unlink()
    with pytest.raises(HeadSetError, match="whole folder"):
        HeadSet.load(tmp_path / "context")


def test_a_set_without_its_hash_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadSetError, match="but gives None"):
        HeadSet.load(write(tmp_path / "set", json.dumps(content())))


def test_a_field_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    """Programs differ in which one they take."""
    text = sealed(content()).replace('{"format"', '{"name": "other", "format"', 1)
    with pytest.raises(HeadSetError, match="name is given twice"):
        HeadSet.load(write(tmp_path / "set", text))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"target": "parametric"}, "target is context"),
        ({"target": "both"}, "the target 'both'"),
        ({"conflict_types": ("substitution", "sarcasm")}, "sarcasm"),
        ({"conflict_types": ("coherent", "coherent")}, "coherent"),
        ({"kind": "guess"}, "the kind 'guess'"),
        ({"plus": torch.zeros(2, 3, 4, dtype=torch.float64)}, "expected float32"),
        ({"plus": torch.zeros(2, 3, 5), "minus": torch.zeros(2, 3, 5)}, "holds scores of shape"),
    ],
)
def test_scores_that_are_not_those_of_the_set_are_refused(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    scores = replace(scored().scores, **change)
    scored().model_copy(update={"scores": scores}).save(tmp_path / "context")
    with pytest.raises(HeadSetError, match=named):
        HeadSet.load(tmp_path / "context")


@pytest.mark.parametrize(
    ("accepted", "kinds"),
    [(0.2, set()), (0.1, {"clean"}), (0.05, {"clean"}), (0.04, {"clean", "true"})],
)
def test_prompts_without_a_conflict_that_break_beyond_what_is_accepted_are_named(
    accepted: float, kinds: set[str]
) -> None:
    """Others are endangered by what steering is for, and only reported."""
    changed = {**MEASURED, "side_effects": {**MEASURED["side_effects"], "true": [0.95, 0.9]}}
    measured = HeadSet.parse(content(metrics={"validation_juice": changed}), "test").validation()
    assert {kind: list(shares) for kind, shares in measured.broken(accepted).items()} == {
        kind: changed["side_effects"][kind] for kind in kinds
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"harm": {"1": {"divergence": -0.1, "perplexity": 1.0}}},
        {"harm": {"1": {"divergence": 0.1}}},
        {"line": [{"weight": 3.0}]},
    ],
)
def test_harm_that_cannot_be_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    changed = content(metrics={"validation_juice": {**MEASURED, **wrong}})
    with pytest.raises(HeadSetError, match="metrics"):
        HeadSet.load(write(tmp_path / "set", sealed(changed)))


@pytest.mark.parametrize(
    ("line", "beyond"),
    [
        ([(0.6, 0.04), (0.9, 0.2), (0.8, 0.1)], 0.9),
        ([(0.6, 0.04), (0.64, 0.2)], None),
        ([(0.6, 0.04), (0.9, 0.05)], None),
        ([], None),
    ],
)
def test_what_wins_clearly_more_than_the_bound_allows_is_named(
    line: list[tuple[float, float]], beyond: float | None
) -> None:
    points = [Point(weight=1, scale=1, won=won, divergence=nats) for won, nats in line]
    found = Validation(
        n_examples=1, accuracy={}, accuracy_unsteered={}, line=tuple(points), allowed=0.05
    ).beyond
    assert (found and found.won) == beyond
