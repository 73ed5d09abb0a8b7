"""Ways to run a model, each in a process.

Catches a run on a GPU that is lost because one way has no memory, ends or hangs; and a process that
holds on to the GPU after its way has ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.ways import Turns, Worker

ROOT = Path(__file__).parents[2]
# It fails as its argument says: "start", or the number of rows at which it does something wrong.
WAY = """
import os, subprocess, sys, time
from benchmarks.ways import answer_questions

how, when = sys.argv[1:]
asked = []

def reply(question):
    asked.append(question)
    part, n_rows = question.split()
    if n_rows == when:
        if how == "late" and asked.count(question) == 3:
            raise MemoryError("no room any more")
        if how == "fail":
            raise MemoryError("no room\\nfor it")
        if how == "end":
            os._exit(3)
        if how == "hang":
            time.sleep(600)
    return float(n_rows) * (2 if part == "prompts" else 1), 7 * int(n_rows)

def make():
    print("engines print a lot")
    if how == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, file=open(when, "w"))
    if when == "start":
        raise OSError("no such thing")
    return reply

answer_questions(make)
"""

Start = Callable[[str], Worker]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    (tmp_path / "own_way.py").write_text(WAY)

    def started(name: str) -> Worker:
        how, _, when = name.partition(" ")
        folders = os.pathsep.join([str(tmp_path), str(ROOT)])
        variables = {"PYTHONPATH": folders}
        limit_s = 5.0 if how == "hang" else 60.0  # which includes its start
        return Worker("own_way", how, when, environment=variables, limit_s=limit_s)

    return started


@pytest.fixture
def turns(start: Start) -> Iterator[Turns]:
    taking = Turns(start, n_rounds=2)
    yield taking
    taking.close()


def test_a_way_that_fails_keeps_what_it_had_and_the_others_go_on(turns: Turns) -> None:
    turns.admit(["good", "fail 4", "end 4", "fail start", "hang 4", "late 4"])
    seen = list[str]()
    for n_rows in (1, 4):
        turns.measure(n_rows, takes=lambda _name: True, report=seen.append)
    assert turns.failed == {
        "fail start": "it did not start: OSError: no such thing",
        "fail 4": "with 4 at once it failed: MemoryError: no room",
        "end 4": "with 4 at once it failed: its process ended with status 3",
        "hang 4": "with 4 at once it failed: it took longer than 5 s",
        "late 4": "with 4 at once it failed: MemoryError: no room any more",
    }
    assert turns.ways["good"]["seconds"] == {
        "prompts 1": 2, "step 1": 1, "prompts 4": 8, "step 4": 4,
    }  # fmt: skip
    assert turns.ways["good"]["memory_bytes"] == 28
    for name in ("fail 4", "end 4", "hang 4", "late 4"):
        assert turns.ways[name]["seconds"] == {"prompts 1": 2, "step 1": 1}
    assert seen[-1] == "4 at once: round 2 of 2"


def test_a_way_of_two_groups_goes_on_and_one_that_failed_is_not_started_again(
    start: Start,
) -> None:
    started, asked = list[str](), list[str]()

    def noted(name: str) -> Worker:
        started.append(name)
        worker = start(name)
        ask = worker.ask

        def counted(question: str) -> object:
            asked.append(name)
            return ask(question)

        worker.ask = counted  # type: ignore[method-assign]
        return worker

    turns = Turns(noted, n_rounds=2)
    for group in (["good", "base"], ["fail 1", "base"], ["fail 1", "base"]):
        turns.admit(group)
        turns.measure(1, takes=lambda _name: True, report=lambda _line: None)
    turns.close()
    assert started == ["good", "base", "fail 1"]
    assert turns.failed.keys() == {"fail 1"}
    # Two questions in each of two rounds and the one to warm up, by group.
    assert (asked.count("base"), asked.count("good")) == (18, 6)


def test_a_way_takes_its_own_processes_with_it(start: Start, tmp_path: Path) -> None:
    worker = start(f"child {tmp_path / 'pid'}")
    child = int((tmp_path / "pid").read_text())
    assert Path(f"/proc/{child}").exists()
    worker.close()
    until = time.monotonic() + 10
    while _runs(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
