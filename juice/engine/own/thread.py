"""Our own engine: a thread that owns the model and takes requests from an inbox.

The thread ends when the engine is closed or no longer referenced; if it dies of an error,
everything that runs, waits or is submitted later ends with that error.
"""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, cached_property, partial
from itertools import count
from threading import Thread, current_thread
from typing import Any, ClassVar

import torch

from juice.engine.answer import Sink
from juice.engine.contract import Capability, Engine, ModelDescription, Status, settled
from juice.engine.load_options import Limits
from juice.engine.own.batch import Mode
from juice.engine.own.cache import ShelfSize
from juice.engine.own.loop import Loop
from juice.engine.own.scheduler import Inbox
from juice.engine.own.sequence import Sequence
from juice.engine.request import Request, Running
from juice.engine.steer import Steering
from juice.engine.structure import Constraint
from juice.errors import ContextLengthError, EngineStoppedError, GenerationError, JuiceError
from juice.model.loaded import LoadedModel

LOG = logging.getLogger("juice.engine.own")
IDLE_BEAT_S = 1.0
STOP_S = 10.0
SOFT_PAUSE = 1  # omp_pause_soft: only threads end


class BatchingEngine(Engine):
    """The default engine, in this process: any architecture, any device, every capability.

    A `deterministic` one runs each request in forwards of its own, so that it gets the same bits
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
        self._loaded = loaded
        self.mode = mode or Mode(own_masks=loaded.mask_pattern is None)
        self.limits = settled(
            limits or Limits(),
            self.description.max_positions,
            loaded.n_layers_on,
            loaded.n_weights,
        )
        self._inbox = Inbox()
        self.deterministic = deterministic
        self.loop = Loop(loaded, self.limits, self._inbox, self.mode, deterministic=deterministic)
        self._numbers = count()
        self.thread = Thread(
            target=_run, args=(self.loop, self._inbox), name="juice-engine", daemon=True
        )
        end_helpers()  # of the loading
        self.thread.start()
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="juice-structures")
        weakref.finalize(self, _stop, self._inbox, self.thread)

    @property
    def loaded(self) -> LoadedModel:
        """The model's modules and hooks."""
        return self._loaded

    @cached_property
    def description(self) -> ModelDescription:
        return self.loaded.describe()

    @property
    def status(self) -> Status:
        return Status(
            is_alive=self.thread.is_alive(),
            heartbeat_age_s=time.monotonic() - self.loop.runner.beat,
            n_running=self.loop.shelves.n_running,
            n_waiting=len(self._inbox),
            n_kv_bytes=self.loop.shelves.n_needed_bytes,
            max_kv_bytes=self.limits.kv_memory_bytes or 0,
            steps=dict(self.loop.steps),
        )

    @property
    def details(self) -> dict[str, Any]:
        return {
            "full_rows": self.mode.full_rows,
            "own_masks": self.mode.own_masks,
            "deterministic": self.deterministic,
        }

    @property
    def numerics(self) -> dict[str, Any]:
        return {
            **self.details,
            "attention": getattr(self.loaded.model.config, "_attn_implementation", None),
            "chunk": None if self.deterministic else self.limits.max_prefill_tokens,
        }

    @property
    def n_kv_heads(self) -> int:
        """The key-value heads that the first layer caches; query heads share them in groups."""
        return self.loop.shelves.first.cache.slot_layers[0].n_kv_heads

    @property
    def n_kv_bytes_per_token(self) -> int:
        return self.loop.shelves.n_bytes_per_token

    def n_kv_bytes(self, request: Request) -> int:
        window = self.companion_layers(request.steering)
        companions = tuple(int(layer in window) for layer in range(self.description.n_layers))
        n_mains = 1 if request.contrast is None else 2
        return self.loop.shelves.n_bytes(ShelfSize(n_mains, companions, request.n_positions))

    def companion_layers(self, steering: Steering) -> range:
        window = steering.window
        return range(self.description.n_layers) if window and self.mode.full_rows else window

    def check(self, request: Request) -> None:
        super().check(request)
        needed, available = self.n_kv_bytes(request), self.limits.kv_memory_bytes or 0
        if needed > available:
            raise ContextLengthError(
                f"the request needs {needed / 2**20:.1f} MiB for its keys and values; the engine "
                f"has {available / 2**20:.1f} MiB: shorten the prompt, lower max_tokens, or raise "
                "kv_memory",
                param="max_tokens",
            )

    @property
    def why_stopped(self) -> str:
        return str(
            self._inbox.closed
            or "the engine's thread is not in this process; load the model after the fork"
        )

    def start(self, request: Request, sink: Sink, *, instead_of: Running | None = None) -> Sequence:
        if not self.thread.is_alive():
            raise EngineStoppedError(self.why_stopped)
        end_helpers()
        number = instead_of.number if isinstance(instead_of, Sequence) else next(self._numbers)
        structure = request.options.structure
        constraint = None if structure is None else self.structures.start_kept(structure)
        sequence = Sequence(
            number,
            request,
            self.companion_layers(request.steering),
            self._transcript(request, sink),
            constraint,
        )
        is_first = instead_of is not None
        if structure is None or constraint is not None:
            self._inbox.put(sequence, is_first=is_first)
        else:  # this is the engine's thread perhaps, for which all others wait
            compile_again = partial(self.structures.start, structure)
            self._compiling.submit(_put_compiled, self._inbox, sequence, compile_again, is_first)
        return sequence

    def close(self) -> None:
        """Do what `stop` does, and remove the model's hooks."""
        self.stop()
        self.loaded.release()

    def stop(self) -> None:
        """End the thread and everything that runs or waits; the model keeps its hooks."""
        _stop(self._inbox, self.thread)
        self._compiling.shutdown(wait=False)
        self._end_sandbox()


