"""The loop: requests join, prompts are prefilled in chunks, the others decode, finished ones leave.

A step is two forwards, one that prefills and one that decodes; more only where a model's rows
cannot share one. When a forward of several generations fails, each is run alone, and only those
that fail alone end with an error.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from itertools import accumulate

import torch

from juice.batching.batch import ForwardRows, arrange, forward_batch
from juice.batching.generation import Generation
from juice.batching.inbox import Inbox
from juice.batching.room import Room
from juice.batching.rows import RowTable
from juice.batching.runner import Mode, Runner
from juice.batching.scheduler import Scheduler
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
    """

    def __init__(self, loaded: LoadedModel, limits: Limits, inbox: Inbox, mode: Mode) -> None:
        self.runner = Runner(loaded, mode)
        self.beat = time.monotonic()
        self._loaded = loaded
        self._inbox = inbox
        self.table = RowTable(self.runner.cache)
        self._scheduler = Scheduler(
            limits,
            self.table,
            self.runner.cache,
            rope_switch=loaded.rope_switch,
            by_length=mode.own_masks,
        )
        self._n_heads = [layer.n_heads for layer in loaded.layout.layers]
        self._decode_rows: tuple[int, ForwardRows] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.table.mains.rows) or len(self._inbox) > 0

    @property
    def n_reserved_bytes(self) -> int:
        """The bytes of keys and values reserved for what runs; any thread may read it."""
        running = list(self.table.mains.rows)
        if not running:
            return 0
        companions = tuple(len(lane.rows) for lane in self.table.companions)
        return self.runner.cache.n_bytes(
            Room(len(running), companions, max(s.request.n_positions for s in running))
        )

    def step(self) -> None:
        """Drop what was cancelled, admit what fits, and advance everything that runs."""
        self.beat = time.monotonic()
        self._drop_cancelled()
        self._admit()
        for together in self._scheduler.forwards():
            # A row has left if the other row of its request has failed.
            self._advance([one for one in together if one[0] in self.table.mains.rows])
        if not self.table.mains.rows:
            self._decode_rows = None  # it would keep finished generations alive

    def measure(self) -> None:
        """Run one token, to learn the layers' shapes and so the bytes of a position.

        Raises whatever the model raises.
        """
        request = GenerationRequest(prompt_ids=(0,), max_tokens=1)
        nothing = TextStream(self._loaded.tokenizer, ())
        transcript = Transcript(0, request, nothing, frozenset(), lambda _update: None)
        one = Generation(0, request, range(0), transcript)
        self.runner.cache.reserve(Room(1, (0,) * self._loaded.layout.n_layers, 1))
        self.table.join(one)
        self.runner.forward(
            forward_batch(
                self._rows_of([one]), [1], self.runner.cache.n_positions, self._loaded.device
            )
        )
        self.table.leave(one)

    def abort(self, reason: JuiceError) -> None:
        """End everything that runs or waits."""
        self._inbox.close(reason)
        for generation in (*self.table.mains.rows, *self._inbox.take_all()):
            # Each gets an error of its own, because it is raised in another thread.
            self._tell(generation, EngineStoppedError(str(reason)))
        self.table.mains.rows.clear()

    def _drop_cancelled(self) -> None:
        for generation in self._inbox.take_cancelled():
            self._tell(generation, generation.cancelled)
        for generation in [s for s in self.table.mains.rows if s.cancelled is not None]:
            self._leave(generation)
            self._tell(generation, generation.cancelled)

    def _admit(self) -> None:
        while (generation := self._inbox.first()) is not None:
            room = self._scheduler.room_with(generation)
            if room is None:
                return
            self._inbox.take()
            try:
                self.runner.cache.reserve(room)
            except Exception as error:
                self._tell(generation, _failure(error))
                if _is_fatal(error):
                    raise
                LOG.warning("no memory for a request: %s", error)
                continue
            generation.transcript.start()
            for row in generation.rows:
                self.table.join(row)

    def _advance(self, chosen: list[tuple[Generation, int]]) -> None:
        """Run the next tokens of some generations and let each choose its next one."""
        if not chosen:
            return
        try:
            rows = self._rows_of([generation for generation, _ in chosen])
            n_tokens = dict(chosen)
            batch = forward_batch(
                rows,
                [n_tokens[s] for s in rows.generations],
                self.runner.cache.n_positions,
                self._loaded.device,
                reach=self._scheduler.reach(rows.generations),
            )
            logits = self.runner.forward(batch)
            normalizers = logits.logsumexp(-1).tolist()
            likeliest = logits.argmax(-1).tolist()
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
                    if one[0] in self.table.mains.rows:  # it has left if its other row failed
                        self._advance([one])
            return
        was_prefilling = [generation.is_prefilling for generation in rows.generations]
        for generation, n_new in zip(rows.generations, batch.n_tokens, strict=True):
            generation.n_cached += n_new
        ends = list(accumulate(batch.n_kept))
        # Rows are ordered newest first, so here the oldest start to decode first; below the newest
        # leave first. No row has to move.
        for i in reversed(range(len(ends))):
            own = slice(ends[i] - batch.n_kept[i], ends[i])
            self._take(
                rows.generations[i],
                was_prefilling[i],
                logits[own],
                normalizers[own],
                likeliest[ends[i] - 1],
            )
        for generation in dict.fromkeys(s.owner for s in rows.generations):
            if generation.transcript.finish_reason is not None:
                # Its rows are free before its caller hears of it.
                self._leave(generation)
                with suppress(Exception):
                    generation.transcript.complete()

    def _take(
        self,
        generation: Generation,
        was_prefilling: bool,
        logits: torch.Tensor,
        normalizers: list[float],
        likeliest: int,
    ) -> None:
        """Give a generation the logits of its newest tokens, float32 [kept, vocabulary]."""
        owner = generation.owner
        if owner.without is not None and generation not in self.table.mains.rows:
            return  # its other row has failed in this forward
        try:
            # A logsumexp is finite unless a logit is NaN or +inf; one of -inf is allowed.
            if not all(map(math.isfinite, normalizers)):
                raise NonFiniteError(
                    "the model's logits are not finite; lower the strength, or load the model with "
                    "--dtype float32"
                )
            if was_prefilling and generation.request.prompt_logprobs:
                generation.score_prompt(logits, normalizers)
            if generation.is_prefilling:
                return
            newest, normalizer = logits[-1], normalizers[-1]
            if owner.without is not None:
                combined = owner.contrasted(generation, newest)
                if combined is None:
                    return
                newest, normalizer, likeliest = (
                    combined,
                    float(combined.logsumexp(-1)),
                    int(combined.argmax()),
                )
            if not owner.tokens:
                for row in owner.rows:
                    self.table.start_decoding(row)
            owner.advance(newest, normalizer, likeliest)
        except Exception as error:
            if _is_fatal(error):
                raise
            owner.transcript.finish_reason = None
            self._fail(generation, error)

    def _rows_of(self, generations: list[Generation]) -> ForwardRows:
        """Return the rows of some generations; those that decode are kept until a row changes."""
        version, is_decoding = self.table.version, generations == self.table.decoding
        if is_decoding and self._decode_rows is not None and self._decode_rows[0] == version:
            return self._decode_rows[1]
        cache, device = self.runner.cache, self._loaded.device
        rows = arrange(generations, self.table, cache, self._n_heads, device)
        if is_decoding:
            self._decode_rows = version, rows
        return rows

    def _fail(self, generation: Generation, error: Exception) -> None:
        """End the request of a generation and erase what it cached."""
        LOG.warning(
            "a request failed: %r", error, exc_info=None if isinstance(error, JuiceError) else error
        )
        for row in generation.owner.rows:
            for lane in self.table.lanes(row):
                lane.erase(row)
        self._leave(generation.owner)
        self._tell(generation.owner, _failure(error))

    def _leave(self, generation: Generation) -> None:
        for row in generation.rows:
            self.table.leave(row)

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
