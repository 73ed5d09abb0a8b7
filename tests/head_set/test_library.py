"""A folder of head sets that is read again: what is new, what stays, what is kept as it was."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from threading import Thread

import pytest

from juice.errors import HeadSetError, HeadSetNotFoundError, WindowError
from juice.head_set import HeadSet, HeadSetLibrary
from juice.head_set.coefficients import layers_of
from juice.head_set.lookup import stamp_of
from juice.head_set.storage import save
from juice.head_set.writing import remove
from tests.support.head_sets import MODEL, content, names_in, scored, write

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
    own = tmp_path / "m" / "context"
    scored().save(own)
    before = HeadSetLibrary.scan(tmp_path, MODEL)
    if damage == "half":
        text = (own / "head_set.json").read_text()
        (own / "head_set.json").write_text(text[: len(text) // 2])
    elif damage == "no scores":
        (own / "scores.safetensors").unlink()
    else:
        (own / "head_set.json").unlink()
        (own / "head_set.json").mkdir()
    for after in (before.again(), before.again().again()):
        assert after.get("context") is before.get("context")
        assert "the set that was read before is still served" in after.unfit["m/context"]
    # A server that starts now has never read it.
    assert not HeadSetLibrary.scan(tmp_path, MODEL).by_name
    shutil.rmtree(own)
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
    one().save(tmp_path / "m" / "context")  # layers 0 to 2
    own = HeadSetLibrary.scan(tmp_path, MODEL, layers=range(1, 3))
    assert not own.by_name
    assert "start it with --window 0-2 or --window all" in own.unfit["m/context"]
    with pytest.raises(WindowError, match="in layers 0 to 2, and this engine steers layers 1 to 2"):
        own.check_fits(one())
    with pytest.raises(WindowError, match="this engine steers no layer"):
        HeadSetLibrary.scan(tmp_path, MODEL, layers=range(0)).check_fits(one())
    assert HeadSetLibrary.scan(tmp_path, MODEL, layers=range(3)).by_name


def test_the_layers_of_a_set_are_those_that_its_betas_change() -> None:
    plus_only = one(beta={"juice": {"plus": 2.0, "minus": 0.0}, "june": None})
    assert layers_of(plus_only) == [1]
    either = one(beta={"juice": {"plus": 2.0, "minus": 0.0}, "june": {"plus": 0.0, "minus": -1.0}})
    assert layers_of(either) == layers_of(one(beta=None)) == [0, 1, 2]


def test_every_change_of_a_folder_changes_its_stamp(tmp_path: Path) -> None:
    scored().save(tmp_path / "m" / "context")
    file = tmp_path / "m" / "context" / "scores.safetensors"
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


class Stop(Exception):  # noqa: N818 -- it is no error
    """What a check raises."""


def stop() -> None:
    raise Stop


def test_a_check_that_fails_keeps_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "context"
    one(source="old").save(folder)
    with pytest.raises(Stop):
        save(one(source="new"), folder, overwrite=True, check=stop)
    with pytest.raises(Stop):
        remove(folder, check=stop)
    assert HeadSet.load(folder).source == "old"
    assert names_in(tmp_path / "m") == ["context"]


def test_a_check_sees_what_will_be_replaced_whoever_saves_meanwhile(tmp_path: Path) -> None:
    """A saver of the command line, too: the lock is that of the folder above."""
    folder = tmp_path / "m" / "context"
    one(source="old").save(folder)
    saver = Thread(target=lambda: one(source="other").save(folder, overwrite=True))

    def check() -> None:
        saver.start()
        saver.join(0.5)
        assert saver.is_alive(), "it waits"
        assert HeadSet.load(folder).source == "old"

    save(one(source="new"), folder, overwrite=True, check=check)
    saver.join()
    assert HeadSet.load(folder).source == "other", "it came after, and replaced the new one"


def test_a_removed_set_is_gone_whole_and_a_link_to_one_is_only_a_link(tmp_path: Path) -> None:
    one().save(tmp_path / "elsewhere" / "context")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "context").symlink_to(tmp_path / "elsewhere" / "context")
    one(name="other").save(tmp_path / "m" / "other")
    write(tmp_path / "m" / "broken", "{")
    for name in ("context", "other", "broken"):
        remove(tmp_path / "m" / name, check=lambda: None)
    assert names_in(tmp_path / "m") == []
    assert HeadSet.load(tmp_path / "elsewhere" / "context").name == "context"
