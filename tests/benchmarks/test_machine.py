"""The machine beside the numbers: its parts by name, as the system gives them.

Catches results that name no processor, or count cores and memory that a container does not have.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from benchmarks import machine


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    return tmp_path


def test_the_processor_has_the_name_that_the_system_gives(system: Path) -> None:
    (system / "cpuinfo").write_text(
        "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\n"
        "processor\t: 1\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"
    )
    assert machine.cpu() == "AMD EPYC (family 25, model 17)"
    (system / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Neoverse-N1\n")
    assert machine.cpu() == "Neoverse-N1"


def test_a_processor_without_a_name_is_its_kind(system: Path) -> None:
    (system / "cpuinfo").write_text("processor\t: 0\nCPU part\t: 0xd4f\n")
    assert machine.cpu() in {platform.processor(), platform.machine()} - {""}


def test_a_container_has_the_cores_and_the_memory_of_its_limits(system: Path) -> None:
    (system / "meminfo").write_text("MemTotal:       8388608 kB\nMemFree: 1 kB\n")
    assert machine.memory_gib() == 8
    assert machine.cores() == len(os.sched_getaffinity(0))
    (system / "memory.max").write_text("max\n")
    (system / "cpu.max").write_text("max 100000\n")
    assert machine.memory_gib() == 8
    assert machine.cores() == len(os.sched_getaffinity(0))
    (system / "memory.max").write_text(f"{2 << 30}\n")
    (system / "cpu.max").write_text("50000 100000\n")
    assert machine.memory_gib() == 2
    assert machine.cores() == 0.5


def test_where_nothing_is_known_nothing_is_made_up(system: Path) -> None:
    assert machine.memory_gib() is None


def test_a_description_names_no_machine() -> None:
    found = machine.describe()
    assert {"cpu", "cores", "memory_gib", "torch", "transformers", "gpu"} <= set(found)
    assert platform.node() not in map(str, found.values())
    assert not any("/" in str(value) for value in found.values())
