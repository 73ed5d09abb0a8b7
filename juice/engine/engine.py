"""The contract that every engine fulfils, and what builds on it alone: requests in, updates out."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from queue import SimpleQueue
from threading import Event
from typing import Any, ClassVar

from juice.engine.capabilities import Capability
from juice.engine.completion import Completion, Sink, Update
from juice.engine.description import ModelDescription
from juice.engine.gating import start_gated
from juice.engine.limits import Limits
from juice.engine.request import GenerationRequest
from juice.engine.running import Running
from juice.engine.status import Status
from juice.engine.steering import Steering
from juice.engine.structure import Structures
from juice.engine.system_fingerprint import system_fingerprint
from juice.errors import ContextLengthError, EngineStoppedError, MissingCapabilityError
from juice.progress import Progress, silent


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
    def n_kv_bytes(self, request: GenerationRequest) -> int:
        """Return the bytes that must be free for a request to start."""

    @property
    def details(self) -> dict[str, Any]:
        """Facts about how this engine in particular runs the model, as plain data."""
        return {}

    @property
    def steerable_layers(self) -> range:
        """The layers in which requests can be steered."""
        return range(self.description.n_layers)

    @property
    def numerics(self) -> dict[str, Any]:
        """What else of this engine decides the bits that a request gets alone, as plain data."""
        return {}

    @property
    def system_fingerprint(self) -> str:
        """A name for all that decides a request's bits alone; another where anything differs."""
        return system_fingerprint(self.name, self.description, self.numerics)

    @abstractmethod
    def companion_layers(self, steering: Steering) -> range:
        """Return the layers in which a request with this steering has a companion."""

    @abstractmethod
    def start(
        self, requests: Sequence[GenerationRequest], sink: Sink, *, wait: bool = False
    ) -> Sequence[Running]:
        """Do what `submit` does, for requests without a gate."""

    @abstractmethod
    def resume(
        self, request: GenerationRequest, sink: Sink, *, instead_of: Running | None
    ) -> Running:
        """Start a request before all that wait, in the engine's thread.

        Args:
            request: What to generate; it needs no more room than what was cancelled.
            sink: As in `start`.
            instead_of: The request that was cancelled for it, whose place it takes.

        Raises:
            EngineStoppedError: The engine was closed or failed.
        """

    def submit(
        self, requests: Sequence[GenerationRequest], sink: Sink, *, wait: bool = False
    ) -> Sequence[Running]:
        """Start all requests or none.

        Args:
            requests: What to generate.
            sink: Takes their updates, numbered as here, in the engine's thread, without blocking.
            wait: Whether to wait for room instead of raising OverloadedError.

        Raises:
            RequestError: One of them cannot run.
            OverloadedError: Too many requests are waiting.
            EngineStoppedError: The engine was closed or failed.
        """
        if any(request.gate is not None for request in requests):
            return start_gated(self, requests, sink, wait=wait)
        return self.start(requests, sink, wait=wait)

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

    @cached_property
    def structures(self) -> Structures:
        """The forms that answers may have."""
        own = self.description
        return Structures(own.tokenizer, own.vocabulary_size, own.stop_token_ids)

    def check(self, request: GenerationRequest) -> None:
        """Raise an error for a request that cannot run.

        Raises:
            RequestError: A value is wrong.
            ContextLengthError: The request is too long.
            MissingCapabilityError: The engine cannot do what it asks for.
        """
        if request.contrast is not None:
            self.require(Capability.CONTRAST)
        if request.watch:
            self.require(Capability.WATCH)
        if request.structure is not None:
            self.structures.check(request.structure)
        request.check_tokens(self.description.vocabulary_size)
        request.check_length(self.limits.max_model_len)

    def fits(self, request: GenerationRequest) -> bool:
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
        requests: Sequence[GenerationRequest],
        *,
        progress: Progress = silent,
        description: str = "generating",
    ) -> list[Completion]:
        """Run all requests and return their completions in the same order.

        Raises JuiceError as soon as one fails.
        """
        done: dict[int, Completion] = {}
        with progress(description, len(requests)) as advance:
            for update in self.stream(requests, only_last=True):
                if update.completion is not None:
                    done[update.index] = update.completion
                    advance(1)
        return [done[i] for i in range(len(requests))]

    def stream(
        self, requests: Sequence[GenerationRequest], *, only_last: bool = False
    ) -> Iterator[Update]:
        """Run all requests, yielding their updates as they come, or only each one's last.

        Raises JuiceError as soon as one fails.
        """
        # Longest first, so that prompts prefilled together need little padding.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt_ids))
        updates: SimpleQueue[Update] = SimpleQueue()

        def sink(update: Update) -> None:
            if update.is_last or not only_last:
                updates.put(replace(update, index=order[update.index]))

        running = self.submit([requests[i] for i in order], sink, wait=True)
        n_open = len(running)
        try:
            while n_open:
                update = updates.get()
                if update.error is not None:
                    raise update.error
                n_open -= update.is_last
                yield update
        finally:
            _cancel(running)

    async def astream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Update]:
        """Do what `stream` does without blocking the event loop; leaving it cancels what runs."""
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Update]()
        running: list[Running] = []
        left = Event()

        def sink(update: Update) -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits
                loop.call_soon_threadsafe(updates.put_nowait, update)

        def submit() -> None:
            running.extend(self.submit(requests, sink, wait=True))
            if left.is_set():
                _cancel(running)

        try:
            await asyncio.to_thread(submit)
            n_open = len(running)
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
    for one in running:
        one.cancel()
