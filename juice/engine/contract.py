"""The contract that every engine fulfils, and what builds on it alone: requests in, updates out.

Beside it: what only some engines can do (`Capability`), an engine's present state (`Status`), its
model (`ModelDescription`), and its limits with the open ones filled in (`settled`).
"""

from __future__ import annotations

import asyncio
import json
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from juice.engine.answer import Completion, Sink, Update
from juice.engine.effect import start_explained
from juice.engine.gate import start_gated
from juice.engine.load_options import MAX_PREFILL_TOKENS, Limits
from juice.engine.request import Request, Running, numbered
from juice.engine.steer import Steering
from juice.engine.structure import Structures
from juice.engine.text import TextStream, Transcript
from juice.errors import (
    ContextLengthError,
    EngineStoppedError,
    GenerationError,
    JuiceError,
    MissingCapabilityError,
    RequestError,
)
from juice.formula import METHODS, Method
from juice.head_set.schema import ModelIdentity
from juice.progress import Progress, silent
from juice.version import versions


class Capability(Enum):
    """Something that not every engine can do; the value completes "the engine cannot ..."."""

    WATCH = "report the log-probabilities of chosen tokens"
    CONTRAST = (
        "contrast prompts with those without context (methods cad, adacad, cocoa, ckplug, grd)"
    )
    ACTIVATIONS = "give access to the model's activations (finding heads, analyses, juice doctor)"


@dataclass(frozen=True, kw_only=True)
class Status:
    """An engine's present state.

    The heartbeat is the last sign that the engine gets on: a step, in our own engine also a layer
    of one. The bytes are those that are reserved for keys and values, and `steps` counts the steps
    so far by how many requests ran in them.
    """

    is_alive: bool
    heartbeat_age_s: float
    n_running: int
    n_waiting: int
    n_kv_bytes: int
    max_kv_bytes: int
    steps: Mapping[int, int] = field(default_factory=dict)

    @property
    def n_steps(self) -> int:
        """The steps so far."""
        return sum(self.steps.values())

    @property
    def n_step_requests(self) -> int:
        """The requests that ran in them, added up: over `n_steps`, the mean batch."""
        return sum(size * n for size, n in self.steps.items())


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelDescription:
    """A served model.

    Args:
        identity: Its id, revision, architecture, shape and fingerprint.
        tokenizer: Its tokenizer.
        heads_per_layer: The query heads of every layer.
        dtype: The dtype of the activations, such as `bfloat16`.
        dtype_reason: The reason for it where JuICE chose it by the CPU; else None.
        device: The device of the inputs, such as `cuda:0`.
        n_devices: The number of devices that it is sharded over.
        quantization: The quantisation of the weights; None where they have none.
        max_positions: The model's context in tokens; None where its positions have no end.
        vocabulary_size: The number of tokens in the model; a tokenizer may have more or fewer.
        stop_token_ids: The tokens that end an answer.
        exact: Whether it is steered exactly; false where activations are quantised.
    """

    identity: ModelIdentity
    tokenizer: PreTrainedTokenizerBase
    heads_per_layer: tuple[int, ...]
    dtype: str
    dtype_reason: str | None = None
    device: str
    n_devices: int = 1
    quantization: str | None = None
    max_positions: int | None
    vocabulary_size: int
    stop_token_ids: frozenset[int]
    exact: bool = True

    @property
    def n_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.heads_per_layer)


def _processor(device: str) -> list[str | int]:
    """Return the facts by which a device's kernels are chosen: its kind, and a CPU's threads."""
    if device.startswith("cuda"):
        return [torch.cuda.get_device_name()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line for line in lines if line.startswith("model name")), device)
    return [name, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]


N_DIGITS = 12


