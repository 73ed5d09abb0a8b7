"""Exactness inside vLLM on a GPU: `python -m benchmarks.gpu_vllm`, a part of `make gpu`.

Tiny random models run on both of vLLM's model runners: eager, with graphs of pieces and of whole
steps, with a twin and without one. Each start has the check that every start has. Then requests of
all kinds run together, twice, so that what is cached is shared, and every log-probability is held
against two uncached runs of transformers' own model in float32 on the processor. Kernels on GPUs
multiply in fewer bits, so the steered requests' largest difference stands beside that of unsteered
ones.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import juice
from benchmarks import rig
from benchmarks.ways import Worker, answer_questions
from juice.engine.answer import Completion
from juice.engine.load_options import Limits
from juice.errors import JuiceError
from tests.support import oracle, tiny
from tests.support.mixed import mixed_requests
from tests.support.on_vllm import wide

RUNNERS = {"V2": "1", "V1": "0"}
HOWS: dict[str, dict[str, Any]] = {
    "default": {},
    "eager": {"enforce_eager": True},
    "pieces": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "whole steps": {"compilation_config": {"cudagraph_mode": "FULL"}},
    "whole steps, not compiled": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}},
}
ARCHITECTURES = ("Llama", "Gemma 2", "GPT-2")
DTYPES = ("float32", "bfloat16")
LIMITS = Limits(max_batch=8, max_model_len=128, max_prefill_tokens=48, kv_memory_bytes=64 << 20)
N_REQUESTS = 24
SHARE = 0.03  # of a GPU's memory, for each start: many run at once
START_LIMIT_S = 240.0
FACTS = (
    "runner",
    "attention",
    "compiled",
    "twin",
    "compile_s",
    "n_compiled_bytes",
    "n_graph_bytes",
)


@dataclass(frozen=True)
class Start:
    """A start of vLLM: its model runner, what it compiles and captures, and the model."""

    runner: str
    how: str
    twin: bool
    architecture: str
    dtype: str

    @property
    def words(self) -> str:
        """The start in words."""
        twin = "" if self.twin else ", no twin"
        return f"{self.architecture}, {self.dtype}, {self.runner}, {self.how}{twin}"


def starts() -> list[Start]:
    """Return every start that is tried; without a twin in the default way alone."""
    return [
        Start(runner, how, twin, architecture, dtype)
        for how in HOWS
        for runner in RUNNERS
        for twin in ((True, False) if how == "default" else (True,))
        for architecture in ARCHITECTURES
        for dtype in DTYPES
    ]


def exactness(chosen: Sequence[Start], n_at_once: int) -> Iterator[dict[str, Any]]:
    """Yield what each start gave, in the order in which they are done."""
    with ThreadPoolExecutor(n_at_once) as pool:
        for done in as_completed([pool.submit(found_by, start) for start in chosen]):
            yield done.result()


def found_by(start: Start) -> dict[str, Any]:
    """Return whether a start in a process of its own is exact, its facts and its differences."""
    asked = {"start": start.words, "runner": start.runner, "how": start.how, "twin": start.twin}
    try:
        process = Worker(
            "benchmarks.gpu_vllm",
            *("--worker", start.architecture, "--dtype", start.dtype, "--how", start.how),
            *(() if start.twin else ("--no-twin",)),
            environment={
                "VLLM_USE_V2_MODEL_RUNNER": RUNNERS[start.runner],
                "VLLM_LOGGING_LEVEL": "ERROR",
            },
            limit_s=START_LIMIT_S,
        )
    except RuntimeError as error:
        return {**asked, "exact": False, "reason": str(error)}
    try:
        return {**asked, **process.ask("differences"), "ready_s": round(process.ready_s, 1)}
    except RuntimeError as error:
        return {**asked, "exact": False, "reason": str(error)}
    finally:
        process.close()


def work(architecture: str, dtype: str, how: str, *, twin: bool) -> None:
    """In a worker: start vLLM, and answer with what it gave."""
    network = wide(architecture).build()
    network.set_attn_implementation("eager")  # others leave out Gemma 2's soft caps
    folder = tiny.save(Path(tempfile.mkdtemp()), network)
    answer_questions(lambda: lambda _: differences(network, folder, dtype, how, twin=twin))


def differences(
    network: PreTrainedModel, folder: Path, dtype: str, how: str, *, twin: bool
) -> dict[str, Any]:
    """Return whether the check at the start passes, and how far requests are from the two runs."""
    try:
        model = juice.load(
            folder, dtype=dtype, engine="vllm", window="all", twin=twin, limits=LIMITS,
            vllm_args={"gpu_memory_utilization": SHARE, **HOWS[how]},
        )  # fmt: skip
    except JuiceError as error:
        return {"exact": False, "reason": str(error)}
    mixed = mixed_requests(0, N_REQUESTS)
    requests = [request.with_options(watch=()) for request, _, _ in mixed]
    largest = {"unsteered": 0.0, "one run": 0.0, "two runs": 0.0}
    with model:
        facts = {name: model.engine.details.get(name) for name in FACTS}
        for completions in [model.engine.generate(requests) for _ in range(2)]:
            for completion, (request, heads, method) in zip(completions, mixed, strict=True):
                steered = "one run" if method == "june" else "two runs"
                kind = steered if heads else "unsteered"
                apart = furthest(network, list(request.prompt_ids), completion, heads, method)
                largest[kind] = max(largest[kind], apart)
    return {"exact": True, "reason": None, "facts": facts, "largest_differences": largest}


def furthest(
    network: PreTrainedModel,
    prompt: list[int],
    completion: Completion,
    heads: dict[tuple[int, int], float],
    method: str,
) -> float:
    """Return the largest difference of a token's log-probability from that of the two runs."""
    tokens = list(completion.token_ids)
    logits = oracle.steered_logits(network, prompt + tokens, heads, method=method)
    logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)[torch.arange(len(tokens)), tokens]
    return float((torch.tensor(completion.logprobs) - logprobs).abs().max())


def main() -> None:
    """Check, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", nargs="*", choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=DTYPES)
    parser.add_argument("--runners", nargs="*", choices=RUNNERS, default=list(RUNNERS))
    parser.add_argument("--hows", nargs="*", choices=HOWS, default=list(HOWS))
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="at once")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    parser.add_argument("--how", help=argparse.SUPPRESS)
    parser.add_argument("--no-twin", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.dtype, options.how, twin=not options.no_twin)
        return
    chosen = [
        start
        for start in starts()
        if start.architecture in options.architectures
        and start.dtype in options.dtypes
        and start.runner in options.runners
        and start.how in options.hows
    ]
    result: dict[str, Any] = {"machine": rig.machine(), "starts": []}
    for found in exactness(chosen, options.processes):
        print(json.dumps(found), flush=True)
        result["starts"].append(found)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
