"""What steering should cost by the scheduler's own model, beside what it did cost.

`python -m benchmarks.cost_model [FILE]` reads what `benchmarks.peers` wrote of a CPU. The model is
`juice.batching.costs`: prompts are bound by the tokens that go through the weights, a step of
decoding by the weights and keys that are read.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import SHAPES, Shape, prompts
from juice.batching.costs import TOKENS_PER_FORWARD, Costs

WRITTEN = Path("docs/results/speed/peers.json")


def predicted(shape: Shape, costs: Costs, n_rows: int, n_tokens: int) -> tuple[float, float]:
    """Return the rates of steered rows against unsteered ones: of prompts, and of steps."""
    lengths = [len(prompt) for prompt in prompts(n_rows)]
    share = len(shape.steered_layers) / shape.n_layers
    of_prompts = sum(costs.of_tokens(length, 0) for length in lengths)
    # Halfway through its tokens; all rows are as long as the longest.
    n_keys = n_rows * (max(lengths) + n_tokens / 2)

    def rate(fixed: float, varying: float) -> float:
        return (fixed + varying) / (fixed + varying * (1 + share))

    return rate(TOKENS_PER_FORWARD, of_prompts), rate(costs.keys_per_forward, n_keys)


def main() -> None:
    """Print the table."""
    import juice
    from tests.support import tiny

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=WRITTEN)
    found: dict[str, Any] = json.loads(parser.parse_args().file.read_text())
    shape = SHAPES[found["shape"]]
    network = shape.network(dtype=getattr(torch, found["dtype"]))
    with juice.load(network, tokenizer=tiny.tiny_tokenizer()) as model:
        costs = Costs.of(model.loaded, model.engine.n_kv_bytes_per_token)
    plain, steered = (
        found["ways"][f"own engine, {how}"]["seconds"] for how in ("unsteered", "steered")
    )
    print("| steered against unsteered | prompts: predicted | measured | off by | ", end="")
    print("tokens: predicted | measured | off by |\n|---|---|---|---|---|---|---|")
    for n_rows in sorted(int(key.split()[1]) for key in plain if key.startswith("step")):
        cells = []
        rates = predicted(shape, costs, n_rows, found["n_tokens"])
        for part, expected in zip(("prompts", "step"), rates, strict=True):
            measured = plain[f"{part} {n_rows}"] / steered[f"{part} {n_rows}"]
            off = abs(measured / expected - 1)
            cells += [f"{expected:.2f}", f"{measured:.2f}", f"{off:.0%}"]
        print(f"| {n_rows} at once | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
