"""Steered generation against the naive two runs and no steering: `python -m benchmarks.generate`.

The naive two runs recompute the whole prompt twice for every token, without a cache, one request at
a time. The ways take turns; a number is the median of the rounds, after one to warm up.

`python -m benchmarks.generate inline MODEL [ROUNDS]` measures heads in the request against the same
heads in a head set, round by round.
"""

from __future__ import annotations

import json
import sys

import juice
from benchmarks import rig
from tests.support import oracle

N_ROUNDS, N_TOKENS, N_REQUESTS = 9, 32, 16
N_PAIRS = 40


def inline(name: str, n_pairs: int = N_PAIRS) -> None:
    """Print the time of requests that bring their heads over that of those that name their set."""
    model = juice.load(name)
    prompts = [e.prompts["coherent"] for e in juice.read_examples("mini")[:N_REQUESTS]]
    options = {"max_tokens": N_TOKENS, "ignore_eos": True}
    ratios = {}
    for target in ("context", "parametric"):
        head_set = model.head_sets.get(target)
        scaled = [
            (layer, head, value)
            for layer, row in head_set.coefficients().items()
            for head, value in enumerate(row.tolist())
            if value
        ]
        given = juice.Steer(coefficients=scaled, method=head_set.method)
        named = juice.Steer(target=target)
        ratio = rig.paired(
            lambda steer=given: model.generate(prompts, steer=steer, **options),
            lambda steer=named: model.generate(prompts, steer=steer, **options),
            n_pairs,
        )
        ratios[target] = {"n_heads": len(scaled), "method": head_set.method, **ratio._asdict()}
    result = {
        "model": model.id,
        "dtype": model.description.dtype,
        "rounds": n_pairs,
        "seconds_inline_over_named": ratios,
        "machine": rig.machine(),
    }
    print(json.dumps(result, indent=1))


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
    if sys.argv[1:2] == ["inline"]:
        inline(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        main()
