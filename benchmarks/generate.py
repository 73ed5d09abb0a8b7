"""Steered generation against the naive two runs and no steering: `python -m benchmarks.generate`.

The naive two runs recompute the whole prompt twice for every token, without a cache, one request at
a time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import juice
from benchmarks import machine
from tests.support import oracle

N_REPEATS, N_TOKENS, N_REQUESTS = 5, 32, 16


def median_seconds(run: Callable[[], object], n: int = N_REPEATS) -> float:
    """Return the median seconds of n runs, after one to warm up."""
    run()
    times = []
    for _ in range(n):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def main() -> None:
    """Measure and print."""
    model = juice.load("mini")
    prompts = [e.prompts["coherent"] for e in juice.read_examples("mini")[:N_REQUESTS]]
    options = {"max_tokens": N_TOKENS, "ignore_eos": True}
    steering = model.resolve(juice.Steer(target="parametric"))
    heads = {
        (layer, h): float(b)
        for layer, row in steering.coefficients.items()
        for h, b in enumerate(row.tolist())
        if b
    }
    ids = list(model.tokenize(prompts[0]))
    seconds = {
        "naive, one request": median_seconds(
            lambda: oracle.generate(model.loaded.model, ids, heads, N_TOKENS), n=3
        ),
        "one pass, one request": median_seconds(
            lambda: model.generate(prompts[0], steer="parametric", **options)
        ),
        "unsteered, one request": median_seconds(lambda: model.generate(prompts[0], **options)),
        f"one pass, {N_REQUESTS} requests": median_seconds(
            lambda: model.generate(prompts, steer="parametric", **options)
        ),
        f"unsteered, {N_REQUESTS} requests": median_seconds(
            lambda: model.generate(prompts, **options)
        ),
    }
    print("| | seconds (median) | new tokens/s |\n|---|---|---|")
    rates = {}
    for name, value in seconds.items():
        n = N_REQUESTS if str(N_REQUESTS) in name else 1
        rates[name] = n * N_TOKENS / value
        print(f"| {name} | {value:.3f} | {rates[name]:.0f} |")
    print(json.dumps({"seconds": seconds, "tokens_per_s": rates, "machine": machine.describe()}))


if __name__ == "__main__":
    main()
