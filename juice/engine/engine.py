"""The contract that every engine fulfils: requests in, news out, from any thread; what is built on it alone is here too."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, ClassVar, Protocol

from juice.engine.capabilities import EVERY_CAPABILITY, Capability
from juice.engine.completion import Completion, Sink, Update
from juice.engine.description import ModelDescription
from juice.engine.limits import Limits
from juice.engine.request import GenerationRequest
from juice.engine.status import Status
from juice.engine.steering import Steering
from juice.errors import ContextLengthError, EngineStoppedError, JuiceError, MissingCapabilityError
from juice.progress import Progress, silent


class Running(Protocol):
    """A request that was submitted."""

    def cancel(self, reason: JuiceError | None = None) -> None:
        """End it soon; its last news then is an error."""


class Engine(ABC):
    """Generates for any number of requests on one model, each steered its own way.

    Any thread may submit, cancel and read. `name` is what users call the engine, `limits` are the
    bounds in force.
    """

    name: ClassVar[str]
    capabilities: ClassVar[frozenset[Capability]] = EVERY_CAPABILITY
    limits: Limits

    @property
    @abstractmethod
    def description(self) -> ModelDescription:
        """The model."""

    @property
    @abstractmethod
    def status(self) -> Status:
        """How the engine is doing now."""

    @property
    @abstractmethod
    def n_kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one unsteered token, over all layers."""

    @property
    def details(self) -> dict[str, Any]:
        """What this engine alone has to say about how it runs the model, as plain data."""
        return {}

    @abstractmethod
    def companion_layers(self, steering: Steering) -> range:
        """Return the layers in which a request that is steered so has a second row."""

    @abstractmethod
    def submit(
        self, requests: Sequence[GenerationRequest], sink: Sink, *, wait: bool = False
    ) -> Sequence[Running]:
        """Start requests, all or none.

        Args:
            requests: What to generate.
            sink: Takes their updates, numbered as here, in the engine's thread; it must neither block nor raise.
            wait: Wait for room instead of raising OverloadedError.

        Raises:
            RequestError: One of them cannot run.
            OverloadedError: As many wait as may.
            EngineStoppedError: The engine was closed or failed.
        """

    @abstractmethod
    def close(self) -> None:
        """End everything that runs or waits, and release the model."""

    def when_lost(self, listener: Callable[[EngineStoppedError], object]) -> None:  # noqa: B027
        """Call a listener, in a thread of its own, when a part of the engine in another process is lost."""

    def require(self, capability: Capability) -> None:
        """Raise MissingCapabilityError for what this engine cannot do."""
        if capability not in self.capabilities:
            raise MissingCapabilityError(
                f"the engine {self.name!r} cannot {capability.value}; load the model with juice's"
                " own engine"
            )

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError, ContextLengthError or MissingCapabilityError for a request that cannot run."""
        if request.contrast is not None:
            self.require(Capability.CONTRAST)
        if request.watch:
            self.require(Capability.WATCH)
        request.check_tokens(self.description.vocabulary_size)
        request.check_length(self.limits.max_model_len)

    def fits(self, request: GenerationRequest) -> bool:
        """Return whether a request is short enough for the engine.

        Raises RequestError for one that is wrong otherwise.
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
        """Run all requests and return their completions in their order.

        Raises JuiceError as soon as one fails.
        """
        done: dict[int, Completion] = {}
        with progress(description, len(requests)) as advance:
            for update in self._updates(requests, only_last=True):
                if update.completion is not None:
                    done[update.index] = update.completion
                    advance(1)
        return [done[i] for i in range(len(requests))]

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[Update]:
        """Run all requests, yielding news of each as it comes.

        Raises JuiceError as soon as one fails.
        """
        return self._updates(requests, only_last=False)

    async def astream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Update]:
        """As `stream`, without blocking the event loop; leaving it cancels what still runs."""
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Update]()

        def sink(update: Update) -> None:
            loop.call_soon_threadsafe(updates.put_nowait, update)

        submitting = asyncio.ensure_future(
            asyncio.to_thread(self.submit, requests, sink, wait=True)
        )
        try:
            running = await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(_cancel_all)  # the thread submits all the same
            raise
        n_open = len(running)
        try:
            while n_open:
                update = await updates.get()
                if update.error is not None:
                    raise update.error
                n_open -= update.is_last
                yield update
        finally:
            for one in running:
                one.cancel()

    def _updates(
        self, requests: Sequence[GenerationRequest], *, only_last: bool
    ) -> Iterator[Update]:
        # Longest first: prompts that go through together then need little padding.
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
            for one in running:
                one.cancel()


def _cancel_all(submitted: asyncio.Future[Sequence[Running]]) -> None:
    if not submitted.cancelled() and submitted.exception() is None:
        for one in submitted.result():
            one.cancel()
