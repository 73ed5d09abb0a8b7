"""The loop: requests join, prompts are prefilled in chunks, the others decode, finished ones leave.

A step is a few forwards, over prompts and over everything that decodes. The outcomes of a forward
are computed on the model's device and read in one transfer: in it the host waits for the device,
nowhere else in a step. When a forward of several sequences fails, each is run alone, and only those
that fail alone end with an error.
"""

from __future__ import annotations

import logging
import math
from collections import abc
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

import torch

from juice.engine.answer import ScoredToken
from juice.engine.load_options import Limits
from juice.engine.own.batch import ForwardBatch, ForwardRows, Mode, Runner, arrange, forward_batch
from juice.engine.own.cache import SlotsBrokenError
from juice.engine.own.rows import Shelves
from juice.engine.own.sampler import Draw, choose, on_device
from juice.engine.own.scheduler import Costs, Inbox, Scheduler
from juice.engine.own.sequence import Sequence
from juice.engine.request import Request
from juice.engine.text import TextStream, Transcript
from juice.errors import EngineStoppedError, GenerationError, JuiceError, NonFiniteError
from juice.model.loaded import LoadedModel


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a forward for one of its sequences.

    Tokens of its prompt that were scored, and the next token with what is watched there; None while
    its prompt, or that of its other row, goes on. It `is_finite` if its logits are numbers.
    """

    is_finite: bool
    prompt: tuple[ScoredToken, ...] = ()
    token: ScoredToken | None = None
    watched: tuple[float, ...] = ()


class _Query(NamedTuple):
    """A token whose score is read from a row of the logits, and more tokens to `watch` there.

    `draw` chooses the token where `token` is None.
    """

    row: int
    token: int | None
    n_top: int
    draw: Draw | None = None
    watch: tuple[int, ...] = ()


def outcomes(batch: ForwardBatch, logits: torch.Tensor) -> list[Outcome]:
    """Return the outcomes of a forward's sequences; logits are float32 [kept, vocabulary]."""
    ends = list(accumulate(batch.n_kept))
    combined, queries = list[torch.Tensor](), list[list[_Query]]()
    for sequence, n_new, n, end in zip(
        batch.rows.sequences, batch.n_tokens, batch.n_kept, ends, strict=True
    ):
        n_top = min(sequence.request.options.top_logprobs, logits.shape[-1])
        scored = sequence.to_score(n)
        queries.append([_Query(end - n + i, token, n_top) for i, token in enumerate(scored)])
        if sequence.n_cached + n_new < sequence.length:
            continue  # its prompt goes on
        row = end - 1
        if sequence.owner.without is not None:
            both = sequence.owner.contrasted(sequence, logits[row])
            if both is None:
                continue
            row = len(logits) + len(combined)
            combined.append(both)
        owner = sequence.owner
        queries[-1].append(_Query(row, None, n_top, owner.draw(), owner.to_watch))
    table = torch.cat([logits, torch.stack(combined)]) if combined else logits
    normalizers, read = _read(table, [query for asked in queries for query in asked])
    results, found = iter(read), list[Outcome]()
    for n, end, asked in zip(batch.n_kept, ends, queries, strict=True):
        scored_here = list(islice(results, len(asked)))
        # The token that is chosen comes last.
        newest = scored_here.pop() if asked and asked[-1].token is None else (None, ())
        rows = (*range(end - n, end), *(query.row for query in asked))
        found.append(
            Outcome(
                # A logsumexp is finite unless a logit is NaN or +inf; one of -inf is allowed.
                is_finite=all(math.isfinite(normalizers[row]) for row in rows),
                prompt=tuple(token for token, _ in scored_here),
                token=newest[0],
                watched=newest[1],
            )
        )
    return found


