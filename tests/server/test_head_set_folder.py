"""A server's folder of head sets, followed: by hand, half-written, moved away; and conditions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from juice.errors import RequestError
from juice.head_set import HeadSet, HeadSetLibrary
from juice_server.conditions import Conditions
from juice_server.errors import ConflictError, PreconditionError
from juice_server.head_sets import HeadSetFolder
from juice_server.settings import Settings
from juice_server.telemetry.metrics import Metrics
from tests.support.head_sets import MODEL, content, scored


def followed(folder: Path, **settings: Any) -> tuple[HeadSetFolder, list[HeadSetLibrary]]:
    """Return a folder that is followed, and what it has been told to serve."""
    served = [HeadSetLibrary.scan(folder, MODEL)]
    own = HeadSetFolder(served[0], Settings(**settings), Metrics("m"), served.append)
    return own, served


def one(**changes: Any) -> HeadSet:
    return HeadSet.parse(content(**changes), "test")


def test_a_set_that_is_copied_file_by_file_is_served_when_it_is_whole(tmp_path: Path) -> None:
    scored().save(tmp_path / "source" / "m" / "context")
    one(name="other").save(tmp_path / "served" / "m" / "other")
    folder, served = followed(tmp_path / "served")
    (tmp_path / "served" / "m" / "context").mkdir()

    async def copy() -> None:
        for name in ("head_set.json", "scores.safetensors"):
            data = (tmp_path / "source" / "m" / "context" / name).read_bytes()
            for part in (data[: len(data) // 2], data):
                assert "context" not in served[-1].by_name
                (tmp_path / "served" / "m" / "context" / name).write_bytes(part)
                await folder.refresh()

    asyncio.run(copy())
    assert served[-1].get("context").scores is not None
    assert not served[-1].unfit


def test_a_change_within_one_tick_of_the_clock_is_seen_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two writes leave the same stamp, the second would otherwise never be read."""
    one().save(tmp_path / "m" / "context")
    folder, served = followed(tmp_path)
    monkeypatch.setattr("juice_server.head_sets.stamp_of", lambda _folder: "a tick")

    async def change() -> None:
        await folder.refresh()
        one(source="late").save(tmp_path / "m" / "context", overwrite=True)
        await folder.refresh()

    asyncio.run(change())
    assert served[-1].get("context").source == "late"


def test_a_folder_that_is_away_for_a_while_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A share that is not mounted; it is said once, and without where the folder is."""
    one().save(tmp_path / "sets" / "m" / "context")
    folder, served = followed(tmp_path / "sets")
    (tmp_path / "sets").rename(tmp_path / "away")

    async def look() -> None:
        for _ in range(3):
            await folder.refresh()

    asyncio.run(look())
    assert served[-1].by_name
    assert folder.problem is not None
    assert str(tmp_path) not in folder.problem
    assert len([own for own in caplog.records if own.levelname == "ERROR"]) == 1
    (tmp_path / "away").rename(tmp_path / "sets")
    asyncio.run(look())
    assert folder.problem is None
    assert list(served[-1].by_name) == ["context"]


def test_a_second_set_of_one_name_leaves_everything_as_it_is(tmp_path: Path) -> None:
    one().save(tmp_path / "m" / "context")
    folder, served = followed(tmp_path)
    one(source="second").save(tmp_path / "n" / "context")
    asyncio.run(folder.refresh())
    assert len(served) == 1
    assert "two head sets" in str(folder.problem)
    with pytest.raises(ConflictError, match="two head sets"):
        folder.put(one(name="new"), Conditions())


def test_a_set_is_replaced_where_it_is_and_a_damaged_one_too(tmp_path: Path) -> None:
    """The folder's name is not the set's: a second one of its name would be an error."""
    one().save(tmp_path / "elsewhere" / "renamed")
    folder, served = followed(tmp_path)
    assert not folder.put(one(source="new"), Conditions())
    (tmp_path / "elsewhere" / "renamed" / "head_set.json").write_text("{")
    with pytest.raises(PreconditionError):
        folder.put(one(source="newer"), Conditions(match=frozenset({f'"{one().seal}"'})))
    assert not folder.put(one(source="newest"), Conditions())
    asyncio.run(folder.refresh())
    assert served[-1].get("context").source == "newest"
    assert [own.name for own in tmp_path.iterdir()] == ["elsewhere"]


def test_a_set_of_another_model_in_its_place_is_not_replaced_or_removed(tmp_path: Path) -> None:
    other = one(model={**MODEL.model_dump(), "fingerprint": "sha256:" + "b" * 64})
    other.save(tmp_path / "some--model" / "context")
    folder, _ = followed(tmp_path)
    for change in (
        lambda: folder.put(one(), Conditions()),
        lambda: folder.delete("context", Conditions()),
    ):
        with pytest.raises(ConflictError, match="another set, which this server does not serve"):
            change()
    assert HeadSet.load(tmp_path / "some--model" / "context").seal == other.seal


@pytest.mark.parametrize(
    ("headers", "found", "holds"),
    [
        ([], None, True),
        ([], "a", True),
        ([("if-match", '"a"')], "a", True),
        ([("if-match", '"b"')], "a", False),
        ([("if-match", '"b", "a"')], "a", True),
        ([("if-match", '"b"'), ("if-match", '"a"')], "a", True),
        ([("if-match", 'W/"a"')], "a", False),
        ([("if-match", '"a"')], None, False),
        ([("if-match", "*")], "a", True),
        ([("if-match", "*")], None, False),
        ([("if-none-match", "*")], None, True),
        ([("if-none-match", "*")], "a", False),
        ([("if-none-match", '"b"')], "a", True),
        ([("if-none-match", '"a"')], "a", False),
    ],
)
def test_conditions_are_those_of_http(
    headers: list[tuple[str, str]], found: str | None, holds: bool
) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers]
    conditions = Conditions.of(Headers(raw=raw))
    if holds:
        conditions.check("context", found)
    else:
        with pytest.raises(PreconditionError):
            conditions.check("context", found)


@pytest.mark.parametrize("value", ["", "a", '"a', '"a" "b"', "*, *", '"a",'])
def test_a_condition_that_is_not_one_is_refused(value: str) -> None:
    with pytest.raises(RequestError, match="if-match"):
        Conditions.of(Headers({"if-match": value}))
