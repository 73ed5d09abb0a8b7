"""What coefficients are learned from: mini-batches of prompts with right answers, and of text.

Each step takes one batch of every conflict type, some of the protected prompts, and ordinary text:

    mean of -log p(right answer's first token)  +  weight * KL(unsteered || steered)

Right is the target's answer, and on protected prompts what is right without steering. Where no
context bears on the question, nothing should change: there it is KL(unsteered || steered) of the
next token. Without a context, in clean prompts and in others that leave open what is said
(`juice.data.memory.open_prompts`), what the likeliest token loses of its lead counts, too, up to
LEAD nats: at a near tie a small divergence is another answer. Nor should anything change behind the
right answer: the model should say what it would, and end where it would (`Task.replies`). Batches
stay as they are, so that a clean run that two runs need is kept for later steps, while there is
room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import torch

from juice.data.example import ConflictExample
from juice.formula import Method
from juice.identification.attribution import (
    FP16_SCALE,
    MAX_TOKENS,
    DualRun,
    backward,
    differentiable,
)
from juice.identification.first_tokens import MOST_KEPT, Asked, conflict_prompts, protected_prompts
from juice.identification.ordinary import divergence, ordinary_pieces, some_places
from juice.identification.task import Task
from juice.model.loaded import LoadedModel

# Prompts of a kind in a step, beside a piece of text.
N_CONFLICTS, N_PROTECTED, N_OPEN, N_REPLIES = 6, 6, 32, 6
N_PROTECTED_KINDS = 2  # in a step
LEFT_ALONE = ("clean", "irrelevant")  # no context bears on the question
PROTECTED_WEIGHT = 1.0  # of all protected prompts, beside 1 for the conflicts
SHARE_BESIDE = 0.2  # of the weight of divergence: of what leaves open what is said, and of replies
LEAD, LEAD_WEIGHT = 2.0, 2.0  # nats, of the likeliest token over the next

Prompt = TypeVar("Prompt")
LeftAlone = tuple[tuple[int, ...], None]  # the tokens of a prompt, without a right answer


class Batch:
    """Prompts that are run together.

    Args:
        loaded: The model.
        prompts: The tokens of each prompt.
        answers: The first token of the right answer to each prompt; None: what the model says.
        method: The runs that are steered.
        read_at: The positions of each prompt that count; None: its end.
        lead: Whether it counts, too, what the likeliest token loses of its lead.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Sequence[tuple[int, ...]],
        answers: Sequence[int] | None,
        method: Method,
        *,
        read_at: Sequence[Iterable[int]] | None = None,
        lead: bool = False,
    ) -> None:
        self.run = DualRun(loaded, prompts, read_at)
        self.is_kept = False  # its clean run, for later steps
        self.answers = None if answers is None else torch.tensor(answers, device=loaded.device)
        self._method: Method = method
        self._lead = lead
        self._unsteered: torch.Tensor | None = None

    @contextmanager
    def value(self, table: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give what is minimised under coefficients, float32 [n_layers, n_heads]; a scalar.

        Within, since layers that are computed again for its derivatives are steered again.
        """
        needs_z = self._method == "juice" and not self.run.is_recorded
        if self.answers is not None:
            if needs_z:
                self.run.record()
            with self.run.steered(table, self._method):
                yield torch.nn.functional.cross_entropy(self.run.logits(), self.answers)
            return
        if needs_z or self._unsteered is None:
            with torch.no_grad():
                clean = self.run.record() if needs_z else self.run.logits()
            self._unsteered = clean.log_softmax(-1)
        with self.run.steered(table, self._method):
            steered = self.run.logits()
            value = divergence(self._unsteered, steered).mean()
            if self._lead:
                value = value + LEAD_WEIGHT * lost_lead(self._unsteered, steered).mean()
            yield value


def lost_lead(unsteered: torch.Tensor, steered: torch.Tensor) -> torch.Tensor:
    """Return how much of its lead the likeliest token loses, in nats; of leads, up to LEAD count.

    Both are logits or log-probabilities [..., n_tokens]; what is returned is [...].
    """
    best, tokens = unsteered.topk(2, dim=-1)
    top = tokens[..., :1]
    other = steered.scatter(-1, top, -torch.inf).amax(-1)
    lead = steered.gather(-1, top)[..., 0] - other
    return ((best[..., 0] - best[..., 1]).clamp(max=LEAD) - lead).relu()


@dataclass(frozen=True)
class Step:
    """The batches of a step, each with its weight.

    Text has the weight of divergence, which is the caller's, and prompts that leave open what is
    said, and replies, a share of it. Text and replies are run in this step alone.
    """

    asked: list[tuple[Batch, float]]
    text: Batch
    left_open: Batch | None = None
    replies: Batch | None = None


def _left_alone(asked: Sequence[Asked]) -> list[LeftAlone]:
    return [(ids, None) for ids, _ in asked]


def _together(
    every: Sequence[Prompt], n: int, length_of: Callable[[Prompt], int]
) -> list[list[Prompt]]:
    """Return prompts by batch: at most n of like lengths, which need little padding."""
    chunks: list[list[Prompt]] = []
    for one in sorted(every, key=length_of):
        has_room = chunks and (len(chunks[-1]) + 1) * length_of(one) <= MAX_TOKENS
        if has_room and len(chunks[-1]) < n:
            chunks[-1].append(one)
        else:
            chunks.append([one])
    return chunks


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
            self._batches(_left_alone(asked), N_PROTECTED, rng, lead=kind == "clean")
            if kind in LEFT_ALONE
            else self._batches(asked, N_PROTECTED, rng)
            for kind, asked in protected.items()
        ]
        left_open: list[LeftAlone] = [(ids, None) for ids in task.left_open()]
        self._open = self._batches(left_open, N_OPEN, rng, lead=True)
        self._replies = _together(task.replies(), N_REPLIES, lambda one: len(one.ids))
        self._pieces = ordinary_pieces(model).learned_from
        self._room = MOST_KEPT

    def _batches(
        self, asked: Sequence[Asked | LeftAlone], n: int, rng: Random, *, lead: bool = False
    ) -> list[Batch]:
        batches = []
        for some in _together(rng.sample(asked, len(asked)), n, lambda one: len(one[0])):
            answers = [token for _, token in some if token is not None]
            prompts = [ids for ids, _ in some]
            batch = Batch(self._loaded, prompts, answers or None, self._method, lead=lead)
            batches.append(batch)
        return batches

    def steps(self, rng: Random) -> Iterator[Step]:
        """Yield the batches of step after step."""
        while True:
            kinds = rng.sample(self._protected, min(N_PROTECTED_KINDS, len(self._protected)))
            asked = [(rng.choice(kind), 1 / len(self._conflicts)) for kind in self._conflicts]
            asked += [(rng.choice(kind), PROTECTED_WEIGHT / len(kinds)) for kind in kinds]
            left_open = rng.choice(self._open) if self._open else None
            piece = rng.choice(self._pieces)
            text = self._text([piece], [some_places(piece, rng)])
            replies = None
            if self._replies:
                some = rng.choice(self._replies)
                replies = self._text([one.ids for one in some], [one.some(rng) for one in some])
            yield Step(asked, text, left_open, replies)

    def _text(self, pieces: Sequence[tuple[int, ...]], places: Sequence[Sequence[int]]) -> Batch:
        return Batch(self._loaded, pieces, None, self._method, read_at=places)

    def slope(self, step: Step, coefficients: torch.Tensor, weight: float) -> torch.Tensor:
        """Return the derivatives of what is minimised, float32 [n_layers, n_heads]."""
        loaded = self._loaded
        scale = FP16_SCALE if loaded.dtype == torch.float16 else 1.0
        table = coefficients.to(loaded.device, copy=True).requires_grad_()
        with differentiable(loaded), loaded.turn:
            batches = [*step.asked, (step.text, weight)]
            for beside in (step.left_open, step.replies):
                batches += [(beside, SHARE_BESIDE * weight)] if beside is not None else []
            for batch, share in batches:
                with batch.value(table) as value:
                    backward(loaded, value * (share * scale))
                if batch not in (step.text, step.replies):
                    self._keep(batch)
        assert table.grad is not None
        return table.grad.cpu() / scale

    def _keep(self, batch: Batch) -> None:
        """Keep what a batch recorded for later steps, or forget it where there is no room."""
        if batch.is_kept:
            return
        if batch.run.n_bytes > self._room:
            batch.run.forget()
        else:
            batch.is_kept = True
            self._room -= batch.run.n_bytes
