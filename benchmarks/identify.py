"""Identification against the naive loop: `python -m benchmarks.identify`.

The loop makes a forward for every head and alpha, on the same prompts in the same batches, with
logits at the last position only. Tokens are counted where the work is: they are the positions that
enter an attention and an MLP, over all layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

import juice
from benchmarks import rig
from juice.identification.examples import scored_prompt, usable_examples
from juice.identification.options import IdentificationOptions
from juice.identification.probes import score_heads
from juice.steered_model import SteeredModel
from tests.support.naive_scores import mean_changes

N_REPEATS = 3


@contextmanager
def counted_tokens(model: SteeredModel) -> Iterator[dict[str, int]]:
    """Count the positions that enter the attentions and the MLPs."""
    counts = {"attention": 0, "mlp": 0}

    def count(kind: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            counts[kind] += args[0].shape[:-1].numel()

        return hook

    with ExitStack() as stack:
        for layer in model.loaded.model.model.layers:
            query, up = layer.self_attn.q_proj, layer.mlp.up_proj
            stack.callback(query.register_forward_pre_hook(count("attention")).remove)
            stack.callback(up.register_forward_pre_hook(count("mlp")).remove)
        yield counts


def main() -> None:
    """Measure both ways in turn and print the medians."""
    model = juice.load("mini")
    settings = IdentificationOptions(method="attribution", relation="world_capital")
    examples, _ = usable_examples(model, juice.read_examples("mini"), settings)
    types = ("clean", "substitution", "coherent")

    def ours() -> list[torch.Tensor]:
        scores = score_heads(
            model,
            examples,
            targets={"parametric": types},
            alphas_plus=settings.alphas_plus,
            alphas_minus=settings.alphas_minus,
        )["parametric"]
        return [scores.plus, scores.minus]

    def naive() -> list[torch.Tensor]:
        tables: list[torch.Tensor] = []
        for alphas in (settings.alphas_plus, settings.alphas_minus):
            by_type = []
            for conflict_type in types:
                prompts = [scored_prompt(model, e, conflict_type) for e in examples]
                ids, tokens = (
                    [p.ids for p in prompts],
                    [p.answer_tokens["parametric"] for p in prompts],
                )
                by_type.append(mean_changes(model.loaded.model, ids, tokens, alphas))
            tables.append(torch.stack(by_type))
        return tables

    ways = {"ours": ours, "naive": naive}
    tokens, results = {}, {}
    for way, run in ways.items():
        with counted_tokens(model) as counts:
            results[way] = run()
        tokens[way] = counts
    medians = rig.medians(ways, N_REPEATS)
    difference = max(
        float((a - b).abs().max()) for a, b in zip(results["ours"], results["naive"], strict=True)
    )
    print("| | seconds (median of 3) | attention tokens | MLP tokens |\n|---|---|---|---|")
    for way in ("naive", "ours"):
        print(
            f"| {way} | {medians[way]:.2f} | {tokens[way]['attention']:,} | "
            f"{tokens[way]['mlp']:,} |"
        )
    ratio = medians["naive"] / medians["ours"]
    print(f"\n{ratio:.2f} times faster, largest difference of a score {difference:.1e}")
    print(
        json.dumps(
            {
                "seconds": medians,
                "ratio": ratio,
                "tokens": tokens,
                "difference": difference,
                "machine": rig.machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
