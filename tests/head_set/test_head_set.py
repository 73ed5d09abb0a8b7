"""Head sets on disk: what is written is read again, what is damaged is refused with its reason."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import juice
from juice.errors import HeadSetError, OutputError
from juice.head_set import HeadSet
from tests.support.head_sets import MODEL, content, names_in, scored, write


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
    assert written == content(scores_sha256=scored().scores_sha256)
    assert names_in(tmp_path / "context") == ["head_set.json", "scores.safetensors"]


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
        ({"format": "juice.head_set/2"}, "format is 'juice.head_set/2'"),
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
    ],
)
def test_content_that_is_wrong_is_refused_by_field(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(HeadSetError, match=named):
        HeadSet.load(write(tmp_path / "set", json.dumps(content(**changes))))


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
    with pytest.raises(HeadSetError, match=r"beta\.juice\.plus"):
        HeadSet.load(write(tmp_path / "betas", text))
    with pytest.raises(HeadSetError, match="metrics"):
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
