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

What steering costs on our own engine is shown beside what the scheduler's model of costs expects:
prompts are bound by the tokens that go through the weights, a step of decoding by the weights and
keys that are read.

On a GPU that has no room for all ways at once they take turns in groups, with transformers'
`generate` in each of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import juice
from benchmarks import rig
from benchmarks.rig import (
    MAX_LEN,
    N_TOKENS,
    ROWS,
    SHAPES,
    Arrivals,
    Prompt,
    Setting,
    Shape,
    prompts,
    step_s,
)
from benchmarks.ways import VLLM_RESTS_WITHIN_S, Turns, Worker, answer_questions
from juice.engine.load_options import Limits
from juice.engine.own.scheduler import Costs
from juice.engine.request import Request
from juice.engine.steer import unsteered
from juice.formula import Method
from tests.support import oracle
from tests.support.tiny import tiny_tokenizer

VLLM_PYTHON = Path(".venv-vllm/bin/python")
BASE = "generate, static batch"
# How long a way may take to start, or to answer: a GPU is often lent for minutes.
LIMITS_S = {"cpu": 1800.0, "cuda": 300.0}
# Beside weights, keys and values: CUDA itself, graphs, and the activations of the most prompts.
N_OTHER_BYTES = 3 << 30


def n_needed_bytes(setting: Setting) -> int:
    """Return what one way takes of the device."""
    return setting.n_weight_bytes + setting.n_kv_bytes + N_OTHER_BYTES


def n_that_fit(n_free_bytes: int, setting: Setting) -> int:
    """Return how many ways have room at once."""
    return n_free_bytes // n_needed_bytes(setting)


def in_groups(names: list[str], base: str, n: int | None) -> list[list[str]]:
    """Return the ways in groups of at most n, in order, each with the base if that is among them.

    None: there is room for all.
    """
    others = [name for name in names if name != base]
    if n is None or len(names) <= n:
        return [names]
    size = max(1, n - (base in names))
    parts = [others[i : i + size] for i in range(0, len(others), size)]
    return [[*part, *([base] if base in names else [])] for part in parts]


def memory(device: str) -> tuple[int, int]:
    """Return the bytes that are free on a GPU, and all that it has.

    What this process does not need any more is given back first.
    """
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return free, total


Generate = Callable[[list[Prompt], int], Arrivals]


def own_engine(setting: Setting, method: Method | None) -> Generate:
    """Our own engine; method None: unsteered."""
    return _juice(setting, method, engine="own", device=setting.device)


def on_vllm(setting: Setting, method: Method | None) -> Generate:
    """Steering inside vLLM, with a window for two runs."""
    layers = setting.shape.steered_layers
    window = f"{layers[0]}-{layers[-1]}"
    return _juice(setting, method, engine="vllm", window=window, vllm_args=setting.of_vllm)


def _juice(setting: Setting, method: Method | None, **options: Any) -> Generate:
    limits = Limits(max_batch=ROWS[-1], max_model_len=MAX_LEN, kv_memory_bytes=setting.n_kv_bytes)
    model = juice.load(setting.folder, dtype=setting.dtype, limits=limits, **options)

    def generate(asked: list[Prompt], n: int) -> Arrivals:
        requests = [
            Request.of(
                prompt_ids=prompt,
                max_tokens=n,
                ignore_eos=True,
                steering=setting.shape.steering(i, method) if method else unsteered(),
            )
            for i, prompt in enumerate(asked)
        ]
        return [answer.timing.tokens_s for answer in model.engine.generate(requests)]

    return generate