def _put_compiled(
    inbox: Inbox, sequence: Sequence, compile_again: Callable[[], Constraint], is_first: bool
) -> None:
    """Queue a sequence once its structure is compiled, or to be told why it is not."""
    try:
        if sequence.cancelled is None and inbox.closed is None:
            sequence.constraint = compile_again()
    except Exception as error:
        sequence.cancel(error if isinstance(error, JuiceError) else GenerationError(repr(error)))
    try:
        inbox.put(sequence, is_first=is_first)
    except EngineStoppedError as error:
        with suppress(Exception):
            sequence.transcript.fail(error)


def end_helpers() -> None:
    """End the threads over which the calling one splits operators; its next operator starts them.

    A thread does so before it waits for another one that runs operators. GNU's OpenMP has threads
    sleep between operators where those of all callers outnumber the cores, and waking them takes as
    long as a small operator: a token of a small model took 1.4 times as long.
    """
    library = _openmp()
    if library is not None:
        library.omp_pause_resource_all(SOFT_PAUSE)


@cache
def _openmp() -> ctypes.PyDLL | None:
    """Return the OpenMP library of PyTorch, if it is GNU's."""
    # Symbols are looked up in what it depends on, too. The GIL stays: requests that are handed in
    # together begin together.
    library = ctypes.PyDLL(torch._C.__file__)
    is_gnu = hasattr(library, "GOMP_parallel") and not hasattr(library, "kmp_set_blocktime")
    return library if is_gnu and hasattr(library, "omp_pause_resource_all") else None


def _stop(inbox: Inbox, thread: Thread) -> None:
    inbox.close(EngineStoppedError("the engine was closed"))
    if thread is not current_thread():
        thread.join(STOP_S)


def _run(loop: Loop, inbox: Inbox) -> None:
    """Run the thread; it holds the loop, not the engine, so that an unused engine can be freed."""
    try:
        while inbox.closed is None:
            loop.step()
            if not loop.is_busy:
                end_helpers()
                if not inbox.wait(IDLE_BEAT_S):
                    loop.shelves.free()  # nothing came: the memory may be of use to others
        reason: JuiceError = inbox.closed
    except BaseException as error:
        LOG.critical("the engine failed", exc_info=error)
        reason = EngineStoppedError(f"the engine failed: {error!r}")
    loop.abort(reason)
