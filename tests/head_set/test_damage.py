"""Head sets under attack: mutated bytes, savers at once, readers beside a saver, killed savers."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from juice.errors import HeadSetError, OutputError
from juice.head_set.head_set import HeadSet
from juice.head_set.storage import JSON_FILE, check_writable
from tests.support.head_sets import names_in, scored, sealed

LEAVES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 6.0, 1e308, -0.0, 2**70, "6", "", "context", "x" * 300, [], {},
    [[1, 2]], [0, 0], {"plus": []}, {"juice": None}, "sha256:" + "e" * 64,
)  # fmt: skip
PIECES = (b"[" * 1200, b"1e999", b"NaN", b"\\ud800", b'"', b"{")
MANY = pytest.mark.parametrize(
    "n", [2000, pytest.param(500_000, marks=pytest.mark.torture)], ids="{:,}".format
)
FEW = pytest.mark.parametrize("n", [10, pytest.param(200, marks=pytest.mark.torture)])


def mutated(data: bytes, rng: Random) -> bytes:
    """Return bytes with one to four changes: flipped, cut, doubled, moved, replaced."""
    content = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, n = rng.randrange(len(content) + 1), rng.choice([1, 1, 2, 8, 60])
        match rng.randrange(6):
            case 0 if at < len(content):
                content[at] ^= 1 << rng.randrange(8)
            case 1:
                del content[at : at + n]
            case 2:
                content[at:at] = content[at : at + n]
            case 3:
                content[at:at] = bytes(rng.randrange(256) for _ in range(n))
            case 4:
                content[at : at + n] = rng.choice(PIECES)
            case _:
                del content[at:]
        if not content:
            break
    return bytes(content)


def changed(content: Any, rng: Random) -> Any:
    """Return JSON content with one part replaced, at any depth."""
    if isinstance(content, dict) and content and rng.random() < 0.9:
        key = rng.choice(list(content))
        return {**content, key: changed(content[key], rng)}
    if isinstance(content, list) and content and rng.random() < 0.9:
        i = rng.randrange(len(content))
        return [*content[:i], changed(content[i], rng), *content[i + 1 :]]
    return rng.choice(LEAVES)


def is_within(part: Any, whole: Any) -> bool:
    """Return whether nothing of a part was converted; the whole may have defaults beside it."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and is_within(part[key], whole[key]) for key in part)
    if isinstance(part, list) and isinstance(whole, list):
        pairs = zip(part, whole, strict=True)
        return len(part) == len(whole) and all(is_within(each, other) for each, other in pairs)
    return part == whole and (part is whole or isinstance(part, str | int | float))


def is_the_same(one: HeadSet, other: HeadSet) -> bool:
    return one.model_dump() == other.model_dump() and all(
        torch.equal(getattr(one.scores, sign), getattr(other.scores, sign))
        for sign in ("plus", "minus")
    )


@MANY
def test_a_mutated_set_is_refused_or_is_the_same(tmp_path: Path, n: int) -> None:
    """White space may change unseen; a head, a beta, a score or a name may not."""
    right, folder, rng = scored(), tmp_path / "context", Random(n)
    right.save(folder)
    originals = {name: (folder / name).read_bytes() for name in names_in(folder)}
    n_refused = 0
    for _ in range(n):
        name = rng.choice(sorted(originals))
        (folder / name).write_bytes(mutated(originals[name], rng))
        try:
            assert is_the_same(HeadSet.load(folder), right)
        except HeadSetError:
            n_refused += 1
        (folder / name).write_bytes(originals[name])
    assert n_refused > 0.9 * n


@MANY
def test_content_of_any_type_with_its_hash_is_a_set_or_refused(tmp_path: Path, n: int) -> None:
    """Whoever can write the hash can write any set, but only a set or an error comes of it."""
    right, folder, rng = scored(), tmp_path / "context", Random(n + 1)
    right.save(folder)
    content = json.loads((folder / "head_set.json").read_text())
    del content["sha256"]
    for _ in range(n):
        damaged = changed(content, rng)
        text = sealed(damaged) if isinstance(damaged, dict) else json.dumps(damaged)
        (folder / "head_set.json").write_text(text)
        try:
            found = HeadSet.load(folder)
        except HeadSetError:
            continue
        assert is_within(damaged, found.model_dump(mode="json"))


def save_until(folder: Path, end: Any) -> None:
    """Save other sets over one another until told to end."""
    one = scored()
    other = one.model_copy(update={"source": "other", "scores": None, "scores_sha256": None})
    while not end.is_set():
        for each in (one, other):
            each.save(folder, overwrite=True)


def test_a_reader_beside_a_saver_always_has_one_of_the_sets(tmp_path: Path) -> None:
    """Kills: scores of one saving beside the heads of another, a folder gone for a moment."""
    folder, context = tmp_path / "context", multiprocessing.get_context("fork")
    scored().save(folder)
    end = context.Event()
    saver = context.Process(target=save_until, args=(folder, end), daemon=True)
    saver.start()
    sources = set()
    begun = time.monotonic()
    try:
        while (age := time.monotonic() - begun) < 3 or (len(sources) < 2 and age < 60):
            found = HeadSet.load(folder)
            assert (found.scores is None) == (found.source == "other")
            sources.add(found.source)
    finally:
        end.set()
        saver.join()
    assert sources == {None, "other"}


