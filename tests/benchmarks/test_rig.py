"""The rig of the benchmarks: the machine by its parts, and steps of decoding.

Catches results that name no processor, or count cores and memory that a container does not have;
and a rate of decoding with time of prompts in it, which hid what a step of many requests takes.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from benchmarks import peers, rig
from benchmarks.rig import MAX_LEN, ROWS, SHAPES, Setting, step_s

PROMPT_S, STEP_S, N_TOKENS = 3.0, 0.25, 8


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