def _read(
    table: torch.Tensor, queries: abc.Sequence[_Query]
) -> tuple[list[float], list[tuple[ScoredToken, tuple[float, ...]]]]:
    """Choose the tokens that are drawn, and read all scores of a table in one transfer.

    table: float32 [rows, vocabulary]. Returns the logsumexp of each row, and for each query its
    scored token and the scores to watch.
    """
    drawn = {i: query.draw for i, query in enumerate(queries) if query.draw is not None}
    asking = [i for i, query in enumerate(queries) if query.n_top]
    n_top = max((query.n_top for query in queries), default=0)
    rows = on_device(table, [query.row for query in queries])
    tokens = on_device(table, [query.token or 0 for query in queries])
    if drawn:
        at = [queries[i].row for i in drawn]
        newest = table if at == list(range(len(table))) else table[on_device(table, at)]
        chosen = choose(newest, [*drawn.values()])
        tokens = tokens.index_copy(0, on_device(table, [*drawn]), chosen)
    best, ids = table[:0], tokens[:0]
    if asking:
        best, ids = table[rows[on_device(table, asking)]].topk(n_top)
    watched = [table[query.row, on_device(table, query.watch)] for query in queries if query.watch]
    numbers = torch.cat([table.logsumexp(-1), table[rows, tokens], best.flatten(), *watched])
    # Numbers and tokens travel together, bit by bit.
    packed = [numbers.view(torch.int32), tokens.int(), ids.flatten().int()]
    read = torch.cat(packed).cpu()
    values = read[: len(numbers)].view(torch.float32).tolist()
    read_ids = read[len(numbers) :].tolist()
    normalizers, scores = values[: len(table)], iter(values[len(table) :])
    logits = list(islice(scores, len(queries)))
    top_logits, top_ids = list(islice(scores, len(asking) * n_top)), read_ids[len(queries) :]
    scored = list[tuple[ScoredToken, tuple[float, ...]]]()
    n_asked = 0
    for i, query in enumerate(queries):
        normalizer, top = normalizers[query.row], range(n_asked, n_asked + query.n_top)
        n_asked += n_top if query.n_top else 0
        alternatives = tuple((top_ids[j], top_logits[j] - normalizer) for j in top)
        token = ScoredToken(read_ids[i], logits[i] - normalizer, alternatives)
        scored.append((token, tuple(next(scores) - normalizer for _ in query.watch)))
    return normalizers, scored


LOG = logging.getLogger("juice.engine.own")
OUT_OF_MEMORY = ("not enough memory", "can't allocate memory")  # PyTorch's words on a CPU
LOG.addHandler(logging.NullHandler())  # a library is silent by default


