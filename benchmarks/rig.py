"""What every benchmark stands on: the machine, the models, and medians of what takes turns.

The machine that numbers were measured on is described by its parts and versions, and nothing that
names it. Models are Llamas of random weights, with their prompts and their steering. What is
compared takes turns in one run, each after one round to warm up, and a number is the median of the
rounds.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from juice.engine.steer import Steering, SteeringReport
from juice.formula import Method

CPUINFO, MEMINFO, CGROUP = Path("/proc/cpuinfo"), Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def machine() -> dict[str, object]:
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


Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    intermediate: int
    vocabulary: int

    @property
    def steered_layers(self) -> range:
        """A third of the layers, in the middle; with heads in all of them, that is the window."""
        third = self.n_layers // 3
        return range(third, 2 * third)

    @property
    def n_weights(self) -> int:
        """How many weights the model has, embeddings included."""
        d_head = self.width // self.n_heads
        attention = 2 * self.width * (self.width + self.n_kv_heads * d_head)
        layer = attention + 3 * self.width * self.intermediate
        return self.n_layers * layer + 2 * self.vocabulary * self.width

    def n_kv_bytes(self, n_tokens: int, bytes_each: int) -> int:
        """Return what the keys and values of steered tokens take, those of companions included."""
        layers = self.n_layers + len(self.steered_layers)
        per_layer = 2 * self.n_kv_heads * self.width // self.n_heads
        return n_tokens * layers * per_layer * bytes_each

    def network(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
        """Return a model of this shape, always with the same weights on one device."""
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.n_layers,
            num_attention_heads=self.n_heads,
            num_key_value_heads=self.n_kv_heads,
            max_position_embeddings=2048,
            bos_token_id=1,
            eos_token_id=0,
            pad_token_id=0,
            dtype=dtype,
        )
        torch.manual_seed(0)
        with torch.device(device):
            return LlamaForCausalLM(config).to(dtype).eval()

    def heads(self, seed: int) -> dict[tuple[int, int], float]:
        """Return a random head in each steered layer, each with its own beta."""
        random = torch.Generator().manual_seed(seed)
        return {
            (layer, int(torch.randint(self.n_heads, (1,), generator=random))): 0.5
            + float(torch.rand(1, generator=random))
            for layer in self.steered_layers
        }

    def steering(self, seed: int, method: Method = "juice") -> Steering:
        """Return the steering by those heads."""
        heads = self.heads(seed)
        coefficients = {layer: torch.zeros(self.n_heads) for layer, _ in heads}
        for (layer, head), beta in heads.items():
            coefficients[layer][head] = beta
        report = SteeringReport(
            applied=True,
            target="context",
            head_set="benchmark",
            beta_plus=1,
            beta_minus=0,
            strength=1,
            method=method,
            n_heads=len(heads),
        )
        return Steering(coefficients=coefficients, report=report)


SMALL = Shape(12, 384, 6, 6, 1024, 4096)
SHAPES = {
    "small": SMALL,
    "1b": Shape(16, 2048, 32, 8, 8192, 128_256),
    "8b": Shape(32, 4096, 32, 8, 14_336, 128_256),
}


N_TOKENS, MAX_LEN = 32, 512
ROWS = (1, 4, 16, 64)
MIN_KV_BYTES = 2 << 30


@dataclass(frozen=True)
class Setting:
    """What is measured, and where.

    Args:
        shape: The sizes of the model.
        folder: Its weights.
        device: Where it runs.
        dtype: In which precision.
        share: Of the GPU's memory, what one way may take; None on a CPU.
    """

    shape: Shape
    folder: str
    device: str
    dtype: str
    share: float | None = None

    @property
    def n_weight_bytes(self) -> int:
        """What the weights take."""
        return self.shape.n_weights * getattr(torch, self.dtype).itemsize

    @property
    def n_kv_bytes(self) -> int:
        """What keys and values may take: enough for the most rows at their full length."""
        bytes_each = getattr(torch, self.dtype).itemsize
        return max(MIN_KV_BYTES, self.shape.n_kv_bytes(ROWS[-1] * MAX_LEN, bytes_each))

    @property
    def of_vllm(self) -> dict[str, Any]:
        """What vLLM is told: without a share it would ask for nearly all of the GPU."""
        shared = {} if self.share is None else {"gpu_memory_utilization": self.share}
        return {"enable_prefix_caching": False, **shared}

    def load(self) -> Any:
        """Return the model as transformers loads it."""
        dtype = getattr(torch, self.dtype)
        return LlamaForCausalLM.from_pretrained(self.folder, dtype=dtype).to(self.device).eval()


def prompts(n: int) -> list[Prompt]:
    """Return prompts of 192 to 320 tokens."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(192, 321, (n,), generator=random)
    return [
        tuple(torch.randint(1, 280, (int(length),), generator=random).tolist())
        for length in lengths
    ]


# By request, when each of its tokens came, in seconds after some beginning.
Arrivals = Sequence[Sequence[float]]


def step_s(arrivals: Arrivals) -> float:
    """Return the seconds of a step that gives each request a token.

    It counts from the first token of the request whose prompt was the last to be done, so that no
    prompt is in it, and only the tokens that come after that step. Requests whose prompts were done
    earlier may end earlier: a step without them is the part of one that it gives tokens to.

    Args:
        arrivals: Of at least two tokens for each request.
    """
    last = max(arrivals, key=lambda times: times[0])
    second_step = (last[0] + last[1]) / 2
    times = [at for of_request in arrivals for at in of_request]
    begun = max(at for at in times if at <= second_step)
    n_later = sum(at > second_step for at in times)
    return (max(times) - begun) * len(arrivals) / n_later


def medians(ways: dict[str, Callable[[], object]], n_rounds: int) -> dict[str, float]:
    """Return the median seconds of every way; the ways take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(n_rounds + 1):
        for name, run in ways.items():
            begun = time.perf_counter()
            run()
            if round_number:
                seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(times) for name, times in seconds.items()}


class Ratio(NamedTuple):
    """The median ratio of two ways, round by round, with its 95 % interval by order statistics."""

    median: float
    low: float
    high: float


def paired(one: Callable[[], object], other: Callable[[], object], n_rounds: int) -> Ratio:
    """Return the seconds of one way over those of another; they take turns, in either order."""
    ratios = []
    for i in range(n_rounds + 1):
        seconds = [0.0, 0.0]
        for which in (0, 1) if i % 2 else (1, 0):
            start = time.perf_counter()
            (one, other)[which]()
            seconds[which] = time.perf_counter() - start
        ratios.append(seconds[0] / seconds[1])
    ordered = sorted(ratios[1:])  # the first round warms up
    k = max(0, math.floor((n_rounds - 1.96 * n_rounds**0.5) / 2))
    return Ratio(statistics.median(ordered), ordered[k], ordered[-1 - k])


def show(title: str, values: dict[str, float]) -> None:
    """Print a table, without delay."""
    print(f"| {title} | |\n|---|---|")
    for name, value in values.items():
        print(f"| {name} | {value:.3f} |")
    print(flush=True)