class Engine(ABC):
    """Generates for any number of requests on one model, each steered its own way.

    Any thread may submit, cancel and read. `name` is what users call the engine; `limits` are the
    bounds in force.
    """

    name: ClassVar[str]
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    limits: Limits

    @property
    @abstractmethod
    def description(self) -> ModelDescription:
        """The model."""

    @property
    @abstractmethod
    def status(self) -> Status:
        """The engine's present state."""

    @property
    @abstractmethod
    def n_kv_bytes_per_token(self) -> int:
        """The bytes that the keys and values of one unsteered token take, over all layers."""

    @abstractmethod
    def n_kv_bytes(self, request: Request) -> int:
        """Return the bytes that must be free for a request to start."""

    @property
    def details(self) -> dict[str, Any]:
        """Facts about how this engine in particular runs the model, as plain data."""
        return {}

    @property
    def max_scored_tokens(self) -> int | None:
        """The most tokens of a prompt that is only scored; None: any number."""
        return self.limits.max_model_len

    @property
    def steerable_layers(self) -> dict[Method, range]:
        """The layers in which each method can scale heads."""
        return dict.fromkeys(METHODS, range(self.description.n_layers))

    @property
    def numerics(self) -> dict[str, Any]:
        """The facts of this engine that decide the bits of a request alone, as plain data."""
        return {}

    @property
    def system_fingerprint(self) -> str:
        """A name, such as `fp_0123456789ab`, for all that decides the bits of a request alone.

        Two engines with one name give it the same tokens and log-probabilities. The model counts by
        its fingerprint, not by its folder; what runs beside a request and the head sets, which an
        answer's `steering` reports, do not count.
        """
        model = self.description
        identity = model.identity.model_dump()
        facts = {
            "versions": versions(),
            "engine": self.name,
            "numerics": self.numerics,
            # Where the weights are known, what they are called changes nothing.
            "model": identity["fingerprint"] or identity,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "n_devices": model.n_devices,
            "processor": _processor(model.device),
        }
        text = json.dumps(facts, sort_keys=True, default=str)
        return f"fp_{sha256(text.encode()).hexdigest()[:N_DIGITS]}"

    @abstractmethod
    def companion_layers(self, steering: Steering) -> range:
        """Return the layers in which a request with this steering has a companion."""

    @abstractmethod
    def start(self, request: Request, sink: Sink, *, instead_of: Running | None = None) -> Running:
        """Start one request that `check` has let pass, as if it had no gate.

        Args:
            request: The request.
            sink: Takes its updates, in the engine's thread, without blocking.
            instead_of: A request that is cancelled for this one, which needs no more memory: this
                one goes before all that wait.

        Raises:
            EngineStoppedError: The engine was closed or failed.
        """

    def begin(self, requests: Sequence[Request], sink: Sink) -> list[Running]:
        """Start requests that `check` has let pass; their updates carry their `index`.

        Return those that run, in this order; the others have sent their error to the sink.
        """
        start = partial(start_gated, self.attempt)
        if any(request.options.explain is not None for request in requests):
            started = start_explained(start, requests, sink, self.attempt, self._text_of)
        else:
            started = start(requests, sink)
        return [running for running in started if running is not None]

    def _text_of(self, token: int) -> str:
        tokenizer = self.description.tokenizer
        return str(tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def attempt(
        self, request: Request, sink: Sink, *, instead_of: Running | None = None
    ) -> Running | None:
        """Start one request as `start` does; where that cannot be, send its error."""
        try:
            return self.start(request, sink, instead_of=instead_of)
        except Exception as error:
            failure = error if isinstance(error, JuiceError) else GenerationError(repr(error))
            sink(Update(index=request.index, error=failure))
            return None

    def submit(self, requests: Sequence[Request], sink: Sink) -> list[Running]:
        """Check all requests, then `begin` them, numbered in this order.

        Raises:
            RequestError: One of them cannot run.
            EngineStoppedError: The engine was closed or failed.
        """
        return self.begin(self._checked(requests), sink)

    def _checked(self, requests: Sequence[Request]) -> list[Request]:
        if not self.status.is_alive:
            raise EngineStoppedError(self.why_stopped)
        for request in requests:
            self.check(request)
        return numbered(requests)

    @property
    def why_stopped(self) -> str:
        """The reason why nothing can be started any more, where that is so."""
        return "the engine was closed"

    @abstractmethod
    def close(self) -> None:
        """End everything that runs or waits, and release the model."""

    def when_lost(self, listener: Callable[[EngineStoppedError], object]) -> None:  # noqa: B027
        """Call the listener, in a thread of its own, when a process of the engine is lost."""

    def require(self, capability: Capability) -> None:
        """Raise MissingCapabilityError if this engine lacks a capability."""
        if capability not in self.capabilities:
            raise MissingCapabilityError(
                f"the engine {self.name!r} cannot {capability.value}; load the model with juice's "
                "own engine"
            )

    @property
    def loaded(self) -> Any:
        """The model's modules and hooks, a `LoadedModel`.

        Raises:
            MissingCapabilityError: The engine gives no access to them.
        """
        self.require(Capability.ACTIVATIONS)
        raise NotImplementedError("an engine that has the capability has the model")

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.description.tokenizer.all_special_ids)

    def _transcript(self, request: Request, sink: Sink) -> Transcript:
        """Return the transcript of a new request, which sends its updates."""
        text = TextStream(
            self.description.tokenizer,
            request.prompt_ids,
            request.options.stop,
            self._special_ids,
            skip_special_tokens=request.options.skip_special_tokens,
        )
        return Transcript(request, text, self.description.stop_token_ids, sink)

    def _end_sandbox(self) -> None:
        if "structures" in vars(self):
            self.structures.end_sandbox()

    @cached_property
    def structures(self) -> Structures:
        """The forms that answers may have."""
        model = self.description
        return Structures(model.tokenizer, model.vocabulary_size, model.stop_token_ids)

    def prepare_structures(self) -> None:
        """Do what the first structure would wait for; other requests would wait as well.

        Raises RequestError where answers can have no structure, and GenerationError where the
        process that tries structures out does not start.
        """
        self.structures.prepare()

    def check(self, request: Request) -> None:
        """Raise an error for a request that cannot run.

        Raises:
            RequestError: A value is wrong.
            ContextLengthError: The request is too long.
            MissingCapabilityError: The engine cannot do what it asks for.
        """
        if request.contrast is not None:
            self.require(Capability.CONTRAST)
        if request.options.watch:
            self.require(Capability.WATCH)
        if request.options.structure is not None:
            self.structures.check(request.options.structure)
        request.check_tokens(self.description.vocabulary_size)
        request.check_length(self.limits.max_model_len)

    def fits(self, request: Request) -> bool:
        """Return whether a request is short enough for the engine.

        Raises RequestError for one that is wrong in another way.
        """
        try:
            self.check(request)
        except ContextLengthError:
            return False
        return True

    def generate(
        self,
        requests: Sequence[Request],
        *,
        progress: Progress = silent,
        description: str = "generating",
    ) -> list[Completion]:
        """Run all requests and return their completions; raises JuiceError once one fails."""
        done: dict[int, Completion] = {}
        with progress(description, len(requests)) as advance:
            for update in self.stream(requests, only_last=True):
                if update.completion is not None:
                    done[update.index] = update.completion
                    advance(1)
        return [done[i] for i in range(len(requests))]

    def stream(self, requests: Sequence[Request], *, only_last: bool = False) -> Iterator[Update]:
        """Run all requests and yield their updates, or only the last ones.

        Raises JuiceError once one fails.
        """
        updates: SimpleQueue[Update] = SimpleQueue()

        def sink(update: Update) -> None:
            if update.is_last or not only_last:
                updates.put(update)

        # Longest first, so that prompts prefilled together need little padding.
        ordered = sorted(self._checked(requests), key=lambda request: -len(request.prompt_ids))
        running = self.begin(ordered, sink)
        n_open = len(ordered)
        try:
            while n_open:
                update = updates.get()
                if update.error is not None:
                    raise update.error
                n_open -= update.is_last
                yield update
        finally:
            _cancel(running)

    async def astream(self, requests: Sequence[Request]) -> AsyncIterator[Update]:
        """Do what `stream` does without blocking the event loop; leaving it cancels what runs."""
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Update]()
        running: list[Running] = []
        left = Event()

        def sink(update: Update) -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits
                loop.call_soon_threadsafe(updates.put_nowait, update)

        def submit() -> None:
            running.extend(self.submit(requests, sink))
            if left.is_set():
                _cancel(running)

        try:
            await asyncio.to_thread(submit)
            n_open = len(requests)
            while n_open:
                update = await updates.get()
                if update.error is not None:
                    raise update.error
                n_open -= update.is_last
                yield update
        finally:
            left.set()  # a thread that still submits cancels what it gets
            _cancel(running)