def plain_vllm(setting: Setting, model_impl: str = "auto") -> Generate:
    """VLLM without us, with its own class of the model or transformers'."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        setting.folder,
        skip_tokenizer_init=True,
        model_impl=model_impl,
        dtype=setting.dtype,
        max_model_len=MAX_LEN,
        max_num_seqs=ROWS[-1],
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=setting.n_kv_bytes,
        **setting.of_vllm,
    )

    def generate(asked: list[Prompt], n: int) -> Arrivals:
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        for i, prompt in enumerate(asked):
            engine.llm_engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, params)
        arrivals: list[list[float]] = [[] for _ in asked]
        while engine.llm_engine.has_unfinished_requests():
            for output in engine.llm_engine.step():
                arrivals[int(output.request_id)].append(time.perf_counter())
        return arrivals

    return generate


def static_batch(setting: Setting) -> Generate:
    """Transformers' `generate` on a left-padded batch."""
    from transformers.generation import BaseStreamer

    model = setting.load()

    class Clock(BaseStreamer):
        """When each token of the batch came; it gets the prompts first."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: object) -> None:  # noqa: ARG002
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def generate(asked: list[Prompt], n: int) -> Arrivals:
        clock = Clock()
        width = max(map(len, asked))
        ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in asked]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in asked]
        with torch.inference_mode():
            model.generate(
                input_ids=torch.tensor(ids, device=setting.device),
                attention_mask=torch.tensor(mask, device=setting.device),
                max_new_tokens=n,
                min_new_tokens=n,
                do_sample=False,
                streamer=clock,
            )
        return [clock.times[1:]] * len(asked)

    return generate


def paged(setting: Setting) -> Generate:
    """Transformers' continuous batching with paged attention, started once."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    model = setting.load()
    model.set_attn_implementation("sdpa")
    given = GenerationConfig(max_new_tokens=N_TOKENS, do_sample=False, eos_token_id=-1)
    memory = ContinuousBatchingConfig(
        num_blocks=ROWS[-1] * MAX_LEN // 256, max_batch_tokens=2048, allow_block_sharing=False
    )
    manager = model.init_continuous_batching(
        generation_config=given, continuous_batching_config=memory
    )
    manager.start()

    def generate(asked: list[Prompt], n: int) -> Arrivals:
        arrivals: dict[str, list[float]] = {
            manager.add_request(list(prompt), max_new_tokens=n, streaming=True): []
            for prompt in asked
        }
        left = len(asked)
        while left:
            found = manager.get_result(timeout=60)
            if found is None or found.error:
                raise RuntimeError(f"continuous batching failed: {found and found.error}")
            arrivals[found.request_id].append(time.perf_counter())
            left -= found.is_finished()
        return list(arrivals.values())

    return generate


def naive(setting: Setting) -> Generate:
    """The two runs as they are defined, with hooks and without a cache."""
    model = setting.load()
    return _one_by_one(
        setting, lambda ids, heads: oracle.steered_logits(model, ids, heads)[-1].argmax()
    )


def nnsight(setting: Setting) -> Generate:
    """Two traces of nnsight for each token, as the method was published."""
    from nnsight import NNsight

    model = NNsight(setting.load())
    d_head = setting.shape.width // setting.shape.n_heads

    def next_token(ids: list[int], heads: dict[tuple[int, int], float]) -> torch.Tensor:
        tokens = torch.tensor([ids], device=setting.device)
        with torch.inference_mode():
            with model.trace(tokens, use_cache=False):
                clean = {}.save()  # type: ignore[attr-defined]  # nnsight adds it
                for layer, _ in heads:
                    clean[layer] = model.model.layers[layer].self_attn.o_proj.input.clone()
            with model.trace(tokens, use_cache=False):
                for (layer, head), beta in heads.items():
                    columns = slice(head * d_head, (head + 1) * d_head)
                    z = model.model.layers[layer].self_attn.o_proj.input
                    z[:, :, columns] += beta * clean[layer][:, :, columns]
                logits = model.lm_head.output.save()
        return logits[0, -1].argmax()

    return _one_by_one(setting, next_token)


