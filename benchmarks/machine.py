"""The machine that numbers were measured on: its parts and versions, and nothing that names it."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch
import transformers

CPUINFO, MEMINFO, CGROUP = Path("/proc/cpuinfo"), Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def describe() -> dict[str, object]:
    """Return what a reader needs to judge a number: processors, memory, the GPU, and versions."""
    return {
        "cpu": cpu(),
        "cores": cores(),
        "memory_gib": memory_gib(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **gpu(),
    }


def cpu() -> str:
    """Return the processor's name, or its kind where the system gives no name.

    Clouds give processors of several years one name: the family and model tell them apart.
    """
    facts: dict[str, str] = {}
    for line in _read(CPUINFO).splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    if not facts.get("model name"):
        return platform.processor() or platform.machine()
    if {"cpu family", "model"} <= facts.keys():
        return f"{facts['model name']} (family {facts['cpu family']}, model {facts['model']})"
    return facts["model name"]


def cores() -> float:
    """Return how many cores this process may use, by its affinity and its container's quota."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(CGROUP / "cpu.max").partition(" ")
    return min(n, int(quota) / int(period)) if quota.isdigit() else n


def memory_gib() -> float | None:
    """Return the machine's memory, or its container's where that is less; None where unknown."""
    sizes = [
        int(line.split()[1]) << 10
        for line in _read(MEMINFO).splitlines()
        if line.startswith("MemTotal:")
    ]
    limit = _read(CGROUP / "memory.max").strip()
    sizes += [int(limit)] if limit.isdigit() else []
    return round(min(sizes) / 2**30, 1) if sizes else None


def gpu() -> dict[str, object]:
    """Return the GPU's name, its memory and the versions that drive it, where PyTorch finds one."""
    if not torch.cuda.is_available():
        return {"gpu": None}
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpu_memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
        "gpu_driver": _driver(),
        "cuda": torch.version.cuda,
    }


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None where nothing reports it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(asked.stdout.split()), None)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
