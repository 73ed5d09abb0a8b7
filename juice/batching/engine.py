"""Our own engine: a thread that owns the model and takes requests from a bounded inbox.

Updates go to each caller's own sink. Any thread may submit, cancel and read. The engine's thread
ends when the engine is closed or no longer referenced; if it dies of an error, everything that
runs, waits or is submitted later ends with that error.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from functools import cached_property
from itertools import count
from threading import Thread, current_thread
from typing import Any, ClassVar

from juice.batching.generation import Generation
from juice.batching.inbox import Inbox
from juice.batching.loop import Loop
from juice.batching.room import Room
from juice.batching.runner import Mode, Runner
from juice.engine import (
    Capability,
    Engine,
    GenerationRequest,
    Limits,
    ModelDescription,
    Running,
    Sink,
    Status,
    Steering,
)
from juice.engine.memory import settled
from juice.engine.text import TextStream
from juice.engine.transcript import Transcript
from juice.errors import ContextLengthError, EngineStoppedError, JuiceError
from juice.model.loaded import LoadedModel

LOG = logging.getLogger("juice.batching")
IDLE_BEAT_S = 1.0
STOP_S = 10.0


class BatchingEngine(Engine):
    """The default engine, in this process: any architecture, any device, every capability.

    Args:
        loaded: The model.
        limits: The bounds of batches and memory.
        mode: How rows go through the model.
        deterministic: Run each request in forwards of its own, so that it gets the same bits
            whatever else runs.

    Raises RequestError for a `max_model_len` beyond the model's context.
    """

    name: ClassVar[str] = "own"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(Capability)

    def __init__(
        self,
        loaded: LoadedModel,
        limits: Limits | None = None,
        mode: Mode | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        self.loaded = loaded
        self.mode = mode or Mode(own_masks=loaded.mask_pattern is None)
        self.limits = settled(limits or Limits(), loaded.max_positions, loaded.device)
        self._inbox = Inbox(self.limits.max_waiting)
        self.deterministic = deterministic
        self._loop = Loop(loaded, self.limits, self._inbox, self.mode, deterministic=deterministic)
        self._numbers = count()
        self._special_ids = frozenset(loaded.tokenizer.all_special_ids)
        self._thread = Thread(
            target=_run, args=(self._loop, self._inbox), name="juice-engine", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _stop, self._inbox, self._thread)

    @cached_property
    def description(self) -> ModelDescription:
        """The model."""
        return self.loaded.describe()

    @property
    def status(self) -> Status:
        """The engine's present state."""
        return Status(
            is_alive=self._thread.is_alive(),
            heartbeat_age_s=time.monotonic() - self._loop.beat,
            n_running=self._loop.n_running,
            n_waiting=len(self._inbox),
            n_kv_bytes=self._loop.shelves.n_needed_bytes,
            max_kv_bytes=self.limits.kv_memory_bytes or 0,
            steps=dict(self._loop.steps),
        )

    @property
    def details(self) -> dict[str, Any]:
        """The mode: companions as full rows, masks of the model's own, deterministic or not."""
        return {
            "full_rows": self.mode.full_rows,
            "own_masks": self.mode.own_masks,
            "deterministic": self.deterministic,
        }

    @property
    def numerics(self) -> dict[str, Any]:
        """The mode, the attention, and the size of prompts' chunks where it is not fixed."""
        return {
            **self.details,
            "attention": getattr(self.loaded.model.config, "_attn_implementation", None),
            "chunk": None if self.deterministic else self.limits.max_prefill_tokens,
        }

    @property
    def runner(self) -> Runner:
        """What runs the forwards; any thread that holds `LoadedModel.turn` may use it."""
        return self._loop.runner

    @property
    def n_kv_heads(self) -> int:
        """The key-value heads that the first layer caches; query heads share them in groups."""
        return self._loop.shelves.first.cache.slot_layers[0].n_kv_heads

    @property
    def n_kv_bytes_per_token(self) -> int:
        """The bytes that the keys and values of one unsteered token take, over all layers."""
        return self._loop.shelves.n_bytes_per_token

    def n_kv_bytes(self, request: GenerationRequest) -> int:
        """Return the bytes that are reserved for the keys and values of a request."""
        window = self.companion_layers(request.steering)
        companions = tuple(int(layer in window) for layer in range(self.description.n_layers))
        n_mains = 1 if request.contrast is None else 2
        return self._loop.shelves.n_bytes(Room(n_mains, companions, request.n_positions))

    def companion_layers(self, steering: Steering) -> range:
        """Return the layers in which a request with this steering has a companion."""
        window = steering.window
        return range(self.description.n_layers) if window and self.mode.full_rows else window

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError or ContextLengthError for a request that cannot run."""
        super().check(request)
        needed, there = self.n_kv_bytes(request), self.limits.kv_memory_bytes or 0
        if needed > there:
            raise ContextLengthError(
                f"the request needs {needed / 2**20:.1f} MiB for its keys and values; the engine "
                f"has {there / 2**20:.1f} MiB: shorten the prompt, lower max_tokens, or raise "
                "kv_memory",
                param="max_tokens",
            )

    def start(
        self, requests: Sequence[GenerationRequest], sink: Sink, *, wait: bool = False
    ) -> list[Generation]:
        """Start requests, all or none; see `Engine.submit`."""
        if not self._thread.is_alive():
            raise EngineStoppedError(
                str(
                    self._inbox.closed
                    or "the engine's thread is not in this process; load the model after the fork"
                )
            )
        for request in requests:
            self.check(request)
        generations = [
            self._generation(next(self._numbers), i, request, sink)
            for i, request in enumerate(requests)
        ]
        self._inbox.put(generations, wait=wait)
        return generations

    def resume(
        self, request: GenerationRequest, sink: Sink, *, instead_of: Running | None
    ) -> Generation:
        """Start a request before all that wait; see `Engine.resume`."""
        had = instead_of.number if isinstance(instead_of, Generation) else None
        number = next(self._numbers) if had is None else had
        generation = self._generation(number, 0, request, sink)
        self._inbox.put_first(generation)
        return generation

    def close(self) -> None:
        """End the thread and everything that runs or waits; the model loses its hooks."""
        self.stop()
        self.loaded.release()

    def stop(self) -> None:
        """End the thread and everything that runs or waits; the model keeps its hooks."""
        _stop(self._inbox, self._thread)

    def _generation(
        self, number: int, index: int, request: GenerationRequest, sink: Sink
    ) -> Generation:
        text = TextStream(
            self.loaded.tokenizer,
            request.prompt_ids,
            request.stop,
            self._special_ids,
            skip_special_tokens=request.skip_special_tokens,
        )
        transcript = Transcript(index, request, text, self.description.stop_token_ids, sink)
        window = self.companion_layers(request.steering)
        structure = request.structure
        constraint = None if structure is None else self.structures.start(structure)
        return Generation(number, request, window, transcript, constraint)


def _stop(inbox: Inbox, thread: Thread) -> None:
    inbox.close(EngineStoppedError("the engine was closed"))
    if thread is not current_thread():
        thread.join(STOP_S)


def _run(loop: Loop, inbox: Inbox) -> None:
    """Run the thread; it holds the loop, not the engine, so that an unused engine can be freed."""
    try:
        while inbox.closed is None:
            loop.step()
            if not loop.is_busy and not inbox.wait(IDLE_BEAT_S):
                loop.shelves.free()  # nothing came: the memory may be of use to others
        reason: JuiceError = inbox.closed
    except BaseException as error:
        LOG.critical("the engine failed", exc_info=error)
        reason = EngineStoppedError(f"the engine failed: {error!r}")
    loop.abort(reason)
