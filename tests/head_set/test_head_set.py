"""Head sets on disk: what is written is read again, what is damaged is refused with its reason."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import juice
from juice.errors import HeadSetError, OutputError
from juice.head_set import HeadSet
from tests.support.head_sets import MODEL, content, names_in, scored, sealed, write


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
    assert names_in(tmp_path / "context") == ["head_set.json", "scores.safetensors"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "other"),
        ("beta", {"juice": {"plus": 3.0, "minus": -1.0}, "june": None}),
        ("heads", {"plus": [[1, 3]], "minus": [[0, 3], [2, 0]]}),
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


def test_the_first_format_is_still_read_and_saved_as_the_second(tmp_path: Path) -> None:
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
    first = content(format="juice.head_set/1", identification=found)
    del first["gates"]
    with pytest.warns(UserWarning, match="cannot be seen"):
        old = HeadSet.load(write(tmp_path / "old", json.dumps(first)))
    assert (old.format, old.identification.method) == ("juice.head_set/2", "probe")
    old.save(tmp_path / "new")
    assert HeadSet.load(tmp_path / "new") == old


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


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": "juice.head_set/3"}, "format is 'juice.head_set/3'"),
        (
            {"beta": {"juice": {"plus": [1.0, 2.0], "minus": [-1.0, -2.0]}, "june": None}},
            "beta.juice.plus lists 2 betas for 1 heads",
        ),
        (
            {"beta": {"juice": {"plus": [1.0], "minus": -1.0}, "june": None}},
            "the other does not",
        ),
        (
            {"beta": {"juice": {"plus": [1.0], "minus": [-1.0, 0.5]}, "june": None}},
            "beta.juice.minus",
        ),
        (
            {"heads": {"plus": [[3, 0]], "minus": []}},
            "head L3H0 is out of range: some/model has 3 layers",
        ),
        ({"heads": {"plus": [[0, -1]], "minus": []}}, "L0H-1 is out of range"),
        ({"heads": {"plus": [[0, 1], [0, 1]], "minus": []}}, "twice"),
        ({"heads": {"plus": [], "minus": []}}, "no heads"),
        ({"heads": {"plus": [["a", 1]], "minus": []}}, "heads.plus.0"),
        ({"beta": {"juice": {"plus": -1.0, "minus": 0.0}, "june": None}}, "beta.juice.plus"),
        ({"beta": {"juice": {"plus": 1.0, "minus": 0.5}, "june": None}}, "beta.juice.minus"),
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
        ({"heads": {"plus": [["1", 2]], "minus": []}}, "heads.plus.0"),
        ({"heads": {"plus": [[True, 2]], "minus": []}}, "heads.plus.0"),
        ({"heads": {"plus": [[1.0, 2]], "minus": []}}, "heads.plus.0"),
        ({"beta": {"juice": {"plus": "2", "minus": -1.0}, "june": None}}, "beta.juice.plus"),
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
    nan = '{"juice": {"plus": NaN, "minus": 0.0}, "june": null}'
    text = json.dumps(content()).replace(json.dumps(content()["beta"]), nan)
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
    path = tmp_path / "context" / "scores.safetensors"
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
