"""Head sets with a beta for each head, learned through the dual run (docs/method.md, "Learned").

Adam minimises, over batches of prompts drawn anew at each step,

    mean of -log p(right answer)  +  penalty * sum over heads of |coefficient|

where p is the probability of the answer's first token at the prompt's end. Right is the target's
answer, and on protected prompts what is right without steering. The penalty keeps most heads near
zero; those below SMALLEST are dropped. Coefficients stay within LARGEST. At times examples that are
not learned from are looked at: the best coefficients are kept, and learning stops when they have
not improved for a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch

from juice.data.example import ConflictExample
from juice.errors import NoConsistentHeadError
from juice.formula import Method
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Betas, Head, HeadLists, HeadScores, Methods
from juice.identification.attribution import gradients
from juice.identification.examples import taking_turns
from juice.identification.first_tokens import Asked
from juice.identification.task import Task
from juice.identification.tune import N_READ, Search
from juice.model.loaded import LoadedModel
from juice.progress import silent

RATE = 0.1
N_STEPS = 60
N_BATCH = 16  # prompts
N_BETWEEN_LOOKS = 5
PATIENCE = 3  # looks
SMALLEST, LARGEST = 0.1, 4.0
PENALTY = 0.02


def learn(
    task: Task,
    examples: Sequence[ConflictExample],
    held_out: Sequence[ConflictExample],
    *,
    among: HeadLists | None = None,
    method: Method = "juice",
) -> torch.Tensor:
    """Learn the coefficients of all heads toward a target, float32 [n_layers, n_heads].

    How far it is at every look is kept, and learning goes on from there. The best coefficients are
    those that do best on the examples held out; with `among`, only these heads have any, each of
    its sign. Raises UnsupportedModelError where gradients do not pass through the model.
    """
    model, target = task.model, task.target
    quiet = replace(task, progress=silent)
    prompts = Search(quiet, method, examples, examples).prompts
    looked_at = Search(quiet, method, taking_turns(held_out, target), held_out)
    layout, rng = model.loaded.layout, Random(task.options.seed)
    penalty = PENALTY if task.options.penalty is None else task.options.penalty
    smallest = SMALLEST if among is None else 0.0
    state = _State(torch.zeros(layout.n_layers, layout.n_heads), looked_at)
    low, high = _bounds(state.coefficients, among)
    key = f"learning {target} {method}"
    if (kept := task.unfinished.get(key)) is not None:
        state.restore(kept)
    n_done = state.step
    with task.progress(f"learning coefficients toward {target}", N_STEPS) as advance:
        for step in range(1, N_STEPS + 1):
            batch = rng.sample(prompts, min(N_BATCH, len(prompts)))
            if step > n_done:  # else only drawn once more, for the draws that follow
                slope = mean_slope(model.loaded, batch, state.coefficients, method)
                state.descend(slope, penalty, low, high)
            advance(1)
            if step <= n_done or step % N_BETWEEN_LOOKS:
                continue
            if not state.look(step, looked_at, smallest):
                break
            task.unfinished.put(key, state.to_plain())
    return state.best


class _State:
    """The coefficients and the best so far, float32 [n_layers, n_heads], and Adam's moments."""

    def __init__(self, zeros: torch.Tensor, looked_at: Search) -> None:
        self.coefficients = zeros.clone().requires_grad_()
        self.optimizer = torch.optim.Adam([self.coefficients], lr=RATE)
        self.best, self.most = zeros, looked_at.value_of(zeros)
        self.step = self.best_step = 0

    def descend(
        self, slope: torch.Tensor, penalty: float, low: torch.Tensor, high: torch.Tensor
    ) -> None:
        """Take a step down the slope and the penalty, within the bounds."""
        self.coefficients.grad = slope + penalty * self.coefficients.detach().sign()
        self.optimizer.step()
        with torch.no_grad():
            self.coefficients.clamp_(low, high)

    def look(self, step: int, looked_at: Search, smallest: float) -> bool:
        """Keep the coefficients if they are the best; return False to stop for want of better."""
        self.step, current = step, self.coefficients.detach()
        current = torch.where(current.abs() >= smallest, current, 0.0)
        if (value := looked_at.value_of(current)) > self.most:
            self.best, self.most, self.best_step = current, value, step
            return True
        return step - self.best_step < PATIENCE * N_BETWEEN_LOOKS

    def to_plain(self) -> dict[str, Any]:
        """Return the state as JSON has it."""
        moments = self.optimizer.state[self.coefficients]
        return {
            "step": self.step,
            "best_step": self.best_step,
            "most": self.most,
            "best": self.best.tolist(),
            "coefficients": self.coefficients.tolist(),
            "optimizer": {name: value.tolist() for name, value in moments.items()},
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on from a state that `to_plain` gave."""
        self.step, self.best_step, self.most = kept["step"], kept["best_step"], kept["most"]
        self.best = torch.tensor(kept["best"])
        self.coefficients.data.copy_(torch.tensor(kept["coefficients"]))
        self.optimizer.state[self.coefficients] = {
            name: torch.tensor(value) for name, value in kept["optimizer"].items()
        }


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
    """Return the heads and their betas in a table [n_layers, n_heads], strongest first.

    The heads are those of `among`, in its order; None: those whose coefficients are not zero.
    Raises NoConsistentHeadError where none is left.
    """
    heads = among
    if heads is None:
        kept = sorted(
            (Head(*place) for place in coefficients.nonzero().tolist()),
            key=lambda head: -abs(float(coefficients[head])),
        )
        if not kept:
            raise NoConsistentHeadError(
                "no head's coefficient stayed away from zero; lower the penalty (--penalty), or "
                "give more examples (--n-examples)"
            )
        heads = HeadLists(
            plus=tuple(head for head in kept if coefficients[head] > 0),
            minus=tuple(head for head in kept if coefficients[head] < 0),
        )
    plus, minus = (
        tuple(float(coefficients[head]) for head in signed) for signed in (heads.plus, heads.minus)
    )
    return heads, Betas(plus=plus, minus=minus)


def learn_set(task: Task, held_out: Sequence[ConflictExample]) -> HeadSet:
    """Learn a head set, with betas for each method that the task asks for; the first chooses.

    The best coefficients are chosen on examples held out; without any, on a quarter of the task's.

    Raises:
        NoConsistentHeadError: No head keeps a coefficient.
        UnsupportedModelError: Gradients do not pass through the model.
    """
    rng, examples = Random(task.options.seed), list(task.examples)
    if held_out:
        held_out = rng.sample(held_out, min(N_READ, len(held_out)))
    else:
        mixed = rng.sample(examples, len(examples))
        n = max(1, len(mixed) // 4)
        examples, held_out = mixed[n:] or mixed, mixed[:n]
    first, *others = task.options.methods
    found = learn(task, examples, held_out, method=first)
    heads, betas = heads_of(found)
    table = {first: betas}
    for method in others:
        coefficients = learn(task, examples, held_out, among=heads, method=method)
        table[method] = heads_of(coefficients, heads)[1]
    # The coefficients are one table for all conflict types.
    tables = found.repeat(len(task.conflict_types), 1, 1)
    scores = HeadScores(
        target=task.target,
        conflict_types=task.conflict_types,
        plus=tables.clamp(min=0),
        minus=(-tables).clamp(min=0),
        kind="learned",
    )
    return task.head_set(Methods.sharing(heads, **table), scores)
