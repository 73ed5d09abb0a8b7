"""The look-up of the head sets that fit a model: where it searches, and what it leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

import juice
from juice.errors import HeadSetError, HeadSetMismatchError, HeadSetNotFoundError
from juice.head_set import HeadSet, HeadSetLibrary
from tests.support.head_sets import MODEL, content, write


def test_a_scan_serves_what_fits_and_lists_the_rest_with_reasons(tmp_path: Path) -> None:
    HeadSet.parse(content(), "x").save(tmp_path / "a" / "context")
    HeadSet.parse(
        content(name="other", model={**MODEL.model_dump(), "fingerprint": "sha256:" + "b" * 64}),
        "x",
    ).save(tmp_path / "b" / "other")
    write(tmp_path / "c" / "broken", "{")
    library = HeadSetLibrary.scan(tmp_path, MODEL)
    assert list(library.by_name) == ["context"]
    assert library.get("context").heads.plus == (juice.Head(1, 2),)
    assert set(library.unfit) == {"b/other", "c/broken"}
    with pytest.raises(HeadSetMismatchError, match="fingerprint"):
        library.get("other")
    with pytest.raises(HeadSetNotFoundError, match=r"served: context"):
        library.get("nothing")


def test_two_fitting_sets_of_one_name_are_an_error(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        HeadSet.parse(content(), "x").save(tmp_path / folder / "context")
    with pytest.raises(HeadSetError, match="two head sets"):
        HeadSetLibrary.scan(tmp_path, MODEL)


def test_without_a_fingerprint_shape_and_architecture_decide_with_a_warning(tmp_path: Path) -> None:
    HeadSet.parse(content(model={**MODEL.model_dump(), "fingerprint": None}), "x").save(
        tmp_path / "a" / "context"
    )
    with pytest.warns(UserWarning, match="architecture and shape alone"):
        assert HeadSetLibrary.scan(tmp_path, MODEL).by_name
    assert "n_layers" in MODEL.difference(MODEL.model_copy(update={"n_layers": 99}))
    for field, value in (("architecture", "LlamaForCausalLM"), ("n_layers", 4), ("n_heads", 5)):
        other = MODEL.model_copy(update={field: value})
        assert f"its {field} is" in next(iter(HeadSetLibrary.scan(tmp_path, other).unfit.values()))


def test_a_set_with_the_models_fingerprint_precedes_one_without_of_the_same_name(
    tmp_path: Path,
) -> None:
    HeadSet.parse(
        content(source="unsure", model={**MODEL.model_dump(), "fingerprint": None}), "x"
    ).save(tmp_path / "a" / "context")
    HeadSet.parse(content(source="sure"), "x").save(tmp_path / "b" / "context")
    library = HeadSetLibrary.scan(tmp_path, MODEL)
    assert library.get("context").source == "sure"
    assert "no fingerprint" in library.unfit["a/context"]


def test_only_targets_with_betas_are_offered(tmp_path: Path) -> None:
    HeadSet.parse(content(), "x").save(tmp_path / "m" / "context")
    HeadSet.parse(content(name="parametric", target="parametric", beta=None), "x").save(
        tmp_path / "m" / "parametric"
    )
    library = HeadSetLibrary.scan(tmp_path, MODEL)
    assert sorted(library.by_name) == ["context", "parametric"]
    assert library.targets() == ["context"]
    assert library.targets("june") == []


def test_the_search_order_is_argument_environment_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("argument", "environment", "head_sets"):
        HeadSet.parse(content(source=place), "x").save(tmp_path / place / "m" / "context")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUICE_HEAD_SETS", str(tmp_path / "environment"))
    assert HeadSetLibrary.scan("argument", MODEL).get("context").source == "argument"
    assert HeadSetLibrary.scan(None, MODEL).get("context").source == "environment"
    monkeypatch.delenv("JUICE_HEAD_SETS")
    assert HeadSetLibrary.scan(None, MODEL).get("context").source == "head_sets"
    for too_deep in ("argument/m", "argument/m/context"):
        with pytest.raises(HeadSetNotFoundError, match="give the folder above"):
            HeadSetLibrary.scan(too_deep, MODEL)
    with pytest.raises(HeadSetNotFoundError, match="does not exist"):
        HeadSetLibrary.scan(tmp_path / "nowhere", MODEL)
