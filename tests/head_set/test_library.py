"""A folder of head sets that is read again: what is new, what stays, what is kept as it was."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from juice.errors import HeadSetError, HeadSetNotFoundError, WindowError
from juice.formula import Method
from juice.head_set.head_set import HeadSet
from juice.head_set.library import HeadSetLibrary, stamp_of
from tests.support.head_sets import MODEL, content, methods, scored, scores_in

FINGERPRINTED = MODEL.model_dump()


def one(**changes: object) -> HeadSet:
    return HeadSet.parse(content(**changes), "test")


def test_a_folder_that_is_read_again_has_what_it_holds_now(tmp_path: Path) -> None:
    one().save(tmp_path / "m" / "context")
    one(name="other").save(tmp_path / "m" / "other")
    before = HeadSetLibrary.scan(tmp_path, MODEL)
    one(name="new").save(tmp_path / "m" / "new")
    one(name="other", source="changed").save(tmp_path / "m" / "other", overwrite=True)
    after = before.again()
    assert set(after.by_name) == {"context", "other", "new"}
    assert after.get("context") is before.get("context"), "the same set is the same object"
    assert (before.get("other").source, after.get("other").source) == (None, "changed")
    shutil.rmtree(tmp_path / "m" / "other")
    last = after.again()
    assert set(last.by_name) == {"context", "new"}
    with pytest.raises(HeadSetNotFoundError, match="was removed while this server ran"):
        last.get("other")
    one(name="other").save(tmp_path / "m" / "other")
    assert last.again().get("other").source is None


@pytest.mark.parametrize("damage", ["half", "no scores", "unreadable"])
def test_a_set_that_is_damaged_stays_as_it_was_and_is_reported(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "m" / "context"
    scored().save(folder)
    before = HeadSetLibrary.scan(tmp_path, MODEL)
    if damage == "half":
        text = (folder / "head_set.json").read_text()
        (folder / "head_set.json").write_text(text[: len(text) // 2])
    elif damage == "no scores":
        scores_in(folder).unlink()
    else:
        (folder / "head_set.json").unlink()
        (folder / "head_set.json").mkdir()
    for after in (before.again(), before.again().again()):
        assert after.get("context") is before.get("context")
        assert "the set that was read before is still served" in after.unfit["m/context"]
    # A server that starts now has never read it.
    assert not HeadSetLibrary.scan(tmp_path, MODEL).by_name
    shutil.rmtree(folder)
    assert not before.again().again().by_name


def test_a_model_whose_folder_cannot_be_looked_into_keeps_its_sets(not_root: Path) -> None:
    one().save(not_root / "m" / "context")
    before = HeadSetLibrary.scan(not_root, MODEL)
    (not_root / "m").chmod(0)
    after = before.again()
    assert after.get("context") is before.get("context")
    assert set(after.unfit) == {"m/*"}
    (not_root / "m").chmod(0o755)
    assert not before.again().unfit


def test_a_set_that_no_longer_fits_is_refused_with_the_reason(tmp_path: Path) -> None:
    one().save(tmp_path / "m" / "context")
    before = HeadSetLibrary.scan(tmp_path, MODEL)
    other = one(model={**FINGERPRINTED, "fingerprint": "sha256:" + "b" * 64})
    other.save(tmp_path / "m" / "context", overwrite=True)
    with pytest.raises(HeadSetError, match="its fingerprint is"):
        before.again().get("context")


def test_an_engine_with_a_window_serves_the_sets_within_it(tmp_path: Path) -> None:
    def steering(window: range, others: range = range(3)) -> dict[Method, range]:
        return {"juice": window, "june": others}

    one().save(tmp_path / "m" / "context")  # layers 0 to 2
    library = HeadSetLibrary.scan(tmp_path, MODEL, layers=steering(range(1, 3)))
    assert not library.by_name
    assert "start it with --window 0-2 or --window all" in library.unfit["m/context"]
    with pytest.raises(WindowError, match="to 2, and in two runs this engine steers layers 1 to 2"):
        library.check_fits(one())
    none = HeadSetLibrary.scan(tmp_path, MODEL, layers=steering(range(0)))
    with pytest.raises(WindowError, match="in two runs this engine steers no layer"):
        none.check_fits(one())
    assert HeadSetLibrary.scan(tmp_path, MODEL, layers=steering(range(3))).by_name


def test_a_set_for_one_run_or_one_layer_needs_no_window(tmp_path: Path) -> None:
    plus = {"plus": 2.0, "minus": 0.0}
    library = HeadSetLibrary.scan(tmp_path, MODEL, layers={"juice": range(0), "june": range(1, 3)})
    library.check_fits(one(methods=methods(juice=plus)))  # its plus head is in layer 1
    library.check_fits(one(method="june", methods=methods(june=plus)))
    with pytest.raises(WindowError, match="in one run this engine steers layers 1 to 2"):
        library.check_fits(one(method="june", methods=methods()))


def test_the_layers_of_a_set_are_those_that_its_betas_change() -> None:
    plus, minus = {"plus": 2.0, "minus": 0.0}, {"plus": 0.0, "minus": -1.0}
    assert one(methods=methods(juice=plus)).layers == [1]
    assert one(methods=methods(juice=plus, june=minus)).layers == [1]
    assert one(methods=methods(juice=plus, june=minus), method="june").layers == [0, 2]
    assert one(methods=methods()).layers == [0, 1, 2]


def test_every_change_of_a_folder_changes_its_stamp(tmp_path: Path) -> None:
    scored().save(tmp_path / "m" / "context")
    file = scores_in(tmp_path / "m" / "context")
    seen = [stamp_of(tmp_path)]
    assert stamp_of(tmp_path) == seen[0]

    def note() -> None:
        assert stamp_of(tmp_path) not in seen
        seen.append(stamp_of(tmp_path))

    one(name="other").save(tmp_path / "m" / "other")
    note()
    scored().save(tmp_path / "m" / "context", overwrite=True)
    note()
    was = file.stat()
    file.write_bytes(bytes(was.st_size))  # as large, and dated back
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    note()
    file.unlink()
    note()
    shutil.rmtree(tmp_path / "m" / "context")
    note()
