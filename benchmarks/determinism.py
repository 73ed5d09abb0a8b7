"""Determinism: `python -m benchmarks.determinism [--engine own|vllm] [--dtype D] [--cost]`.

How often a request gets the same tokens, and the same bits, alone and in batches of 2, 8 and 32,
by dtype: the bundled model, greedy, prompts about its facts, unsteered and steered in turn. Its
neighbours have prompts of other lengths and other steering. `--cost` measures instead what
deterministic mode takes on our own engine, on the model of `benchmarks.serving`, in seconds of the
processor, which other work on the machine changes little: run it on one thread
(OMP_NUM_THREADS=1). The ways take turns, and a number is the median of the rounds, after one to
warm up. Results go to docs/results/determinism.json, each beside those of earlier runs. vLLM has an
environment of its own: `.venv-vllm/bin/python -m benchmarks.determinism --engine vllm`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

import juice
from benchmarks import machine
from juice.data.example import ConflictExample
from juice.data.readers.source import read_examples
from juice.engine import Completion, GenerationRequest
from juice.errors import JuiceError

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "determinism.json"
DTYPES, BATCHES = ("float32", "bfloat16", "float16"), (2, 8, 32)
N_TOKENS, N_ROUNDS = 16, 3
# Deterministic mode makes a forward of each row, so fewer show it.
N_REQUESTS = {"default": 16, "deterministic": 4}
# Without the prefix cache, or a batch would find what the request alone has left.
VLLM_ARGS = {"enforce_eager": True, "enable_prefix_caching": False}
WAYS = (("none", 1.0), ("context", 1.0), ("parametric", 1.0), ("context", 0.3))


def requests(model: juice.SteeredModel, n: int, seed: int) -> list[GenerationRequest]:
    """Return requests about facts of the bundled model, of different lengths and steering."""
    rng, examples = Random(seed), read_examples("mini")
    return [
        model.request(
            " ".join(_prompt(rng.choice(examples), rng) for _ in range(rng.choice((1, 1, 2, 4)))),
            steer=target,
            strength=strength if target != "none" else None,
            max_tokens=N_TOKENS,
            ignore_eos=True,
        )
        for target, strength in (WAYS[i % len(WAYS)] for i in range(n))
    ]


def _prompt(example: ConflictExample, rng: Random) -> str:
    return rng.choice([*example.prompts.values()])


def matches(model: juice.SteeredModel, n_requests: int) -> dict[str, dict[str, float]]:
    """Return, by the size of the batch, the shares that are equal to those of requests alone.

    `requests` are those with the same tokens, `tokens` those before the first that differs, and
    `bits` the requests whose log-probabilities are equal, too.
    """
    asked = requests(model, n_requests, seed=0)
    alone = [model.engine.generate([request])[0] for request in asked]
    found = {}
    for n in BATCHES:
        among = []
        for i, request in enumerate(asked):
            batch = requests(model, n - 1, seed=1000 * n + i)
            place = i % n
            batch.insert(place, request)
            among.append(model.engine.generate(batch)[place])
        found[str(n)] = _shares(alone, among)
    return found


def _shares(alone: list[Completion], among: list[Completion]) -> dict[str, float]:
    pairs = list(zip(alone, among, strict=True))
    same = [
        len(list(takewhile(lambda i: a.token_ids[i] == b.token_ids[i], range(N_TOKENS))))  # noqa: B023
        for a, b in pairs
    ]
    equal = [a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in pairs]
    return {
        "requests": statistics.mean(n == N_TOKENS for n in same),
        "tokens": sum(same) / (N_TOKENS * len(pairs)),
        "bits": statistics.mean(equal),
    }


def measured(engine: str, mode: str, dtype: str) -> dict[str, Any]:
    """Return the shares, or why an engine refuses a dtype or the mode."""
    try:
        with juice.load(
            "mini",
            dtype=dtype,
            engine=engine,
            deterministic=mode == "deterministic",
            vllm_args=VLLM_ARGS if engine == "vllm" else None,
        ) as model:
            found: dict[str, Any] = {
                "system_fingerprint": model.engine.system_fingerprint,
                "n_requests": N_REQUESTS[mode],
                "n_tokens": N_TOKENS,
                "machine": machine.describe(),
                **matches(model, N_REQUESTS[mode]),
            }
    except JuiceError as error:
        found = {"refused": str(error)}
    print(engine, mode, dtype, found, flush=True)
    return found


def keep(found: Any, *path: str) -> None:
    """Put what was found at its place in the results, beside what is there."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    place = kept
    for name in path[:-1]:
        place = place.setdefault(name, {})
    place[path[-1]] = found
    RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def costs() -> dict[str, Any]:
    """Return how much deterministic mode does in a second, as shares of what the default does."""
    from benchmarks.serving import N_REQUESTS as N_MOST
    from benchmarks.serving import network, prompts
    from juice.batching import BatchingEngine
    from tests.support import tiny

    model = juice.load(network(), tokenizer=tiny.tiny_tokenizer())
    engines = {
        way: BatchingEngine(model.loaded, deterministic=way == "deterministic")
        for way in ("default", "deterministic")
    }
    found = {}
    for n in (1, 4, N_MOST):
        for what, n_tokens in (("prompts", 1), ("prompts and 16 tokens", 16)):
            asked = [
                GenerationRequest(
                    prompt_ids=own,
                    max_tokens=n_tokens,
                    ignore_eos=True,
                )
                for own in prompts(n)
            ]
            seconds: dict[str, list[float]] = {way: [] for way in engines}
            for _ in range(1 + N_ROUNDS):
                for way, engine in engines.items():
                    start = time.process_time()
                    engine.generate(asked)
                    seconds[way].append(time.process_time() - start)
            default, deterministic = (statistics.median(seconds[way][1:]) for way in engines)
            found[f"{n} at once, {what}"] = round(default / deterministic, 3)
            print(n, what, found[f"{n} at once, {what}"], flush=True)
    return found


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("own", "vllm"), default="own")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--cost", action="store_true")
    chosen = parser.parse_args()
    if chosen.cost:
        keep({"machine": machine.describe(), "rate, of the default's": costs()}, "cost")
        return
    for mode in N_REQUESTS:
        for dtype in chosen.dtype or DTYPES:
            keep(measured(chosen.engine, mode, dtype), chosen.engine, mode, dtype)


if __name__ == "__main__":
    main()