def _cancel(running: Sequence[Running]) -> None:
    for sequence in running:
        sequence.cancel()


MIB = 1 << 20
CGROUP = Path("/sys/fs/cgroup")
# The rest is for the activations and, in main memory, for everything else on the machine.
SHARE_OF_FREE = {"cuda": 0.8, "cpu": 0.5, "mps": 0.5}
# The tokens of a step on a CPU times the weights: some 20 s in float32 on one core.
N_PRODUCTS_ON_CPU, MIN_PREFILL_TOKENS = 1e12, 128


def settled(
    limits: Limits,
    max_positions: int | None,
    layers_on: Mapping[torch.device, int],
    n_weights: int,
) -> Limits:
    """Return the limits for a loaded model, with the open ones filled in.

    Args:
        limits: Those that were given.
        max_positions: The model's context in tokens.
        layers_on: The number of layers on each device, whose keys and values are there, too.
        n_weights: The number of the model's weights.

    Raises:
        RequestError: `max_model_len` is beyond the model's context.
    """
    if limits.max_model_len and max_positions and limits.max_model_len > max_positions:
        raise RequestError(
            f"max_model_len is {limits.max_model_len}; the model has a context of {max_positions} "
            "tokens: choose at most that",
            param="max_model_len",
        )
    n_layers = sum(layers_on.values())
    # Each device bounds all: its layers have a part of every token.
    room = min(
        SHARE_OF_FREE.get(device.type, 0.5) * free_bytes(device) * n_layers / n_here
        for device, n_here in layers_on.items()
    )
    n_prefill = MAX_PREFILL_TOKENS
    if any(device.type == "cpu" for device in layers_on):
        fitting = round(N_PRODUCTS_ON_CPU / n_weights)
        n_prefill = min(n_prefill, max(MIN_PREFILL_TOKENS, fitting))
    return replace(
        limits,
        max_model_len=limits.max_model_len or max_positions,
        kv_memory_bytes=limits.kv_memory_bytes or max(MIB, int(room)),
        max_prefill_tokens=limits.max_prefill_tokens or n_prefill,
    )


def free_bytes(device: torch.device) -> int:
    """Return the bytes free on a device; for a CPU, what the machine and its cgroup leave."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    available = _available_bytes()
    try:
        # A container's limit; "max" where there is none.
        bound, used = (
            int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
    except (OSError, ValueError):
        return available
    return min(available, max(0, bound - used))


def _available_bytes() -> int:
    """Return the memory available without swapping; where that is unknown, half of all memory."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
