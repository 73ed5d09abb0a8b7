"""Both engines beside what else there is: `python -m benchmarks.peers [--device cuda --shape 1b]`.

Every way has a process of its own, and they take turns; a number is the median of the rounds, after
one to warm up. Prompts have 192 to 320 tokens, 32 new tokens each, greedy. What steers, steers a
random head in each layer of a third of the depth. Ways that recompute everything for each token run
one request at a time, so n requests take n times as long. On a CPU each way computes with one
thread.

Prompts are timed by runs of one token each. A step of decoding is timed in runs of 32, by when
tokens came after the last prompt was done.

Memory is the peak while everything runs, beyond what the loaded model takes: of the process on a
CPU, of PyTorch's allocator on a GPU (for vLLM not measured, since it takes what it is given).

On a GPU that has no room for all ways at once they take turns in groups, with transformers'
`generate` in each of them.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, room
from benchmarks.setting import N_TOKENS, ROWS, Setting
from benchmarks.shapes import SHAPES, prompts
from benchmarks.steps import step_s
from benchmarks.turns import Turns
from benchmarks.ways import WAYS, Way
from benchmarks.workers import VLLM_RESTS_WITHIN_S, Worker, answer_questions

VLLM_PYTHON = Path(".venv-vllm/bin/python")
BASE = "generate, static batch"
# How long a way may take to start, or to answer: a GPU is often lent for minutes.
LIMITS_S = {"cpu": 1800.0, "cuda": 300.0}


def work(name: str, setting: Setting) -> None:
    """In a worker: answer `prompts n_rows` and `step n_rows` with seconds, and with bytes.

    These are the peak of memory so far; None where vLLM computes, in processes of its own.
    """
    on_vllm = WAYS[name].on_vllm
    on_gpu = setting.device != "cpu" and not on_vllm

    def make() -> Callable[[str], tuple[float, int | None]]:
        generate = WAYS[name].make(setting)
        before = setting.n_weight_bytes if on_gpu else _peak_bytes()

        def reply(question: str) -> tuple[float, int | None]:
            part, n_rows = question.split()
            asked = prompts(int(n_rows))
            began = time.perf_counter()
            if part == "step":
                seconds = step_s(generate(asked, N_TOKENS))
            else:
                generate(asked, 1)
                seconds = time.perf_counter() - began
            peak = torch.cuda.max_memory_allocated() if on_gpu else _peak_bytes()
            return seconds, None if on_vllm else peak - before

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
    python = _python_of_vllm() if WAYS[name].on_vllm else None
    if python == str(VLLM_PYTHON):
        variables["PYTHONPATH"] = ""  # that environment has what it needs
    return Worker(
        "benchmarks.peers",
        *("--worker", name, "--shape", shape, "--model", setting.folder),
        *("--device", setting.device, "--dtype", setting.dtype),
        *(() if setting.share is None else ("--share", str(setting.share))),
        environment=variables,
        python=python,
        limit_s=LIMITS_S[setting.device.partition(":")[0]],
        rest_s=VLLM_RESTS_WITHIN_S if WAYS[name].on_vllm else 0.0,
    )


def _python_of_vllm() -> str | None:
    """Return the interpreter that has vLLM, this one or that of `make setup-vllm`; None: none."""
    if find_spec("vllm") is not None:
        return sys.executable
    return str(VLLM_PYTHON) if VLLM_PYTHON.exists() else None


def _vllm_version() -> str | None:
    """Return the version of vLLM, whatever its build is called; None where there is none."""
    if (python := _python_of_vllm()) is None:
        return None
    code = "from importlib.metadata import packages_distributions as names, version; "
    command = [python, "-c", f"{code}print(version(names()['vllm'][0]))"]
    asked = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    return asked.stdout.strip() or None


def missing(way: Way) -> str:
    """Return why a way cannot be measured here; empty where it can."""
    if way.on_vllm and _python_of_vllm() is None:
        return "vLLM is not installed"
    return ", ".join(f"{own} is not installed" for own in way.needs if find_spec(own) is None)


def measure(
    shape: str,
    *,
    device: str,
    dtype: str,
    n_rounds: int,
    rows: Iterable[int],
    names: Iterable[str],
    n_at_once: int | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda _found: None,
) -> dict[str, Any]:
    """Return what each way takes, by rows: prompts and totals in seconds, and its memory.

    Args:
        shape: The name of the model's shape.
        device: Where it runs.
        dtype: In which precision.
        n_rounds: Over how many rounds a median is taken.
        rows: How many requests at once.
        names: The ways.
        n_at_once: How many ways may run at once; None: on a CPU all, on a GPU those with room.
        keep: Gets what was found so far, each time that there is more.
    """
    absent = {name: missing(WAYS[name]) for name in names}
    present = [name for name, why in absent.items() if not why]
    described = {**machine.describe(), "vllm": _vllm_version()}
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(SHAPES[shape], folder, device, dtype)
        _save(setting)
        if device != "cpu":
            free, total = room.memory(device)
            n_at_once = n_at_once or room.n_at_once(free, setting)
            setting = replace(setting, share=round(room.n_needed_bytes(setting) / total, 3))
        groups = room.groups(present, BASE, n_at_once)
        turns = Turns(lambda name: worker(name, setting, shape), n_rounds)

        def found() -> dict[str, Any]:
            return {
                "shape": shape,
                "device": device,
                "dtype": dtype,
                "n_tokens": N_TOKENS,
                "n_rounds": n_rounds,
                "window_share": len(SHAPES[shape].steered_layers) / SHAPES[shape].n_layers,
                "groups": groups,
                "ways": turns.ways,
                "not_measured": {name: why for name, why in absent.items() if why} | turns.failed,
                "machine": described,
            }

        try:
            for group in groups:
                turns.admit(group)
                for n_rows in rows:
                    turns.measure(
                        n_rows,
                        takes=lambda name, n=n_rows: WAYS[name].takes(n, device),
                        report=lambda line: print(line, file=sys.stderr, flush=True),
                    )
                    keep(found())
        finally:
            turns.close()
        return found()


def _save(setting: Setting) -> None:
    """Write the model to its folder; nothing of it stays in memory."""
    from tests.support import tiny

    free = shutil.disk_usage(setting.folder).free
    if free < setting.n_weight_bytes:
        raise RuntimeError(
            f"the folder for temporary files has {free >> 20} MiB free; the weights take "
            f"{setting.n_weight_bytes >> 20} MiB: set TMPDIR to a folder that has room for them"
        )
    network = setting.shape.network(setting.device, getattr(torch, setting.dtype))
    network.save_pretrained(setting.folder)
    tiny.tiny_tokenizer().save_pretrained(setting.folder)


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
        n_bytes = own["memory_bytes"]
        memory = "not measured" if n_bytes is None else f"{n_bytes >> 20}"
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
    parser.add_argument("--at-once", type=int, help="else all on a CPU, those with room on a GPU")
    parser.add_argument("--write", type=Path, help="a file for the numbers")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        setting = Setting(
            SHAPES[options.shape], options.model, options.device, options.dtype, options.share
        )
        work(options.worker, setting)
        return

    def keep(found: dict[str, Any]) -> None:
        if options.write:
            options.write.write_text(f"{json.dumps(found, indent=1)}\n")

    found = measure(
        options.shape,
        device=options.device,
        dtype=options.dtype,
        n_rounds=options.rounds,
        rows=options.rows,
        names=options.only,
        n_at_once=options.at_once,
        keep=keep,
    )
    print(tables(found))


if __name__ == "__main__":
    main()
