"""The rig of the benchmarks: the machine by its parts, steps of decoding, and ways that take turns.

Catches results that name no processor, or count cores and memory that a container does not have; a
rate of decoding with time of prompts in it, which hid what a step of many requests takes; a run on
a GPU that is lost because one way has no memory, ends or hangs; and a process that holds on to the
GPU after its way has ended.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import peers, rig
from benchmarks.rig import MAX_LEN, ROWS, SHAPES, Setting, Turns, Worker, step_s

ROOT = Path(__file__).parents[2]
# It fails as its argument says: "start", or the number of rows at which it does something wrong.
WAY = """
import os, subprocess, sys, time
from benchmarks.rig import answer_questions

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
PROMPT_S, STEP_S, N_TOKENS = 3.0, 0.25, 8


@pytest.fixture
def start(tmp_path: Path) -> Start:
    (tmp_path / "own_way.py").write_text(WAY)

    def started(name: str) -> Worker:
        how, _, when = name.partition(" ")
        folders = os.pathsep.join([str(tmp_path), str(ROOT)])
        variables = {"PYTHONPATH": folders}
        limit_s = 20.0 if how == "hang" else 60.0  # which includes its start
        return Worker("own_way", how, when, environment=variables, limit_s=limit_s)

    return started


@pytest.fixture
def turns(start: Start) -> Iterator[Turns]:
    taking = Turns(start, n_rounds=2)
    yield taking
    taking.close()


@pytest.mark.long
def test_a_way_that_fails_keeps_what_it_had_and_the_others_go_on(turns: Turns) -> None:
    turns.admit(["good", "fail 4", "end 4", "fail start", "hang 4", "late 4"])
    seen = list[str]()
    for n_rows in (1, 4):
        turns.measure(n_rows, takes=lambda _name: True, report=seen.append)
    assert turns.failed == {
        "fail start": "it did not start: OSError: no such thing",
        "fail 4": "with 4 at once it failed: MemoryError: no room",
        "end 4": "with 4 at once it failed: its process ended with status 3",
        "hang 4": "with 4 at once it failed: it took longer than 20 s",
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


def test_groups_have_all_ways_in_order_each_with_the_base() -> None:
    names = ["a", "b", "c", "base", "d"]
    assert peers.in_groups(names, "base", None) == [names]
    assert peers.in_groups(names, "base", 5) == [names]
    assert peers.in_groups(names, "base", 3) == [["a", "b", "base"], ["c", "d", "base"]]
    assert peers.in_groups(["a", "b", "c"], "base", 2) == [["a", "b"], ["c"]]


@pytest.mark.parametrize(("shape", "gib", "n"), [("1b", 79, 10), ("8b", 79, 3), ("8b", 44, 1)])
def test_a_gpu_has_room_for_weights_keys_and_values_of_each_way(
    shape: str, gib: int, n: int
) -> None:
    setting = Setting(SHAPES[shape], "", "cuda", "bfloat16")
    assert peers.n_that_fit(gib << 30, setting) == n
    assert n * peers.n_needed_bytes(setting) <= gib << 30


def test_keys_and_values_have_room_for_all_rows_steered() -> None:
    setting = Setting(SHAPES["8b"], "", "cuda", "bfloat16")
    # 8 heads of 128 in 32 layers and 10 companions, keys and values, two bytes each.
    assert setting.n_kv_bytes == ROWS[-1] * MAX_LEN * (32 + 10) * 2 * 8 * 128 * 2


def test_vllm_asks_for_its_share_of_a_gpu() -> None:
    assert "gpu_memory_utilization" not in Setting(SHAPES["8b"], "", "cpu", "float32").of_vllm
    shared = Setting(SHAPES["8b"], "", "cuda", "bfloat16", share=0.3)
    assert shared.of_vllm["gpu_memory_utilization"] == 0.3


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(rig, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(rig, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(rig, "CGROUP", tmp_path)
    return tmp_path


def test_the_processor_has_the_name_that_the_system_gives(system: Path) -> None:
    (system / "cpuinfo").write_text(
        "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\n"
        "processor\t: 1\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"
    )
    assert rig.cpu() == "AMD EPYC (family 25, model 17)"
    (system / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Neoverse-N1\n")
    assert rig.cpu() == "Neoverse-N1"


def test_a_processor_without_a_name_is_its_kind(system: Path) -> None:
    (system / "cpuinfo").write_text("processor\t: 0\nCPU part\t: 0xd4f\n")
    assert rig.cpu() in {platform.processor(), platform.machine()} - {""}


def test_a_container_has_the_cores_and_the_memory_of_its_limits(system: Path) -> None:
    (system / "meminfo").write_text("MemTotal:       8388608 kB\nMemFree: 1 kB\n")
    assert rig.memory_gib() == 8
    assert rig.cores() == len(os.sched_getaffinity(0))
    (system / "memory.max").write_text("max\n")
    (system / "cpu.max").write_text("max 100000\n")
    assert rig.memory_gib() == 8
    assert rig.cores() == len(os.sched_getaffinity(0))
    (system / "memory.max").write_text(f"{2 << 30}\n")
    (system / "cpu.max").write_text("50000 100000\n")
    assert rig.memory_gib() == 2
    assert rig.cores() == 0.5


def test_where_nothing_is_known_nothing_is_made_up(system: Path) -> None:
    assert rig.memory_gib() is None


def test_a_description_names_no_machine() -> None:
    found = rig.machine()
    assert {"cpu", "cores", "memory_gib", "torch", "transformers", "gpu"} <= set(found)
    assert platform.node() not in map(str, found.values())
    assert not any("/" in str(value) for value in found.values())


def test_one_request() -> None:
    assert step_s([[2.0, 2.5, 3.0, 3.5]]) == pytest.approx(0.5)


def test_a_static_batch() -> None:
    assert step_s([[2.0, 2.5, 3.0]] * 5) == pytest.approx(0.5)


@pytest.mark.parametrize("n_waves", [1, 2, 3])
@pytest.mark.parametrize("gap_s", [0.0, 1e-4])
def test_requests_that_join_while_others_decode(n_waves: int, gap_s: float) -> None:
    """Waves of two prompts, all earlier ones in each forward; tokens of one are a gap apart."""
    arrivals: list[list[float]] = [[] for _ in range(2 * n_waves)]
    now = 0.0
    n_joined = 0
    while any(len(times) < N_TOKENS for times in arrivals):
        is_prompt = n_joined < len(arrivals)
        n_joined += 2 * is_prompt
        running = [times for times in arrivals[:n_joined] if len(times) < N_TOKENS]
        # A step takes time for each that is in it.
        now += STEP_S * len(running) / len(arrivals) + PROMPT_S * is_prompt
        for i, times in enumerate(running):
            times.append(now + i * gap_s)
    assert step_s(arrivals) == pytest.approx(STEP_S, rel=0.02)


def test_tokens_that_come_together_count_each() -> None:
    assert step_s([[1.0, 1.0, 2.0, 2.0]]) == pytest.approx(0.5)