class Loop:
    """The state of one engine; every method belongs to the engine's thread."""

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
        self.steps = dict[int, int]()  # by how many requests ran in them
        self.failed_together = ""  # why several requests did, unless memory lacked
        self.log_level = logging.WARNING  # of what is logged about failures
        self._loaded = loaded
        self._inbox = inbox
        self._decode_rows: dict[tuple[Sequence, ...], tuple[object, ForwardRows]] = {}
        self._deterministic = deterministic
        self.shelves = Shelves(loaded.layout.n_layers)
        self._measure()
        self.shelves.max_bytes = limits.kv_memory_bytes
        self.scheduler = Scheduler(
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

    def step(self) -> None:
        """Drop cancelled sequences, admit those that fit, and advance all that run."""
        self.runner.get_on()
        self._drop_cancelled()
        self._admit()
        if n := self.shelves.n_running:
            self.steps[n] = self.steps.get(n, 0) + 1
        for together in self.scheduler.forwards():
            # A row has left if the other row of its request has failed.
            self._advance([(row, n) for row, n in together if row in self.shelves])
        if not self.shelves.rows:
            self._decode_rows.clear()  # it would keep finished sequences alive

    def _measure(self) -> None:
        """Run one token, to learn the layers' shapes and so the bytes of a position."""
        request = Request.of((0,), max_tokens=1)
        nothing = TextStream(self._loaded.tokenizer, ())
        transcript = Transcript(request, nothing, frozenset(), lambda _update: None)
        sequence = Sequence(0, request, range(0), transcript)
        shelf = self.shelves.first
        shelf.cache.reserve(shelf.size([sequence]))
        shelf.table.join(sequence)
        rows = arrange([sequence], shelf, self._loaded)
        self.runner.forward(forward_batch(rows, [1], self._loaded.device))
        shelf.table.leave(sequence)
        shelf.cache.free()

    def abort(self, reason: JuiceError) -> None:
        """End everything that runs or waits."""
        self._inbox.close(reason)
        for sequence in (*self.shelves.rows, *self._inbox.take_all()):
            # Each gets an error of its own, because it is raised in another thread.
            self._tell(sequence, EngineStoppedError(str(reason)))
        self.shelves.clear()

    def _drop_cancelled(self) -> None:
        for sequence in self._inbox.take_cancelled():
            self._tell(sequence, sequence.cancelled)
        for sequence in [s for s in self.shelves.rows if s.cancelled is not None]:
            self.shelves.leave(sequence)
            self._tell(sequence, sequence.cancelled)

    def _admit(self) -> None:
        while (sequence := self._inbox.first()) is not None and self.scheduler.may_join(sequence):
            self._inbox.take(sequence)
            if sequence.cancelled is not None:  # since the others were dropped
                self._tell(sequence, sequence.cancelled)
                continue
            try:
                self.shelves.join(sequence)
            except Exception as error:
                self._tell(sequence, _failure(error))
                if _is_fatal(error):
                    raise
                LOG.warning("no memory for a request: %s", error)
                continue
            sequence.transcript.start()

    def _advance(self, chosen: list[tuple[Sequence, int]]) -> None:
        if not chosen:
            return
        chosen = [(sequence, min(n, sequence.most_new)) for sequence, n in chosen]
        try:
            rows = self.rows_of([sequence for sequence, _ in chosen])
            n_tokens = dict(chosen)
            batch = forward_batch(
                rows,
                [n_tokens[s] for s in rows.sequences],
                self._loaded.device,
                reach=self.scheduler.reach(rows.sequences),
            )
            results = outcomes(batch, self.runner.forward(batch))
        except Exception as error:
            if _is_fatal(error):
                raise
            self._decode_rows.clear()  # should they be what is wrong, the next ones are not
            failure, reason, lacks_memory = _failure(error), repr(error), _lacks_memory(error)
            if len(chosen) == 1 and not lacks_memory:
                self._log(error)
        else:
            self._after(rows, batch.n_tokens, results)
            return
        # Out here nothing holds what the forward had computed.
        if lacks_memory and torch.cuda.is_available():
            torch.cuda.empty_cache()
        (first, n), *others = chosen
        if others:
            if not lacks_memory:
                self.failed_together = reason
            LOG.log(
                self.log_level,
                "a forward of %d requests failed; running each alone: %s",
                len(chosen),
                reason,
            )
            for sequence, n in chosen:
                if sequence in self.shelves:  # it has left if its other row failed
                    self._advance([(sequence, n)])
        elif n > 1 and lacks_memory and not self._deterministic:
            LOG.warning("no memory for %d tokens of a request at once; half of that is tried", n)
            first.most_new = n // 2
            self._advance([(first, n)])
        else:
            if lacks_memory:
                LOG.warning("a request failed: %s", reason)
            self._fail(first, failure)

    def _after(
        self, rows: ForwardRows, n_tokens: abc.Sequence[int], results: abc.Sequence[Outcome]
    ) -> None:
        """Take what a forward gave, and let those leave that are done."""
        for sequence, n_new in zip(rows.sequences, n_tokens, strict=True):
            sequence.n_cached += n_new
        # Rows are ordered newest first, so here the oldest start to decode first; below the newest
        # leave first. No row has to move.
        for sequence, outcome in reversed(list(zip(rows.sequences, results, strict=True))):
            self._take(sequence, outcome)
        for sequence in dict.fromkeys(s.owner for s in rows.sequences):
            if sequence.transcript.finish_reason is not None:
                # Its rows are free before its caller hears of it.
                self.shelves.leave(sequence)
                with suppress(Exception):
                    sequence.transcript.complete()

    def _take(self, sequence: Sequence, outcome: Outcome) -> None:
        owner = sequence.owner
        if owner.without is not None and sequence not in self.shelves:
            return  # its other row has failed in this forward
        try:
            if not outcome.is_finite:
                raise NonFiniteError
            sequence.transcript.prompt_tokens += outcome.prompt
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
            self._log(error)
            self._fail(sequence, _failure(error))

    def rows_of(self, sequences: list[Sequence]) -> ForwardRows:
        """Return the rows of some sequences; those that decode are kept until a slot changes."""
        shelf, together = self.shelves[sequences[0]], tuple(sequences)
        version = shelf.version
        if (kept := self._decode_rows.get(together)) is not None and kept[0] == version:
            return kept[1]
        rows = arrange(sequences, shelf, self._loaded, as_copies=self._deterministic)
        if not sequences[0].is_prefilling:
            self._decode_rows = {
                others: kept
                for others, kept in self._decode_rows.items()
                if others[0] in self.shelves and kept[0] == self.shelves[others[0]].version
            }
            self._decode_rows[together] = version, rows
        return rows

    def _fail(self, sequence: Sequence, failure: JuiceError) -> None:
        """End the request of a sequence, and erase its keys and values."""
        for row in sequence.owner.rows:
            for row_list in self.shelves[row].table.lists_of(row):
                row_list.erase(row)
        self.shelves.leave(sequence.owner)
        self._tell(sequence.owner, failure)

    def _log(self, error: Exception) -> None:
        is_ours = isinstance(error, JuiceError)
        LOG.log(self.log_level, "a request failed: %r", error, exc_info=None if is_ours else error)

    @staticmethod
    def _tell(sequence: Sequence, error: JuiceError | None) -> None:
        with suppress(Exception):
            sequence.transcript.fail(error or GenerationError("the request was dropped"))


def _lacks_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        words in str(error) for words in OUT_OF_MEMORY
    )


def _failure(error: Exception) -> JuiceError:
    """Return what the caller of a request that failed is told."""
    if isinstance(error, JuiceError):
        return error
    if _lacks_memory(error):
        return GenerationError(
            "there is not enough memory for this request; shorten it, or lower max_batch, "
            "kv_memory or max_prefill_tokens"
        )
    return GenerationError(f"the request failed in the model: {error!r}")


def _is_fatal(error: Exception) -> bool:
    """Return whether the device or the slots are lost, so that nothing can go on."""
    return isinstance(error, torch.AcceleratorError | SlotsBrokenError)
