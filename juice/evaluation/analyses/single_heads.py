"""What single heads and layers do: their scores, their removal, and heads that turn.

To remove a head or a component is to set its output to 0. A head is reversed when the effect of its
removal on either answer changes sign between substitution and coherent conflict (the paper's table
1), and consistent when it has one sign under both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from juice.data.example import ConflictExample, judged_types
from juice.errors import ExampleError
from juice.evaluation.analyses.inputs import AnalysisInputs, probed
from juice.formula import CONFLICTS, TARGETS, ConflictType, Target
from juice.identification.examples import scored_prompt
from juice.identification.find import select_heads
from juice.identification.probes import score_heads
from juice.model.definition import PaddedPrompts
from juice.model.loaded import LoadedModel
from juice.model.steering_hooks import Component, knocked_out
from juice.progress import Progress
from juice.steered_model import SteeredModel

N_SCORED_AT_ONCE = 8
N_AT_ONCE = 16
N_TOP = 10
REMOVED: dict[str, tuple[Component, ...]] = {
    "mlp": ("mlp",),
    "attention": ("attention",),
    "both": ("attention", "mlp"),
}


def measure_heads(inputs: AnalysisInputs) -> dict[str, Any]:
    """Return the scores of all heads on the examples that they were found on, and the chosen ones.

    {conflict_types, plus and minus: [type][layer][head], chosen: {plus, minus}, n_examples, alphas}
    """
    examples = inputs.splits.finders_of(inputs.target)
    found = inputs.head_set.identification if inputs.head_set else None
    settings = found if found and found.alphas_plus else inputs.options
    scores = probed(inputs, examples, judged_types(inputs.target, examples), settings)
    if inputs.head_set:
        chosen = inputs.head_set.heads.model_dump(mode="json")
    else:
        plus, minus = select_heads(scores.plus, scores.minus, top_k=inputs.options.top_ks[0])
        chosen = {"plus": plus, "minus": minus}
    return {
        "conflict_types": list(scores.conflict_types),
        "plus": scores.plus.tolist(),
        "minus": scores.minus.tolist(),
        "chosen": chosen,
        "n_examples": len(examples),
        "alphas": [*settings.alphas_plus, *settings.alphas_minus],
    }


def knock_out_scores(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    conflict_types: tuple[ConflictType, ...],
    progress: Progress,
) -> dict[Target, torch.Tensor]:
    """Return the mean change of p_y when a head is removed, for both answers y.

    By the target whose answer is y, float32 [conflict types, layers, heads]. The examples all have
    these conflict types.
    """
    total: dict[Target, torch.Tensor] = {}
    for start in range(0, len(examples), N_SCORED_AT_ONCE):
        chunk = examples[start : start + N_SCORED_AT_ONCE]
        scores = score_heads(
            model,
            chunk,
            targets=dict.fromkeys(TARGETS, conflict_types),
            alphas_plus=(),
            alphas_minus=(-1.0,),
            progress=progress,
        )
        for target in TARGETS:
            total[target] = total.get(target, 0) + scores[target].minus * (
                len(chunk) / len(examples)
            )
    return total


def measure_knock_outs(inputs: AnalysisInputs) -> dict[str, Any]:
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
    """Return p of each prompt's token at its last position, float32 [prompts]."""
    found = []
    for start in range(0, len(prompts), N_AT_ONCE):
        chunk = slice(start, start + N_AT_ONCE)
        p = PaddedPrompts(loaded, prompts[chunk]).logits().softmax(-1)  # [prompts, vocabulary]
        wanted = torch.tensor(tokens[chunk], device=p.device)
        found.append(p.gather(1, wanted[:, None])[:, 0].cpu())
    return torch.cat(found)


def measure_reversals(inputs: AnalysisInputs) -> dict[str, Any]:
    """Return {rows, n_reversed, n_consistent, n_heads, n_examples, changes}.

    `changes` is {answer: [type][layer][head]}, `rows` the ten heads whose removal raises p of the
    context answer most under substitution.
    """
    examples = inputs.few
    if not set(CONFLICTS) <= set(inputs.conflict_types):
        raise ExampleError("reversals need substitution and coherent prompts in every example")
    changes = knock_out_scores(inputs.model, examples, CONFLICTS, inputs.progress)
    removed = changes["context"][0]  # under substitution, [layer, head]
    ranking, n_heads = removed.flatten().argsort(descending=True, stable=True), removed.shape[1]
    rows = [_row(divmod(i, n_heads), changes) for i in ranking[:N_TOP].tolist()]
    consistent = {a: int(((c > 0).all(0) | (c < 0).all(0)).sum()) for a, c in changes.items()}
    return {
        "rows": rows,
        "n_reversed": sum(row["is_reversed"] for row in rows),
        "n_consistent": consistent,
        "n_heads": removed.numel(),
        "n_examples": len(examples),
        "changes": {answer: change.tolist() for answer, change in changes.items()},
    }


def _row(head: tuple[int, int], changes: Mapping[Target, torch.Tensor]) -> dict[str, Any]:
    answers: tuple[Target, ...] = ("context", "parametric")
    values: dict[str, Any] = {
        t: {answer: float(changes[answer][(j, *head)]) for answer in answers}
        for j, t in enumerate(CONFLICTS)
    }
    turned = any(values["substitution"][a] * values["coherent"][a] < 0 for a in answers)
    return {"head": list(head), **values, "is_reversed": turned}
