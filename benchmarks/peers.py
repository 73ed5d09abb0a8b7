"""Both engines beside what else there is: `python -m benchmarks.peers [--device cuda --shape 1b]`.

Every way has a process of its own, and they take turns; a number is the median of the rounds, after
one to warm up. Prompts have 192 to 320 tokens, 32 new tokens each, greedy. What steers, steers a
random head in each layer of a third of the depth. Ways that recompute everything for each token run
one request at a time, so n requests take n times as long. On a CPU each way computes with one
thread.

A decode step's time is that of a whole run less that of the prompts alone, in the same round, for
each token after the first.
Memory is the peak while everything runs, beyond what the loaded model takes: of the process on a
CPU, of PyTorch's allocator on a GPU (for vLLM not measured, since it takes what it is given).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.shapes import SHAPES, prompts
from benchmarks.ways import N_TOKENS, ROWS, WAYS, Setting, Way
from benchmarks.workers import Worker, answer_questions

VLLM_PYTHON = Path(".venv-vllm/bin/python")
BASE = "generate, static batch"


def work(name: str, setting: Setting) -> None:
    """In a worker: answer `n_rows n_tokens` with seconds, and `memory` with bytes."""

    def make() -> Callable[[str], float | None]:
        generate, on_gpu = WAYS[name].make(setting), setting.device != "cpu"
        if on_gpu:
            torch.cuda.synchronize()
        before = torch.cuda.max_memory_allocated() if on_gpu else _peak_bytes()

        def reply(question: str) -> float | None:
            if question == "memory":
                return (torch.cuda.max_memory_allocated() if on_gpu else _peak_bytes()) - before
            n_rows, n_tokens = map(int, question.split())
            generate(prompts(n_rows), n_tokens)
            if on_gpu:
                torch.cuda.synchronize()
            return None

        return reply

    answer_questions(make)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def worker(name: str, setting: Setting, shape: str) -> Worker:
    """Return a way in a process of its own."""
    variables = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    if name == "vLLM, plain":
        variables["VLLM_PLUGINS"] = "none"
    if setting.device == "cpu":
        # What vLLM takes of two cores by itself: it leaves one to its other process.
        variables["OMP_NUM_THREADS"] = "1"
    python = None
    if WAYS[name].on_vllm and find_spec("vllm") is None:
        python = str(VLLM_PYTHON)
    return Worker(
        "benchmarks.peers",
        *("--worker", name, "--shape", shape, "--model", setting.folder),
        *("--device", setting.device, "--dtype", setting.dtype),
        environment=variables,
        python=python,
    )


def missing(way: Way) -> str:
    """Return why a way cannot be measured here; empty where it can."""
    if way.on_vllm and find_spec("vllm") is None and not VLLM_PYTHON.exists():
        return "vLLM is not installed"
    return ", ".join(f"{own} is not installed" for own in way.needs if find_spec(own) is None)


def measure(
    shape: str, *, device: str, dtype: str, n_rounds: int, rows: Iterable[int], names: Iterable[str]
) -> dict[str, Any]:
    """Return what each way takes, by rows: prompts and totals in seconds, and its memory."""
    from tests.support import tiny

    folder = tempfile.mkdtemp()
    setting = Setting(SHAPES[shape], folder, device, dtype)
    SHAPES[shape].network(device, getattr(torch, dtype)).save_pretrained(folder)
    tiny.tiny_tokenizer().save_pretrained(folder)
    absent = {name: missing(WAYS[name]) for name in names}
    workers, failed = {}, {name: why for name, why in absent.items() if why}
    for name in (name for name, why in absent.items() if not why):
        try:
            workers[name] = worker(name, setting, shape)
        except RuntimeError as error:
            failed[name] = f"it did not start: {error}"
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in workers}
    for n_rows in rows:
        for round_number in range(n_rounds + 1):
            what = f"round {round_number} of {n_rounds}" if round_number else "warm-up"
            print(f"{n_rows} at once: {what}", file=sys.stderr)
            for name, engine in workers.items():
                if not WAYS[name].takes(n_rows, device):
                    continue
                prompts_s, total_s = (engine.ask(f"{n_rows} {n}") for n in (1, N_TOKENS))
                if round_number:
                    own = seconds[name]
                    own.setdefault(f"prompts {n_rows}", []).append(prompts_s)
                    step_s = (total_s - prompts_s) / (N_TOKENS - 1)
                    own.setdefault(f"step {n_rows}", []).append(step_s)
    found = {
        name: {
            "ready_s": round(engine.ready_s, 2),
            "memory_bytes": int(engine.ask("memory")),
            "seconds": {
                key: round(statistics.median(own), 5) for key, own in seconds[name].items()
            },
        }
        for name, engine in workers.items()
    }
    for engine in workers.values():
        engine.close()
    return {
        "shape": shape,
        "device": device,
        "dtype": dtype,
        "n_tokens": N_TOKENS,
        "window_share": len(SHAPES[shape].steered_layers) / SHAPES[shape].n_layers,
        "ways": found,
        "not_measured": failed,
        "machine": machine.describe(),
    }


def tables(found: dict[str, Any]) -> str:
    """Return the results as Markdown: ratios of rates, prompts and tokens apart, and what it takes.

    The rates are those against `generate`, or against the first way where that was not measured.
    """
    ways = found["ways"]
    base = BASE if BASE in ways else next(iter(ways), BASE)
    rows = sorted({int(key.split()[1]) for own in ways.values() for key in own["seconds"]})
    lines = []
    for title, part in (("prompts", "prompts"), ("tokens after the first", "step")):
        lines += [f"| rate against {base}, {title} | " + " | ".join(map(str, rows)) + " |"]
        lines += ["|---|" + "---|" * len(rows)]
        for name, own in ways.items():
            cells = []
            for n in rows:
                mine, theirs = (way["seconds"].get(f"{part} {n}") for way in (own, ways[base]))
                cells.append(f"{theirs / mine:.2f}" if mine and theirs else "")
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["| | ready after (s) | peak memory beyond the model (MiB) |", "|---|---|---|"]
    for name, own in ways.items():
        memory = "not measured" if name.startswith("vLLM") else f"{own['memory_bytes'] >> 20}"
        lines.append(f"| {name} | {own['ready_s']:.1f} | {memory} |")
    lines += [f"\n{name}: not measured ({why})." for name, why in found["not_measured"].items()]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--only", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--write", type=Path, help="a file for the numbers")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        setting = Setting(SHAPES[options.shape], options.model, options.device, options.dtype)
        work(options.worker, setting)
        return
    found = measure(
        options.shape,
        device=options.device,
        dtype=options.dtype,
        n_rounds=options.rounds,
        rows=options.rows,
        names=options.only,
    )
    print(tables(found))
    if options.write:
        options.write.write_text(f"{json.dumps(found, indent=1)}\n")


if __name__ == "__main__":
    main()