def lens(setting: Setting) -> Generate:
    """TransformerLens: one run that records, one with hooks."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    model = setting.load()
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config)

    def next_token(ids: list[int], heads: dict[tuple[int, int], float]) -> torch.Tensor:
        tokens = torch.tensor([ids], device=setting.device)
        names = {layer: f"blocks.{layer}.attn.hook_z" for layer, _ in heads}
        d_head = setting.shape.width // setting.shape.n_heads

        def add(layer: int, head: int, beta: float) -> Callable[..., torch.Tensor]:
            def change(z: torch.Tensor, **_hook: object) -> torch.Tensor:
                flat = z.view(*z.shape[:2], -1)
                columns = slice(head * d_head, (head + 1) * d_head)
                recorded = clean[names[layer]].view(*z.shape[:2], -1)
                flat[..., columns] += beta * recorded[..., columns]
                return z

            return change

        with torch.inference_mode():
            _, clean = bridge.run_with_cache(tokens, names_filter=list(names.values()))
            hooks = [
                (names[layer], add(layer, head, beta)) for (layer, head), beta in heads.items()
            ]
            return bridge.run_with_hooks(tokens, fwd_hooks=hooks)[0, -1].argmax()

    return _one_by_one(setting, next_token)


def _one_by_one(
    setting: Setting, next_token: Callable[[list[int], dict[tuple[int, int], float]], torch.Tensor]
) -> Generate:
    def generate(asked: list[Prompt], n: int) -> Arrivals:
        arrivals = []
        for i, prompt in enumerate(asked):
            ids, heads, times = list(prompt), setting.shape.heads(i), []
            for _ in range(n):
                ids.append(int(next_token(ids, heads)))
                times.append(time.perf_counter())
            arrivals.append(times)
        return arrivals

    return generate


@dataclass(frozen=True)
class Way:
    """A way to generate: how it is made, the packages that it needs, how many rows it is given."""

    make: Callable[[Setting], Generate]
    needs: tuple[str, ...] = ()
    rows: tuple[int, ...] = ROWS
    rows_on_cpu: tuple[int, ...] = ROWS
    on_vllm: bool = False

    def takes(self, n_rows: int, device: str) -> bool:
        """Return whether it is measured with this many rows."""
        return n_rows in self.rows and (device != "cpu" or n_rows in self.rows_on_cpu)


WAYS = {
    "own engine, unsteered": Way(lambda s: own_engine(s, None)),
    "own engine, steered": Way(lambda s: own_engine(s, "juice")),
    "vLLM, plain": Way(plain_vllm, on_vllm=True),
    "vLLM, plain, transformers": Way(lambda s: plain_vllm(s, "transformers"), on_vllm=True),
    "vLLM through JuICE, unsteered": Way(lambda s: on_vllm(s, None), on_vllm=True),
    "vLLM through JuICE, one run": Way(lambda s: on_vllm(s, "june"), on_vllm=True),
    "vLLM through JuICE, steered": Way(lambda s: on_vllm(s, "juice"), on_vllm=True),
    "generate, static batch": Way(static_batch),
    # On a CPU a step of 64 rows takes seconds.
    "transformers' continuous batching": Way(paged, rows_on_cpu=ROWS[:3]),
    "two runs, steered": Way(naive, rows=(1,)),
    "nnsight, steered": Way(nnsight, needs=("nnsight",), rows=(1,)),
    "TransformerLens, steered": Way(lens, needs=("transformer_lens",), rows=(1,)),
}


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
    if name.startswith("vLLM, plain"):
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
    return ", ".join(f"{name} is not installed" for name in way.needs if find_spec(name) is None)


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
    described = {**rig.machine(), "vllm": _vllm_version()}
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(SHAPES[shape], folder, device, dtype)
        _save(setting)
        if device != "cpu":
            free, total = memory(device)
            n_at_once = n_at_once or n_that_fit(free, setting)
            setting = replace(setting, share=round(n_needed_bytes(setting) / total, 3))
        groups = in_groups(present, BASE, n_at_once)
        # A GPU is lent by the minute; on a CPU those that start would share its memory bandwidth.
        n_starting = 1 if device == "cpu" else len(present)
        turns = Turns(lambda name: worker(name, setting, shape), n_rounds, n_starting)

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

        def report(line: str) -> None:
            print(line, file=sys.stderr, flush=True)
            keep(found())

        try:
            for group in groups:
                turns.admit(group)
                for n_rows in rows:
                    turns.measure(
                        n_rows,
                        takes=lambda name, n=n_rows: WAYS[name].takes(n, device),
                        report=report,
                    )
        finally:
            turns.close()
        return found()


def _save(setting: Setting) -> None:
    """Write the model to its folder; nothing of it stays in memory."""
    free = shutil.disk_usage(setting.folder).free
    if free < setting.n_weight_bytes:
        raise RuntimeError(
            f"the folder for temporary files has {free >> 20} MiB free; the weights take "
            f"{setting.n_weight_bytes >> 20} MiB: set TMPDIR to a folder that has room for them"
        )
    network = setting.shape.network(setting.device, getattr(torch, setting.dtype))
    network.save_pretrained(setting.folder)
    tiny_tokenizer().save_pretrained(setting.folder)


def tables(found: dict[str, Any]) -> str:
    """Return the results as Markdown: ratios of rates, prompts and tokens apart, and what it takes.

    The rates are those against `generate`, or against the first way where that was not measured.
    """
    ways = found["ways"]
    base = BASE if BASE in ways else next(iter(ways), BASE)
    rows = sorted({int(key.split()[1]) for way in ways.values() for key in way["seconds"]})
    lines = []
    for title, part in (("prompts", "prompts"), ("tokens after the first", "step")):
        lines += [f"| rate against {base}, {title} | " + " | ".join(map(str, rows)) + " |"]
        lines += ["|---|" + "---|" * len(rows)]
        for name, measured in ways.items():
            cells = []
            for n in rows:
                mine, theirs = (way["seconds"].get(f"{part} {n}") for way in (measured, ways[base]))
                cells.append(f"{theirs / mine:.2f}" if mine and theirs else "")
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["| | ready after (s) | peak memory beyond the model (MiB) |", "|---|---|---|"]
    for name, measured in ways.items():
        n_bytes = measured["memory_bytes"]
        memory = "not measured" if n_bytes is None else f"{n_bytes >> 20}"
        lines.append(f"| {name} | {measured['ready_s']:.1f} | {memory} |")
    lines += [f"\n{name}: not measured ({why})." for name, why in found["not_measured"].items()]
    return "\n".join(lines)


def predicted(shape: Shape, costs: Costs, n_rows: int, n_tokens: int) -> tuple[float, float]:
    """Return the rates of steered rows against unsteered ones: of prompts, and of steps."""
    lengths = [len(prompt) for prompt in prompts(n_rows)]
    share = len(shape.steered_layers) / shape.n_layers
    of_prompts = sum(costs.of_tokens(length, 0) for length in lengths)
    # Halfway through its tokens; all rows are as long as the longest.
    n_keys = n_rows * (max(lengths) + n_tokens / 2)

    def rate(fixed: float, varying: float) -> float:
        return (fixed + varying) / (fixed + varying * (1 + share))

    return rate(costs.tokens_per_forward, of_prompts), rate(costs.keys_per_forward, n_keys)


def costs(found: dict[str, Any]) -> str:
    """Return what steering costs on our own engine beside what its model expects, as Markdown.

    Empty where our own engine was not measured both ways.
    """
    names = [f"own engine, {how}" for how in ("unsteered", "steered")]
    if not all(name in found["ways"] for name in names):
        return ""
    plain, steered = (found["ways"][name]["seconds"] for name in names)
    shape = SHAPES[found["shape"]]
    network = shape.network(found["device"], getattr(torch, found["dtype"]))
    with juice.load(network, tokenizer=tiny_tokenizer()) as model:
        expected_by = Costs.of(model.loaded, model.engine.n_kv_bytes_per_token)
    lines = [
        "| steered against unsteered | prompts: predicted | measured | off by "
        "| tokens: predicted | measured | off by |",
        "|---|---|---|---|---|---|---|",
    ]
    for n_rows in sorted(int(key.split()[1]) for key in plain if key.startswith("step")):
        cells = []
        rates = predicted(shape, expected_by, n_rows, found["n_tokens"])
        for part, expected in zip(("prompts", "step"), rates, strict=True):
            measured = plain[f"{part} {n_rows}"] / steered[f"{part} {n_rows}"]
            off = abs(measured / expected - 1)
            cells += [f"{expected:.2f}", f"{measured:.2f}", f"{off:.0%}"]
        lines.append(f"| {n_rows} at once | " + " | ".join(cells) + " |")
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
    print(f"{tables(found)}\n\n{costs(found)}")


if __name__ == "__main__":
    main()
