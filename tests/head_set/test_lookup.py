"""The look-up of the head sets that fit a model: where it searches, and what it leaves out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import juice
from juice.errors import HeadSetError, HeadSetMismatchError, HeadSetNotFoundError
from juice.head_set.head_set import HeadSet
from juice.head_set.library import HeadSetLibrary
from tests.support.head_sets import BETAS, MODEL, content, methods, write


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


def test_without_a_fingerprint_a_set_is_served_only_on_trust_and_with_a_warning(
    tmp_path: Path,
) -> None:
    unsure = HeadSet.parse(content(model={**MODEL.model_dump(), "fingerprint": None}), "x")
    unsure.save(tmp_path / "a" / "context")
    library = HeadSetLibrary.scan(tmp_path, MODEL)
    assert not library.by_name
    with pytest.raises(HeadSetMismatchError, match="--allow-unverified"):
        library.get("context")
    with pytest.warns(UserWarning, match="architecture and shape alone"):
        assert HeadSetLibrary.scan(tmp_path, MODEL, allow_unverified=True).by_name
    assert "n_layers" in MODEL.difference(MODEL.model_copy(update={"n_layers": 99}))
    for field, value in (("architecture", "LlamaForCausalLM"), ("n_layers", 4), ("n_heads", 5)):
        other = MODEL.model_copy(update={field: value})
        found = HeadSetLibrary.scan(tmp_path, other, allow_unverified=True)
        assert f"its {field} is" in next(iter(found.unfit.values()))


def test_a_fingerprint_that_the_model_lacks_is_no_proof_either(tmp_path: Path) -> None:
    HeadSet.parse(content(), "x").save(tmp_path / "a" / "context")
    unknown = MODEL.model_copy(update={"fingerprint": None})
    assert not HeadSetLibrary.scan(tmp_path, unknown).by_name


def test_a_set_that_cannot_be_read_is_listed_and_the_others_are_served(tmp_path: Path) -> None:
    """A named pipe, a loop, a folder for a file, a name that is not UTF-8: none stops the start."""
    HeadSet.parse(content(), "x").save(tmp_path / "a" / "context")
    (tmp_path / "b" / "pipe").mkdir(parents=True)
    os.mkfifo(tmp_path / "b" / "pipe" / "head_set.json")
    (tmp_path / "b" / "loop").mkdir()
    (tmp_path / "b" / "loop" / "head_set.json").symlink_to("head_set.json")
    (tmp_path / "b" / "folder" / "head_set.json").mkdir(parents=True)
    (tmp_path / "b" / "large").mkdir()
    (tmp_path / "b" / "large" / "head_set.json").write_bytes(b" " * 5_000_000)
    write(tmp_path / "b" / "deep", '{"format": "juice.head_set/3", "metrics": ' + '{"a":' * 400)
    deep = content(metrics={})
    for _ in range(600):
        deep = {"a": deep}
    write(tmp_path / "b" / "deeper", json.dumps(deep))
    write(Path(os.fsdecode(bytes(tmp_path) + b"/b/caf\xe9")), "{")
    write(tmp_path / "b" / "surrogate", json.dumps({**content(), "format": "\ud800"}))
    (tmp_path / "b" / "circle").symlink_to("circle")
    (tmp_path / "circle").symlink_to("circle")
    library = HeadSetLibrary.scan(tmp_path, MODEL)
    assert list(library.by_name) == ["context"]
    names = [
        "b/pipe",
        "b/loop",
        "b/folder",
        "b/large",
        "b/deep",
        "b/deeper",
        "b/surrogate",
        "b/caf\\udce9",
    ]
    assert set(library.unfit) == set(names)
    json.dumps(library.unfit, ensure_ascii=False).encode()
    assert "not a regular file" in library.unfit["b/pipe"]
    assert "most in a head set" in library.unfit["b/large"]


def test_a_folder_that_may_not_be_looked_into_is_listed(not_root: Path) -> None:
    HeadSet.parse(content(), "x").save(not_root / "b" / "context")
    HeadSet.parse(content(name="other"), "x").save(not_root / "c" / "other")
    (not_root / "closed").mkdir(mode=0)
    (not_root / "c" / "other").chmod(0)
    library = HeadSetLibrary.scan(not_root, MODEL)
    assert list(library.by_name) == ["context"]
    assert set(library.unfit) == {"closed/*", "c/other"}
    (not_root / "c" / "other").chmod(0o755)


def test_a_set_with_the_models_fingerprint_precedes_one_without_of_the_same_name(
    tmp_path: Path,
) -> None:
    HeadSet.parse(
        content(source="unsure", model={**MODEL.model_dump(), "fingerprint": None}), "x"
    ).save(tmp_path / "a" / "context")
    HeadSet.parse(content(source="sure"), "x").save(tmp_path / "b" / "context")
    library = HeadSetLibrary.scan(tmp_path, MODEL, allow_unverified=True)
    assert library.get("context").source == "sure"
    assert "no fingerprint" in library.unfit["a/context"]


def test_only_targets_with_betas_are_offered(tmp_path: Path) -> None:
    HeadSet.parse(content(), "x").save(tmp_path / "m" / "context")
    HeadSet.parse(content(name="parametric", target="parametric", methods=methods()), "x").save(
        tmp_path / "m" / "parametric"
    )
    library = HeadSetLibrary.scan(tmp_path, MODEL)
    assert sorted(library.by_name) == ["context", "parametric"]
    assert library.targets() == ["context"]
    assert library.targets("june") == []


def test_a_target_is_offered_where_its_sets_own_method_has_betas(tmp_path: Path) -> None:
    single = content(method="june", methods=methods(june=BETAS))
    HeadSet.parse(single, "x").save(tmp_path / "m" / "context")
    library = HeadSetLibrary.scan(tmp_path, MODEL)
    assert library.targets() == library.targets("june") == ["context"]
    assert library.targets("juice") == []


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
