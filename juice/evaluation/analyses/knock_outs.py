"""MLP, attention or both removed, one layer at a time (the paper's figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from juice.errors import ExampleError
from juice.evaluation.analyses.inputs import AnalysisInputs
from juice.identification.scored_prompt import scored_prompt
from juice.model.knock_out import Component, knocked_out
from juice.model.loaded import LoadedModel

REMOVED: dict[str, tuple[Component, ...]] = {
    "mlp": ("mlp",),
    "attention": ("attention",),
    "both": ("attention", "mlp"),
}
N_AT_ONCE = 16


def measure(inputs: AnalysisInputs) -> dict[str, Any]:
    """Return the change of p of the parametric answer when components are removed.

    {changes: {conflict type: {removed: {mean: [layer], std: [layer]}}}, n_consistent: {removed: n},
    n_examples}; `n_consistent` counts the layers whose removal raises p under every conflict type.
    """
    examples, layers = inputs.few, inputs.model.loaded.layout.layers
    if not inputs.conflict_types:
        raise ExampleError("the examples share no conflict type")
    changes: dict[str, Any] = {}
    with inputs.progress(
        "removing components", len(inputs.conflict_types) * len(REMOVED) * len(layers)
    ) as advance:
        for conflict_type in inputs.conflict_types:
            prompts = [scored_prompt(inputs.model, e, conflict_type) for e in examples]
            ids, tokens = [p.ids for p in prompts], [p.answer_tokens["parametric"] for p in prompts]
            original = probabilities(inputs.model.loaded, ids, tokens)
            changes[conflict_type] = {}
            for name, components in REMOVED.items():
                mean, std = [], []
                for layer in layers:
                    with inputs.model.loaded.turn, knocked_out(layer, components):
                        change = probabilities(inputs.model.loaded, ids, tokens) - original
                    mean.append(float(change.mean()))
                    std.append(float(change.std(correction=0)))
                    advance(1)
                changes[conflict_type][name] = {"mean": mean, "std": std}
    consistent = {
        name: sum(all(changes[t][name]["mean"][i] > 0 for t in changes) for i in range(len(layers)))
        for name in REMOVED
    }
    return {"changes": changes, "n_consistent": consistent, "n_examples": len(examples)}


@torch.inference_mode()
def probabilities(
    loaded: LoadedModel, prompts: Sequence[tuple[int, ...]], tokens: Sequence[int]
) -> torch.Tensor:
    """Return p of each prompt's token at its last position, float32 [prompts].

    Prompts are right-padded: a causal model does not see what follows them.
    """
    p = []
    with loaded.turn:
        for start in range(0, len(prompts), N_AT_ONCE):
            chunk, wanted = (
                prompts[start : start + N_AT_ONCE],
                torch.tensor(tokens[start : start + N_AT_ONCE], device=loaded.device),
            )
            width = max(map(len, chunk))
            ids = torch.tensor(
                [[*prompt, *[0] * (width - len(prompt))] for prompt in chunk], device=loaded.device
            )
            rows = torch.arange(len(chunk), device=loaded.device)
            last = torch.tensor([len(prompt) - 1 for prompt in chunk], device=loaded.device)
            with loaded.logits.keep(rows, last, width):
                logits = loaded.run(input_ids=ids, use_cache=False).logits[:, 0].float()
            p.append(logits.softmax(-1)[rows, wanted].cpu())
    return torch.cat(p)
