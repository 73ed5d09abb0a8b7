"""What coefficients are learned from: mini-batches of prompts with right answers, and of text.

Each step takes one batch of every conflict type, some of the protected prompts, and ordinary text:

    mean of -log p(right answer's first token)  +  weight * KL(unsteered || steered)

Right is the target's answer, and on protected prompts what is right without steering. Where no
context bears on the question, it is KL(unsteered || steered) of the next token instead, which also
protects what the model knows less well. Batches stay as they are, so that a clean run that two runs
need is kept for later steps, while there is room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import torch

from juice.data.example import ConflictExample
from juice.formula import Method
from juice.identification.attribution import FP16_SCALE, DualRun, backward, differentiable
from juice.identification.first_tokens import MOST_KEPT, Asked, conflict_prompts, protected_prompts
from juice.identification.ordinary import divergence, ordinary_pieces, pieces_at_once
from juice.identification.task import Task
from juice.model.loaded import LoadedModel

N_CONFLICTS, N_PROTECTED, N_PIECES = 6, 4, 2  # prompts of a kind, or pieces, in a step
N_PROTECTED_KINDS = 2  # in a step
LEFT_ALONE = ("clean", "irrelevant")  # no context bears on the question
PROTECTED_WEIGHT = 1.0  # of all protected prompts, beside 1 for the conflicts


class Batch:
    """Prompts that are run together.

    Args:
        loaded: The model.
        prompts: The tokens of each prompt.
        answers: The first token of the right answer to each prompt; None: what the model says.
        method: The runs that are steered.
        everywhere: Whether the prompts are text, of which each place counts, not the end.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Sequence[tuple[int, ...]],
        answers: Sequence[int] | None,
        method: Method,
        *,
        everywhere: bool = False,
    ) -> None:
        self.run = DualRun(loaded, prompts, method, everywhere=everywhere)
        self.answers = None if answers is None else torch.tensor(answers, device=loaded.device)
        self._unsteered: torch.Tensor | None = None

    @contextmanager
    def value(self, table: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give what is minimised under coefficients, float32 [n_layers, n_heads]; a scalar.

        Within, since layers that are computed again for its derivatives are steered again.
        """
        if self.answers is not None:
            self.run.record()
            with self.run.steered(table):
                yield torch.nn.functional.cross_entropy(self.run.logits(), self.answers)
            return
        if self._unsteered is None:
            self._unsteered = self.run.clean_logits().log_softmax(-1)
        self.run.record()
        with self.run.steered(table):
            yield divergence(self._unsteered, self.run.logits().log_softmax(-1)).mean()


@dataclass(frozen=True)
class Step:
    """The batches of a step, each with its weight; that of text is the caller's."""

    asked: list[tuple[Batch, float]]
    text: Batch


class Lessons:
    """The mini-batches of a task, drawn anew at each step."""

    def __init__(self, task: Task, examples: Sequence[ConflictExample], method: Method) -> None:
        model, target = task.model, task.target
        conflicts = conflict_prompts(model, target, examples)
        protected = protected_prompts(model, target, examples, task.options.protect)
        self._loaded, self._method = model.loaded, method
        rng = Random(task.options.seed)
        self._conflicts = [self._batches(asked, N_CONFLICTS, rng) for asked in conflicts.values()]
        self._protected = [
            self._batches(asked, N_PROTECTED, rng, answered=kind not in LEFT_ALONE)
            for kind, asked in protected.items()
        ]
        self._pieces = ordinary_pieces(model).learned_from
        self._room = MOST_KEPT

    def _batches(
        self, asked: Sequence[Asked], n: int, rng: Random, *, answered: bool = True
    ) -> list[Batch]:
        # Prompts of like lengths need little padding.
        mixed = sorted(rng.sample(asked, len(asked)), key=lambda one: len(one[0]))
        chunks = [mixed[at : at + n] for at in range(0, len(mixed), n)]
        return [
            Batch(
                self._loaded,
                [ids for ids, _ in some],
                [token for _, token in some] if answered else None,
                self._method,
            )
            for some in chunks
        ]

    def steps(self, rng: Random) -> Iterator[Step]:
        """Yield the batches of step after step."""
        n_pieces = min(N_PIECES, pieces_at_once(self._loaded))
        while True:
            kinds = rng.sample(self._protected, min(N_PROTECTED_KINDS, len(self._protected)))
            asked = [(rng.choice(kind), 1 / len(self._conflicts)) for kind in self._conflicts]
            asked += [(rng.choice(kind), PROTECTED_WEIGHT / len(kinds)) for kind in kinds]
            pieces = rng.sample(self._pieces, min(n_pieces, len(self._pieces)))
            text = Batch(self._loaded, pieces, None, self._method, everywhere=True)
            yield Step(asked, text)

    def slope(self, step: Step, coefficients: torch.Tensor, weight: float) -> torch.Tensor:
        """Return the derivatives of what is minimised, float32 [n_layers, n_heads]."""
        loaded = self._loaded
        scale = FP16_SCALE if loaded.dtype == torch.float16 else 1.0
        table = coefficients.to(loaded.device, copy=True).requires_grad_()
        with differentiable(loaded), loaded.turn:
            for batch, share in (*step.asked, (step.text, weight)):
                with batch.value(table) as value:
                    backward(loaded, value * (share * scale))
                if batch is not step.text:
                    self._keep(batch.run)
        assert table.grad is not None
        return table.grad.cpu() / scale

    def _keep(self, run: DualRun) -> None:
        """Keep what a run recorded for later steps, or forget it where there is no room."""
        if run.is_kept:
            return
        if run.n_kept > self._room:
            run.forget()
        else:
            run.is_kept = True
            self._room -= run.n_kept
