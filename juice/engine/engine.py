"""The engine: a thread that owns the model, fed through a bounded inbox; news goes back through each caller's own sink.

Any thread may send, cancel and read. The thread ends when the engine is closed or nobody holds it any more; if it dies of
an error, everything that runs or waits ends with that error, and so does whatever is sent later.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from queue import SimpleQueue
from threading import Thread, current_thread

from juice.engine.inbox import Inbox
from juice.engine.limits import Limits
from juice.engine.loop import Loop
from juice.engine.mode import Mode
from juice.engine.request import Completion, GenerationRequest, Sink, Update
from juice.engine.runner import Runner
from juice.engine.scheduler import room_alone
from juice.engine.sequence import Sequence as Generation
from juice.engine.steer import Steering
from juice.engine.text import TextStream
from juice.errors import ContextLengthError, EngineStoppedError, JuiceError
from juice.model.loading import LoadedModel

LOG = logging.getLogger("juice.engine")
IDLE_BEAT_S = 1.0
STOP_S = 10.0
GIVE_UP_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Status:
    """How the engine does: `heartbeat_age_s` since its thread last began a step, bytes of keys and values."""

    is_alive: bool
    heartbeat_age_s: float
    n_running: int
    n_waiting: int
    n_kv_bytes: int
    max_kv_bytes: int


class Engine:
    """Generates for any number of requests on one loaded model; raises RequestError for limits that it cannot keep."""

    def __init__(self, loaded: LoadedModel, limits: Limits | None = None, mode: Mode | None = None) -> None:
        self.mode = mode or Mode(own_masks=loaded.attention is None)
        self.limits = (limits or Limits()).settled(loaded.max_positions, loaded.device, loaded.n_ranks)
        self._loaded = loaded
        self._inbox = Inbox(self.limits.max_waiting)
        self._loop = Loop(loaded, self.limits, self._inbox, self.mode)
        self._loop.measure()
        self._loop.runner.cache.max_bytes = self.limits.kv_memory_bytes
        self._numbers = count()
        self._special_ids = frozenset(loaded.tokenizer.all_special_ids)
        self._thread = Thread(target=_run, args=(self._loop, self._inbox), name="juice-engine", daemon=True)
        self._thread.start()
        weakref.finalize(self, _stop, self._inbox, self._thread)
        if loaded.ranks is not None:
            loaded.ranks.when_lost(partial(_give_up, self._inbox, self._thread, self._loop))

    @property
    def status(self) -> Status:
        """How the engine does now."""
        return Status(
            is_alive=self._thread.is_alive(),
            heartbeat_age_s=time.monotonic() - self._loop.beat,
            n_running=sum(row.owner is row for row in tuple(self._loop.table.mains.rows)),
            n_waiting=len(self._inbox),
            n_kv_bytes=self._loop.n_reserved_bytes,
            max_kv_bytes=self.limits.kv_memory_bytes or 0,
        )

    @property
    def runner(self) -> Runner:
        """What runs the forwards; within `LoadedModel.turn`, any thread may."""
        return self._loop.runner

    @property
    def n_kv_heads(self) -> int:
        """The heads of keys and values that the first layer caches; query heads share them in groups."""
        return self._loop.runner.cache.slot_layers[0].n_kv_heads

    @property
    def n_kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one unsteered token, over all layers."""
        return sum(layer.bytes_per_position for layer in self._loop.runner.cache.slot_layers)

    def n_kv_bytes(self, request: GenerationRequest) -> int:
        """Return the bytes of keys and values that are reserved for a request."""
        n_rows = 1 if request.contrast is None else 2
        room = room_alone(n_rows, self.companion_layers(request.steering), request.n_positions, self._loaded.layout.n_layers)
        return self._loop.runner.cache.n_bytes(room)

    def companion_layers(self, steering: Steering) -> range:
        """Return the layers in which a request has a second row."""
        window = steering.window
        return range(self._loaded.layout.n_layers) if window and self.mode.full_rows else window

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError, or ContextLengthError, for a request that cannot run."""
        request.check_tokens(self._loaded.vocabulary_size)
        limit, n_prompt = self.limits.max_model_len, request.n_positions - request.max_tokens
        if limit is not None and request.n_positions > limit:
            if n_prompt >= limit:
                raise ContextLengthError(f"the prompt has {n_prompt} tokens, the context {limit}: shorten it", param="prompt")
            raise ContextLengthError(
                f"the prompt has {n_prompt} tokens and max_tokens is {request.max_tokens}; the context has {limit}: shorten the prompt "
                "or lower max_tokens",
                param="max_tokens",
            )
        needed, there = self.n_kv_bytes(request), self.limits.kv_memory_bytes or 0
        if needed > there:
            raise ContextLengthError(
                f"the request needs {needed / 2**20:.1f} MiB for its keys and values, the engine has {there / 2**20:.1f} MiB: "
                "shorten the prompt, lower max_tokens, or raise kv_memory",
                param="max_tokens",
            )

    def submit(self, requests: Sequence[GenerationRequest], sink: Sink, *, wait: bool = False) -> list[Generation]:
        """Send requests, all or none; `sink` gets their updates, numbered as here. Returns what can be cancelled.

        Raises RequestError for one that cannot run, EngineStoppedError, and OverloadedError when as many wait as may, unless
        it is to wait for room.
        """
        if not self._thread.is_alive():
            raise EngineStoppedError(str(self._inbox.closed or "the engine's thread is not in this process; load the model after the fork"))
        for request in requests:
            self.check(request)
        sequences = [self._sequence(i, request, sink) for i, request in enumerate(requests)]
        self._inbox.put(sequences, wait=wait)
        return sequences

    def _sequence(self, index: int, request: GenerationRequest, sink: Sink) -> Generation:
        loaded, window = self._loaded, self.companion_layers(request.steering)
        if not loaded.exact:
            report = replace(request.steering.report, exact=False)
            request = request.with_steering(replace(request.steering, report=report))
        text = TextStream(loaded.tokenizer, request.prompt_ids, request.stop, self._special_ids)
        return Generation(index, next(self._numbers), request, window, text, loaded.stop_token_ids, sink)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Run all requests and return their completions in their order; raises JuiceError as soon as one fails."""
        results = {u.index: u.completion for u in self._updates(requests, only_last=True) if u.completion is not None}
        return [results[i] for i in range(len(requests))]

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[Update]:
        """Run all requests, yielding news of each as it comes; raises JuiceError as soon as one fails."""
        return self._updates(requests, only_last=False)

    def close(self) -> None:
        """End the thread and everything that runs or waits."""
        _stop(self._inbox, self._thread)

    def _updates(self, requests: Sequence[GenerationRequest], *, only_last: bool) -> Iterator[Update]:
        # Longest first: prompts that go through together then need little padding.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt_ids))
        updates: SimpleQueue[Update] = SimpleQueue()

        def sink(update: Update) -> None:
            if update.is_last or not only_last:
                updates.put(replace(update, index=order[update.index]))

        sequences = self.submit([requests[i] for i in order], sink, wait=True)
        n_open = len(sequences)
        try:
            while n_open:
                update = updates.get()
                if update.error is not None:
                    raise update.error
                n_open -= update.is_last
                yield update
        finally:
            for sequence in sequences:
                sequence.cancel()


def _stop(inbox: Inbox, thread: Thread) -> None:
    inbox.close(EngineStoppedError("the engine was closed"))
    if thread is not current_thread():
        thread.join(STOP_S)


def _run(loop: Loop, inbox: Inbox) -> None:
    """The thread: it holds the loop, not the engine, so that an engine nobody needs can go."""
    try:
        while inbox.closed is None:
            loop.step()
            if not loop.is_busy:
                inbox.wait(IDLE_BEAT_S)
        reason: JuiceError = inbox.closed
    except BaseException as error:
        LOG.critical("the engine failed", exc_info=error)
        reason = EngineStoppedError(f"the engine failed: {error!r}")
    loop.abort(reason)
    loop.runner.close()


def _give_up(inbox: Inbox, thread: Thread, loop: Loop, reason: JuiceError) -> None:
    """End everything, a rank being lost: the thread does it, unless it waits in a forward for the rank that is gone."""
    inbox.close(reason)
    thread.join(GIVE_UP_S)
    if thread.is_alive():
        loop.abort(reason)
