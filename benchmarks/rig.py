"""What every benchmark stands on: the machine, the models, and processes that take turns.

The machine that numbers were measured on is described by its parts and versions, and nothing that
names it. Models are Llamas of random weights, with their prompts and their steering. What is
compared takes turns in one run, each after one round to warm up, and a number is the median of the
rounds; engines have a process each, and one that fails, ends or hangs takes nothing else with it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
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


# One that takes longer hangs.
LIMIT_S = 1800.0
# What a process has to end by itself, and then its memory to be free again.
ENDS_WITHIN_S = 15.0
# vLLM's processes poll for a second after their work, and take processors from who comes next.
VLLM_RESTS_WITHIN_S = 1.5


class Worker:
    """A process that runs what it is asked to, and measures it.

    Args:
        module: What `python -m` runs; it calls `answer_questions`.
        arguments: Its arguments.
        environment: Variables beside those of this process.
        python: The interpreter; None: this one.
        limit_s: How long it may take until it is ready, and for an answer.
        rest_s: How long its own processes may still compute after an answer.

    Raises:
        RuntimeError: It failed, or ended, or took too long, before it was ready.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        python: str | None = None,
        limit_s: float = LIMIT_S,
        rest_s: float = 0.0,
    ) -> None:
        began = time.perf_counter()
        self._limit_s, self._rest_s = limit_s, rest_s
        self._process = subprocess.Popen(  # noqa: S603 -- our own command
            [python or sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # so that its own processes end with it
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        self.ready_s = time.perf_counter() - began

    def ask(self, question: str) -> Any:
        """Return the answer to a question, such as the seconds that a way takes.

        Raises RuntimeError where it failed, ended, or took too long.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which the answer reports
            self._process.stdin.write(f"{question}\n")
            self._process.stdin.flush()
        return self._answer()

    def rest(self) -> None:
        """Wait until it takes no processor from who comes next."""
        time.sleep(self._rest_s)

    def close(self) -> None:
        """End the process and those that it started, and wait until they are gone."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDS_WITHIN_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        until = time.monotonic() + ENDS_WITHIN_S
        while self._signal(0) and time.monotonic() < until:
            time.sleep(0.05)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()

    def _signal(self, number: int) -> bool:
        """Signal all its processes; return whether there are any."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        began = time.monotonic()
        timer = Timer(self._limit_s, self._signal, [signal.SIGKILL])
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if line:
            answer = json.loads(line)
            if "error" in answer:
                raise RuntimeError(answer["error"])
            return answer["answer"]
        if time.monotonic() - began >= self._limit_s:
            raise RuntimeError(f"it took longer than {self._limit_s:g} s")
        raise RuntimeError(f"its process ended with status {self._process.wait()}")


def answer_questions(make: Callable[[], Callable[[str], Any]]) -> None:
    """In a worker: make the engine, then answer each line of standard input.

    A question is answered by what is returned, or by the seconds that it took where that is None.
    A failure is an answer too: its reason goes to the one who asked, its traceback to the log.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is no answer

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=channel, flush=True)

    try:
        reply = make()
    except Exception as error:
        traceback.print_exc()
        say(error=_reason(error))
        raise SystemExit(1) from None
    say(answer="ready")
    for line in sys.stdin:
        began = time.perf_counter()
        try:
            found = reply(line.strip())
        except Exception as error:
            traceback.print_exc()
            say(error=_reason(error))
        else:
            say(answer=time.perf_counter() - began if found is None else found)


def _reason(error: Exception) -> str:
    """Return the kind of an error and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class Turns:
    """The ways that run, and what was found of each.

    Args:
        start: Starts a way.
        n_rounds: Over how many rounds a median is taken; one to warm up goes before them.
        n_starting: How many ways start at once.
    """

    def __init__(self, start: Callable[[str], Worker], n_rounds: int, n_starting: int = 1) -> None:
        self.ways: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self._start, self._n_rounds, self._n_starting = start, n_rounds, n_starting
        self._workers: dict[str, Worker] = {}
        self._times: dict[str, dict[str, list[float]]] = {}

    def admit(self, group: Iterable[str]) -> None:
        """Let the ways of a group run, and no others; one that runs already goes on."""
        names = [name for name in group if name not in self.failed]
        for name in [running for running in self._workers if running not in names]:
            self._workers.pop(name).close()
        with ThreadPoolExecutor(self._n_starting) as pool:
            starts = {
                name: pool.submit(self._start, name) for name in names if name not in self._workers
            }
        for name, start in starts.items():
            try:
                self._workers[name] = start.result()
            except RuntimeError as error:
                self.failed[name] = f"it did not start: {error}"
                continue
            ready_s = round(self._workers[name].ready_s, 2)
            self.ways[name] = {"ready_s": ready_s, "memory_bytes": None, "seconds": {}}
            self._times[name] = {}

    def measure(
        self, n_rows: int, takes: Callable[[str], bool], report: Callable[[str], None]
    ) -> None:
        """Ask each way that takes so many rows, in turns."""
        parts = (f"prompts {n_rows}", f"step {n_rows}")
        for round_number in range(self._n_rounds + 1):
            what = f"round {round_number} of {self._n_rounds}" if round_number else "warm-up"
            report(f"{n_rows} at once: {what}")
            for name in filter(takes, tuple(self._workers)):
                try:
                    answers = [self._workers[name].ask(part) for part in parts]
                except RuntimeError as error:
                    self._fail(name, f"with {n_rows} at once it failed: {error}", parts)
                    continue
                self._workers[name].rest()
                self.ways[name]["memory_bytes"] = answers[-1][1]
                if round_number:
                    for part, (seconds, _) in zip(parts, answers, strict=True):
                        self._times[name].setdefault(part, []).append(seconds)
            for name, times in self._times.items():
                self.ways[name]["seconds"] = {
                    part: round(statistics.median(taken), 5) for part, taken in times.items()
                }

    def close(self) -> None:
        """End all ways."""
        while self._workers:
            self._workers.popitem()[1].close()

    def _fail(self, name: str, reason: str, parts: Iterable[str]) -> None:
        self.failed[name] = reason
        self._workers.pop(name).close()
        for part in parts:
            self._times[name].pop(part, None)
