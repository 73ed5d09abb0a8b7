"""The loop: requests join, prompts are prefilled in chunks, the others decode, finished ones leave.

A step is a few forwards, over prompts and over everything that decodes; the scheduler says which
rows go together. When a forward of several generations fails, each is run alone, and only those
that fail alone end with an error.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress

import torch

from juice.batching.batch import ForwardRows, arrange, forward_batch
from juice.batching.costs import Costs
from juice.batching.generation import Generation
from juice.batching.inbox import Inbox
from juice.batching.outcomes import Outcome, outcomes
from juice.batching.runner import Mode, Runner
from juice.batching.scheduler import Scheduler
from juice.batching.shelves import Shelves
from juice.batching.slots import SlotsBrokenError
from juice.engine import GenerationRequest, Limits
from juice.engine.text import TextStream
from juice.engine.transcript import Transcript
from juice.errors import (
    EngineStoppedError,
    GenerationError,
    JuiceError,
    NonFiniteError,
)
from juice.model.loaded import LoadedModel

LOG = logging.getLogger("juice.batching")
OUT_OF_MEMORY = ("not enough memory", "can't allocate memory")  # PyTorch's words on a CPU
LOG.addHandler(logging.NullHandler())  # a library is silent by default


class Loop:
    """The state of one engine; every method belongs to the engine's thread.

    Args:
        loaded: The model.
        limits: The bounds in force.
        inbox: Where requests wait.
        mode: How rows go through the model.
        deterministic: Whether what a request gets may not depend on others, to the bit.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        limits: Limits,
        inbox: Inbox,
        mode: Mode,
        *,
        deterministic: bool = False,
    ) -> None:
        self.runner = Runner(loaded, mode)
        self.beat = time.monotonic()
        self.steps = dict[int, int]()  # by how many requests ran in them
        self._loaded = loaded
        self._inbox = inbox
        self._n_heads = [layer.n_heads for layer in loaded.layout.layers]
        self._decode_rows: dict[tuple[Generation, ...], tuple[int, ForwardRows]] = {}
        self._deterministic = deterministic
        self.shelves = Shelves(loaded.layout.n_layers)
        self._measure()
        self.shelves.max_bytes = limits.kv_memory_bytes
        self._scheduler = Scheduler(
            limits,
            self.shelves,
            Costs.of(loaded, self.shelves.n_bytes_per_token),
            rope_switch=loaded.rope_switch,
            by_length=mode.own_masks,
            deterministic=deterministic,
        )

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.shelves.rows) or len(self._inbox) > 0

    @property
    def n_running(self) -> int:
        """How many requests run."""
        return sum(row.owner is row for row in self.shelves.rows)

    def step(self) -> None:
        """Drop what was cancelled, admit what fits, and advance everything that runs."""
        self.beat = time.monotonic()
        self._drop_cancelled()
        self._admit()
        if n := self.n_running:
            self.steps[n] = self.steps.get(n, 0) + 1
        for together in self._scheduler.forwards():
            # A row has left if the other row of its request has failed.
            self._advance([one for one in together if one[0] in self.shelves])
        if not self.shelves.rows:
            self._decode_rows.clear()  # it would keep finished generations alive

    def _measure(self) -> None:
        """Run one token, to learn the layers' shapes and so the bytes of a position.

        Raises whatever the model raises.
        """
        request = GenerationRequest(prompt_ids=(0,), max_tokens=1)
        nothing = TextStream(self._loaded.tokenizer, ())
        transcript = Transcript(0, request, nothing, frozenset(), lambda _update: None)
        one = Generation(0, request, range(0), transcript)
        shelf = self.shelves.first
        shelf.cache.reserve(shelf.room([one]))
        shelf.table.join(one)
        rows = arrange([one], shelf.table, shelf.cache, self._n_heads, self._loaded.device)
        self.runner.forward(forward_batch(rows, [1], self._loaded.device))
        shelf.table.leave(one)
        shelf.cache.free()

    def abort(self, reason: JuiceError) -> None:
        """End everything that runs or waits."""
        self._inbox.close(reason)
        for generation in (*self.shelves.rows, *self._inbox.take_all()):
            # Each gets an error of its own, because it is raised in another thread.
            self._tell(generation, EngineStoppedError(str(reason)))
        self.shelves.clear()

    def _drop_cancelled(self) -> None:
        for generation in self._inbox.take_cancelled():
            self._tell(generation, generation.cancelled)
        for generation in [s for s in self.shelves.rows if s.cancelled is not None]:
            self.shelves.leave(generation)
            self._tell(generation, generation.cancelled)

    def _admit(self) -> None:
        while (generation := self._scheduler.next_of(self._inbox.waiting)) is not None:
            self._inbox.take(generation)
            try:
                self.shelves.join(generation)
            except Exception as error:
                self._tell(generation, _failure(error))
                if _is_fatal(error):
                    raise
                LOG.warning("no memory for a request: %s", error)
                continue
            generation.transcript.start()

    def _advance(self, chosen: list[tuple[Generation, int]]) -> None:
        """Run the next tokens of some generations and let each choose its next one."""
        if not chosen:
            return
        self.beat = time.monotonic()
        try:
            rows = self._rows_of([generation for generation, _ in chosen])
            n_tokens = dict(chosen)
            batch = forward_batch(
                rows,
                [n_tokens[s] for s in rows.generations],
                self._loaded.device,
                reach=self._scheduler.reach(rows.generations),
            )
            found = outcomes(batch, self.runner.forward(batch))
        except Exception as error:
            if _is_fatal(error):
                raise
            if len(chosen) == 1:
                self._fail(chosen[0][0], error)
            else:
                LOG.warning(
                    "a forward of %d requests failed; running each alone: %r", len(chosen), error
                )
                for one in chosen:
                    if one[0] in self.shelves:  # it has left if its other row failed
                        self._advance([one])
            return
        for generation, n_new in zip(rows.generations, batch.n_tokens, strict=True):
            generation.n_cached += n_new
        # Rows are ordered newest first, so here the oldest start to decode first; below the newest
        # leave first. No row has to move.
        for generation, outcome in reversed(list(zip(rows.generations, found, strict=True))):
            self._take(generation, outcome)
        for generation in dict.fromkeys(s.owner for s in rows.generations):
            if generation.transcript.finish_reason is not None:
                # Its rows are free before its caller hears of it.
                self.shelves.leave(generation)
                with suppress(Exception):
                    generation.transcript.complete()

    def _take(self, generation: Generation, outcome: Outcome) -> None:
        """Give a generation what a forward says of it."""
        owner = generation.owner
        if owner.without is not None and generation not in self.shelves:
            return  # its other row has failed in this forward
        try:
            if not outcome.is_finite:
                raise NonFiniteError(
                    "the model's logits are not finite; lower the strength, or load the model with "
                    "--dtype float32"
                )
            generation.transcript.prompt_tokens += outcome.prompt
            if outcome.token is None:
                return
            if not owner.tokens:
                for row in owner.rows:
                    self.shelves[row].table.start_decoding(row)
            owner.advance(outcome.token, outcome.watched)
        except Exception as error:
            if _is_fatal(error):
                raise
            owner.transcript.finish_reason = None
            self._fail(generation, error)

    def _rows_of(self, generations: list[Generation]) -> ForwardRows:
        """Return the rows of some generations; those that decode are kept until a row changes."""
        shelf, together = self.shelves[generations[0]], tuple(generations)
        version = shelf.table.version
        if (kept := self._decode_rows.get(together)) is not None and kept[0] == version:
            return kept[1]
        rows = arrange(
            generations,
            shelf.table,
            shelf.cache,
            self._n_heads,
            self._loaded.device,
            as_copies=self._deterministic,
        )
        if not generations[0].is_prefilling:
            self._decode_rows = {
                others: own
                for others, own in self._decode_rows.items()
                if others[0] in self.shelves and own[0] == self.shelves[others[0]].table.version
            }
            self._decode_rows[together] = version, rows
        return rows

    def _fail(self, generation: Generation, error: Exception) -> None:
        """End the request of a generation and erase what it cached."""
        LOG.warning(
            "a request failed: %r", error, exc_info=None if isinstance(error, JuiceError) else error
        )
        for row in generation.owner.rows:
            for lane in self.shelves[row].table.lanes(row):
                lane.erase(row)
        self.shelves.leave(generation.owner)
        self._tell(generation.owner, _failure(error))

    @staticmethod
    def _tell(generation: Generation, error: JuiceError | None) -> None:
        with suppress(Exception):
            generation.transcript.fail(error or GenerationError("the request was dropped"))


def _failure(error: Exception) -> JuiceError:
    if isinstance(error, JuiceError):
        return error
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        words in str(error) for words in OUT_OF_MEMORY
    ):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return GenerationError(
            "there is not enough memory for this request; shorten it, or lower max_batch or "
            "kv_memory"
        )
    return GenerationError(f"the request failed in the model: {error!r}")


def _is_fatal(error: Exception) -> bool:
    """Return whether the device or the slots are lost, so that nothing can go on."""
    return isinstance(error, torch.AcceleratorError | SlotsBrokenError)