def save_once(folder: Path, start: Any, saved: Any) -> None:
    start.wait()
    try:
        scored().save(folder)
        saved.put(True)
    except OutputError:
        saved.put(False)


def test_of_savers_at_once_only_one_succeeds_unless_they_may_overwrite(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, saved = context.Event(), context.Queue()
    savers = [
        context.Process(target=save_once, args=(tmp_path / "context", start, saved))
        for _ in range(4)
    ]
    for saver in savers:
        saver.start()
    start.set()
    results = [saved.get(timeout=60) for _ in savers]
    for saver in savers:
        saver.join()
    assert sorted(results) == [False, False, False, True]
    assert HeadSet.load(tmp_path / "context").name == "context"


@FEW
@pytest.mark.parametrize("n_savers", [1, 2])
def test_savers_that_are_killed_leave_a_set(tmp_path: Path, n: int, n_savers: int) -> None:
    """Kills: a JSON that is not written last, or whose scores another saver removes."""
    folder, context, rng = tmp_path / "context", multiprocessing.get_context("fork"), Random(0)
    scored().save(folder)
    n_kills, left = 0, set[str]()
    while n_kills < n or not any(name.startswith(".") for name in left):
        assert n_kills < n + 1000, "no saver was killed as it saved"
        n_kills += 1
        savers = [
            context.Process(target=save_until, args=(folder, context.Event()))
            for _ in range(n_savers)
        ]
        for saver in savers:
            saver.start()
        time.sleep(rng.uniform(0.0, 0.05))
        for saver in savers:
            assert saver.pid is not None
            os.kill(saver.pid, signal.SIGKILL)
            saver.join()
        assert HeadSet.load(folder).name == "context"
        left |= {*names_in(folder)}
    scored().save(folder, overwrite=True)
    assert is_the_same(HeadSet.load(folder), scored())
    assert names_in(tmp_path) == ["context"]


@FEW
def test_two_savers_at_once_leave_a_whole_set_and_nothing_else(tmp_path: Path, n: int) -> None:
    """They replace each other's scores, which have the same name."""
    folder, context = tmp_path / "context", multiprocessing.get_context("fork")
    for _ in range(max(1, n // 20)):
        end = context.Event()
        savers = [context.Process(target=save_until, args=(folder, end)) for _ in range(2)]
        for saver in savers:
            saver.start()
        time.sleep(0.5)
        end.set()
        for saver in savers:
            saver.join()
            assert saver.exitcode == 0
        assert HeadSet.load(folder).source == "other", "each saves that one last"
        assert [name for name in names_in(folder) if name.startswith(".")] == []


@pytest.mark.parametrize("interrupted", ["commit", "removal"])
def test_scores_that_one_saver_removes_as_another_commits_them_are_there_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    """Kills: a saver that does not look again, after its commit or after its removal."""
    folder, one = tmp_path / "context", scored()
    other = one.model_copy(update={"source": "other", "scores": None, "scores_sha256": None})
    one.save(folder)
    n_calls, fsync, rename = 0, os.fsync, Path.rename

    def fsync_then_the_other_saves(descriptor: int) -> None:
        nonlocal n_calls
        n_calls += 1
        fsync(descriptor)
        if n_calls == 3:  # the scores, the folder, the JSON before it has its name
            other.save(folder, overwrite=True)

    def the_other_saves_then_rename(path: Path, target: Path) -> Path:
        monkeypatch.undo()
        one.save(folder, overwrite=True)
        return rename(path, target)

    if interrupted == "commit":
        monkeypatch.setattr(os, "fsync", fsync_then_the_other_saves)
        one.save(folder, overwrite=True)
        assert n_calls > 3
    else:
        monkeypatch.setattr(Path, "rename", the_other_saves_then_rename)
        other.save(folder, overwrite=True)
    assert is_the_same(HeadSet.load(folder), one)
    assert len(names_in(folder)) == 2


def test_a_folder_that_another_process_removes_meanwhile_may_be_written(tmp_path: Path) -> None:
    """Kills: a look at its files after the look whether it is there."""
    folder, aside, ended = tmp_path / "set", tmp_path / "aside", threading.Event()
    aside.mkdir()
    (aside / JSON_FILE).touch()

    def come_and_go() -> None:
        while not ended.is_set():
            aside.rename(folder)
            folder.rename(aside)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(5_000):
            check_writable(folder, overwrite=True)
    finally:
        ended.set()
        thread.join()


def test_a_place_that_takes_no_folder_is_refused_before_any_work() -> None:
    """Kills: permissions alone, by which root may write anywhere; heads were looked for first."""
    with pytest.raises(OutputError, match=r"cannot write to /proc: .+; choose another --out"):
        check_writable(Path("/proc/sets/mini/context"), overwrite=False)
