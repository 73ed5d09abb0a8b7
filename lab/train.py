"""One phase of training: documents in packed rows, Muon and AdamW, a rate linear between its ends.

A step is 16 rows of 256 tokens, and at times two rows of 1,024 with the documents that are longer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lab.corpus import Corpus, Mixture
from lab.packing import IGNORED, Packer, Rows
from lab.tokens import N_POSITIONS

LOG = logging.getLogger("lab.train")
LENGTH, N_ROWS, N_LONG_ROWS = 256, 16, 2


@dataclass(frozen=True, kw_only=True)
class Phase:
    """`n_steps` on one mixture, the learning rate linear from `rate_start` to `rate_end`."""

    mixture: Mixture
    n_steps: int
    rate_start: float
    rate_end: float
    warmup: int = 0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step of this phase, counted from 0."""
        along = step / self.n_steps
        return (self.rate_start + (self.rate_end - self.rate_start) * along) * min(
            1.0, (step + 1) / (self.warmup + 1)
        )


class Trainer:
    """Trains a model in place on one phase.

    The optimizers begin anew: a phase depends on nothing but the weights that it starts from.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        phase: What to train on, for how long.
        seed: Seed of the documents.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, phase: Phase, seed: int
    ) -> None:
        self._model, self._phase = model, phase
        self._batches = batches(phase.mixture, tokenizer, seed)
        self._optimizers = _optimizers(model)
        self._n_done = 0

    def save(self, file: Path) -> None:
        """Save all but the weights, to go on from here."""
        states = [optimizer.state_dict() for optimizer in self._optimizers]
        torch.save({"n_done": self._n_done, "optimizers": states}, file)

    def load(self, file: Path) -> None:
        """Go on from what `save` wrote; the model already has the weights of that step."""
        state = torch.load(file)
        self._n_done = state["n_done"]
        for optimizer, each in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(each)
        next(islice(self._batches, self._n_done - 1, None))

    def run(self, after_step: Callable[[int], None] = lambda _step: None) -> None:
        """Train to the end of the phase.

        Args:
            after_step: Called with the number of steps that are done.
        """
        self._model.train()
        begun = time.monotonic()
        for batch in islice(self._batches, self._phase.n_steps - self._n_done):
            loss = _accumulate(self._model, batch)
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self._phase.rate(self._n_done)
                optimizer.step()
                optimizer.zero_grad()
            self._n_done += 1
            if self._n_done % 50 == 0:
                seconds = time.monotonic() - begun
                LOG.info("step %d loss %.3f %.0f s", self._n_done, loss, seconds)
            after_step(self._n_done)
        self._model.eval()


def batches(
    mixture: Mixture, tokenizer: PreTrainedTokenizerFast, seed: int
) -> Iterator[list[Rows]]:
    """Yield what one step takes: short rows, and long ones whenever they are full."""
    short, long = Packer(N_ROWS, LENGTH), Packer(N_LONG_ROWS, N_POSITIONS)
    documents = iter(Corpus(mixture, seed))
    waiting: list[Rows] = []
    while True:
        texts = list(islice(documents, 256))
        for document in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            if len(document) > N_POSITIONS + 1:
                continue
            packer = short if len(document) <= LENGTH + 1 else long
            if (rows := packer.add(document)) is not None:
                waiting.append(rows)
                if packer is short:
                    yield waiting
                    waiting = []


def _accumulate(model: PreTrainedModel, batch: list[Rows]) -> float:
    """Add the gradient of the mean next-token cross-entropy; return the loss."""
    total, n_targets = 0.0, sum(rows.n_targets() for rows in batch)
    for rows in batch:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(rows.tokens, position_ids=rows.positions, use_cache=False).logits
        loss = functional.cross_entropy(
            logits.float().flatten(0, 1),
            rows.targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        (loss / n_targets).backward()  # type: ignore[no-untyped-call]
        total += loss.item() / n_targets
    return total


def _optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, AdamW for embeddings and vectors."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in named if p.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(
            matrices, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
    ]
