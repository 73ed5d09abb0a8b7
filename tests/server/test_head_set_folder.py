"""A server's folder of head sets, followed: by hand, half-written, moved away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from juice.head_set.head_set import HeadSet
from juice.head_set.library import HeadSetLibrary
from juice_server.head_sets import HeadSetFolder
from juice_server.settings import Settings
from juice_server.telemetry.metrics import Metrics
from tests.support.head_sets import MODEL, content, names_in, scored


def followed(folder: Path, **settings: Any) -> tuple[HeadSetFolder, list[HeadSetLibrary]]:
    """Return a folder that is followed, and what it has been told to serve."""
    served = [HeadSetLibrary.scan(folder, MODEL)]
    watched = HeadSetFolder(served[0], Settings(**settings), Metrics("m"), served.append)
    return watched, served


def one(**changes: Any) -> HeadSet:
    return HeadSet.parse(content(**changes), "test")


def test_a_set_that_is_copied_file_by_file_is_served_when_it_is_whole(tmp_path: Path) -> None:
    scored().save(tmp_path / "source" / "m" / "context")
    one(name="other").save(tmp_path / "served" / "m" / "other")
    folder, served = followed(tmp_path / "served")
    (tmp_path / "served" / "m" / "context").mkdir()

    async def copy() -> None:
        for name in names_in(tmp_path / "source" / "m" / "context"):
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
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
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
