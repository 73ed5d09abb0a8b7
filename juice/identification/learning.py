"""Coefficients for all heads, learned through the dual run (docs/method.md, "Learned").

Adam minimises, over batches of prompts drawn anew at each step,

    mean of -log p(right answer)  +  penalty * sum over heads of |coefficient|

where p is the probability of the answer's first token at the prompt's end. Right is the target's
answer, and on protected prompts what is right without steering. The penalty keeps most heads near
zero; those below SMALLEST are dropped. Coefficients stay within LARGEST. At times examples that are
not learned from are looked at: the best coefficients are kept, and learning stops when they have
not improved for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from juice.data.example import ConflictExample
from juice.errors import NoConsistentHeadError
from juice.head_set import Betas, Head, HeadLists
from juice.identification.candidates import Search
from juice.identification.first_tokens import Asked
from juice.identification.gradients import gradients
from juice.identification.protection import Protection
from juice.identification.unfinished import Unfinished
from juice.identification.validation import taking_turns
from juice.methods import Method, Target
from juice.model.loaded import LoadedModel
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

RATE = 0.1
N_STEPS = 60
N_BATCH = 16  # prompts
N_BETWEEN_LOOKS = 5
PATIENCE = 3  # looks
SMALLEST, LARGEST = 0.1, 4.0
PENALTIES: dict[Target, float] = {"parametric": 0.02, "context": 0.02}


def learn(
    model: SteeredModel,
    target: Target,
    examples: Sequence[ConflictExample],
    held_out: Sequence[ConflictExample],
    *,
    among: HeadLists | None = None,
    method: Method = "juice",
    penalty: float | None = None,
    protection: Protection,
    seed: int = 0,
    progress: Progress = silent,
    unfinished: Unfinished | None = None,
) -> torch.Tensor:
    """Learn the coefficients of all heads toward a target, float32 [n_layers, n_heads].

    Args:
        model: The model.
        target: What to push toward.
        examples: The examples to learn from.
        held_out: Those on which the best coefficients are chosen.
        among: The heads that may have a coefficient, each of its sign; None: all, of either sign.
        method: `juice` for two runs, `june` for one.
        penalty: What a coefficient of 1 costs, in nats; None: the target's own.
        protection: What steering should leave alone.
        seed: Seed of the batches.
        progress: Reports how many steps are done.
        unfinished: Keeps how far learning is at every look, and goes on from there.

    Raises:
        UnsupportedModelError: Gradients do not pass through the model.
    """
    unfinished = unfinished or Unfinished()
    own, others = (
        Search(model, target, read, some, method, protection, silent)
        for read, some in ((examples, examples), (taking_turns(held_out, target), held_out))
    )
    layout, loaded, rng = model.loaded.layout, model.loaded, Random(seed)
    coefficients = torch.zeros(layout.n_layers, layout.n_heads, requires_grad=True)
    optimizer = torch.optim.Adam([coefficients], lr=RATE)
    weight = PENALTIES[target] if penalty is None else penalty
    best, best_step = coefficients.detach().clone(), 0
    most = others.value_of(best)
    low, high = _bounds(coefficients, among)
    key, n_done = f"learning {target} {method}", 0
    if (kept := unfinished.get(key)) is not None:
        n_done, best_step, most = kept["step"], kept["best_step"], kept["most"]
        best = torch.tensor(kept["best"])
        coefficients.data.copy_(torch.tensor(kept["coefficients"]))
        optimizer.state[coefficients] = {
            name: torch.tensor(value) for name, value in kept["optimizer"].items()
        }
    with progress(f"learning coefficients toward {target}", N_STEPS) as advance:
        for step in range(1, N_STEPS + 1):
            batch = rng.sample(own.prompts, min(N_BATCH, len(own.prompts)))
            if step <= n_done:  # drawn once more, for the draws that follow
                advance(1)
                continue
            slope = mean_slope(loaded, batch, coefficients, method)
            coefficients.grad = slope + weight * coefficients.detach().sign()
            optimizer.step()
            with torch.no_grad():
                coefficients.clamp_(low, high)
            advance(1)
            if step % N_BETWEEN_LOOKS:
                continue
            kept = coefficients.detach()
            kept = torch.where(kept.abs() >= (SMALLEST if among is None else 0), kept, 0.0)
            if (value := others.value_of(kept)) > most:
                best, most, best_step = kept, value, step
            elif step - best_step >= PATIENCE * N_BETWEEN_LOOKS:
                break
            state = optimizer.state[coefficients]
            unfinished.put(
                key,
                {
                    "step": step,
                    "best_step": best_step,
                    "most": most,
                    "best": best.tolist(),
                    "coefficients": coefficients.tolist(),
                    "optimizer": {name: value.tolist() for name, value in state.items()},
                },
            )
    return best


def mean_slope(
    loaded: LoadedModel, batch: Sequence[Asked], coefficients: torch.Tensor, method: Method
) -> torch.Tensor:
    """Return the derivatives of the mean -log p(right answer), float32 [n_layers, n_heads]."""

    def surprise(logits: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        tokens = torch.tensor([batch[i][1] for i in chosen], device=logits.device)
        return torch.nn.functional.cross_entropy(logits, tokens, reduction="none")

    prompts = [ids for ids, _ in batch]
    return gradients(loaded, prompts, surprise, coefficients, method=method).by_head.mean(0)


def _bounds(
    coefficients: torch.Tensor, among: HeadLists | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest value of each coefficient."""
    if among is None:
        high = torch.full_like(coefficients, LARGEST)
        return -high, high
    low, high = torch.zeros(2, *coefficients.shape)
    for head in among.plus:
        high[head] = LARGEST
    for head in among.minus:
        low[head] = -LARGEST
    return low, high


def heads_of(coefficients: torch.Tensor, among: HeadLists | None = None) -> tuple[HeadLists, Betas]:
    """Return the heads and their betas.

    Args:
        coefficients: float32 [n_layers, n_heads].
        among: The heads; None: those whose coefficients are not zero, strongest first.

    Raises:
        NoConsistentHeadError: None is left.
    """
    if among is not None:
        plus, minus = (
            tuple(float(coefficients[head]) for head in own) for own in (among.plus, among.minus)
        )
        return among, Betas(plus=plus, minus=minus)
    kept = [
        (Head(layer, index), float(coefficients[layer, index]))
        for layer, index in coefficients.nonzero().tolist()
    ]
    if not kept:
        raise NoConsistentHeadError(
            "no head's coefficient stayed away from zero; lower the penalty (--penalty), or give "
            "more examples (--n-examples)"
        )
    kept.sort(key=lambda pair: -abs(pair[1]))
    heads = HeadLists(
        plus=tuple(head for head, beta in kept if beta > 0),
        minus=tuple(head for head, beta in kept if beta < 0),
    )
    return heads_of(coefficients, heads)
