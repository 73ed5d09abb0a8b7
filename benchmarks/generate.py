"""Steered generation against the naive two runs and no steering: `python -m benchmarks.generate`.

The naive two runs recompute the whole prompt twice for every token, without a cache, one request at
a time. The ways take turns; a number is the median of the rounds, after one to warm up.
"""

from __future__ import annotations

import json

import juice
from benchmarks import rig
from tests.support import oracle

N_ROUNDS, N_TOKENS, N_REQUESTS = 9, 32, 16


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
    seconds = rig.medians(
        {
            "naive, one request": lambda: oracle.generate(model.loaded.model, ids, heads, N_TOKENS),
            "one pass, one request": lambda: model.generate(
                prompts[0], steer="parametric", **options
            ),
            "unsteered, one request": lambda: model.generate(prompts[0], **options),
            f"one pass, {N_REQUESTS} requests": lambda: model.generate(
                prompts, steer="parametric", **options
            ),
            f"unsteered, {N_REQUESTS} requests": lambda: model.generate(prompts, **options),
        },
        N_ROUNDS,
    )
    print("| | seconds (median) | new tokens/s |\n|---|---|---|")
    rates = {}
    for name, value in seconds.items():
        n = N_REQUESTS if str(N_REQUESTS) in name else 1
        rates[name] = n * N_TOKENS / value
        print(f"| {name} | {value:.3f} | {rates[name]:.0f} |")
    print(json.dumps({"seconds": seconds, "tokens_per_s": rates, "machine": rig.machine()}))


if __name__ == "__main__":
    main()
