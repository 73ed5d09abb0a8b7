"""Gates at work: a request runs steered, and unsteered instead where its gate says no.

It is held back until the first new token of the run that decides: its own, or that of a request
beside it for the prompt without its context. This is above the engines: each starts what it is
given, and resumes in the place of what was cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import Protocol

from juice.engine.completion import Completion, ScoredToken, Sink, Update
from juice.engine.gate import RequestGate
from juice.engine.report import GateReport
from juice.engine.request import GenerationRequest
from juice.engine.running import Running
from juice.errors import CancelledError, JuiceError


class Starter(Protocol):
    """What gates need of an engine; see `Engine`."""

    def start(
        self, requests: Sequence[GenerationRequest], sink: Sink, *, wait: bool = False
    ) -> Sequence[Running]: ...

    def resume(
        self, request: GenerationRequest, sink: Sink, *, instead_of: Running | None
    ) -> Running: ...


def start_gated(
    engine: Starter, requests: Sequence[GenerationRequest], sink: Sink, *, wait: bool
) -> list[Running]:
    """Start requests of which some have a gate; see `Engine.submit`."""
    decisions: dict[int, _Decision] = {}
    gated: dict[int, _GatedRun] = {}
    for i, request in enumerate(requests):
        if request.gate is not None:
            decision = decisions.setdefault(id(request.gate), _Decision(request, request.gate))
            gated[i] = _GatedRun(engine, i, request, decision, sink)
    asked = [decision for decision in decisions.values() if decision.question is not None]

    def route(update: Update) -> None:
        i = update.index - len(asked)
        if i < 0:
            asked[update.index].answer(update)
        elif i in gated:
            gated[i].take(update)
        else:
            sink(replace(update, index=i))

    # What decides goes first, so that nothing runs for long that need not.
    questions = [decision.question for decision in asked if decision.question is not None]
    firsts = [gated[i].steered if i in gated else one for i, one in enumerate(requests)]
    started = engine.start([*questions, *firsts], route, wait=wait)
    running = list(started[len(asked) :])
    for i, run in gated.items():
        run.attach(running[i])
        running[i] = run
    return running


class _Decision:
    """Whether the requests of one prompt are steered."""

    def __init__(self, request: GenerationRequest, gate: RequestGate) -> None:
        self.gate = gate
        self.report: GateReport | None = None
        self.queued_s = 0.0  # when the run that decides started
        self.runs: list[_GatedRun] = []
        self.question = (
            GenerationRequest(prompt_ids=gate.without_context, max_tokens=1, top_logprobs=1)
            if gate.signal == "memory"
            else None
        )
        self._prompt_ids = request.prompt_ids

    def see(self, update: Update) -> None:
        """Take the update with the first new token of a steered run."""
        if self.question is None:
            self._decide(update)

    def answer(self, update: Update) -> None:
        """Take an update of the request beside the others."""
        if update.error is not None:
            for run in self.runs:
                run.fail(update.error)
        elif update.tokens and self.report is None:
            self._decide(update)

    def _decide(self, update: Update) -> None:
        self.report = self.gate.decide(self._prompt_ids, update.tokens[0])
        self.queued_s = update.queued_s
        for run in self.runs:
            run.go_on(self.report)


class _GatedRun:
    """A request with a gate; any thread may call `cancel`, the rest belongs to the engine's."""

    def __init__(
        self,
        engine: Starter,
        index: int,
        request: GenerationRequest,
        decision: _Decision,
        sink: Sink,
    ) -> None:
        self.steered = replace(request, gate=None, top_logprobs=max(1, request.top_logprobs))
        self._engine, self._index, self._request, self._sink = engine, index, request, sink
        self._decision = decision
        decision.runs.append(self)
        self._held: list[Update] = []
        self._begun, self._gated_s = time.monotonic(), 0.0
        self._is_over = self._is_unsteered = False
        self._lock = Lock()
        self._running: Running | None = None
        self._cancelled: JuiceError | None = None

    def attach(self, running: Running) -> None:
        """Note the steered run; if the gate has already said no, cancel it."""
        with self._lock:
            if not self._is_unsteered:
                self._running = running
                return
        running.cancel()

    def cancel(self, reason: JuiceError | None = None) -> None:
        """End it soon; its last update is then an error."""
        with self._lock:
            self._cancelled = reason or CancelledError("the request was cancelled")
            running = self._running
        if running is not None:
            running.cancel(reason)

    def take(self, update: Update) -> None:
        """Take an update of the steered run."""
        if self._is_over or self._is_unsteered:
            return
        if self._decision.report is not None or update.error is not None:
            self._send(update)
            return
        self._held.append(update)
        if update.tokens:
            self._decision.see(update)

    def go_on(self, report: GateReport) -> None:
        """Send what was held back, or start again without steering."""
        held, self._held = self._held, []
        if self._is_over:
            return
        self._gated_s = time.monotonic() - self._begun
        if report.steers:
            for update in held:
                self._send(update)
            return
        with self._lock:
            self._is_unsteered = True
            steered, self._running = self._running, None
        if steered is not None:
            steered.cancel()
        try:
            with self._lock:
                if self._cancelled is not None:
                    raise self._cancelled
                self._running = self._engine.resume(
                    replace(
                        self._request,
                        gate=None,
                        steering=self._request.steering.turned_off(report),
                    ),
                    self._send,
                    instead_of=steered,
                )
        except JuiceError as error:
            self._send(Update(index=self._index, error=error))

    def fail(self, error: JuiceError) -> None:
        """End it with an error."""
        if self._is_over:
            return
        self._send(Update(index=self._index, error=error))
        if self._running is not None:
            self._running.cancel()

    def _send(self, update: Update) -> None:
        """Send an update as the request asked for it."""
        self._is_over = self._is_over or update.is_last
        tokens, completion = update.tokens, update.completion
        if not self._request.top_logprobs:
            tokens = _without_top(tokens)
        if completion is not None:
            completion = self._as_asked(completion)
        self._sink(replace(update, index=self._index, tokens=tokens, completion=completion))

    def _as_asked(self, completion: Completion) -> Completion:
        """Return a completion with the gate's decision, and times since the request came."""
        if not self._request.top_logprobs:
            completion = replace(
                completion,
                tokens=_without_top(completion.tokens),
                prompt_tokens=_without_top(completion.prompt_tokens),
            )
        own, gate_s = completion.timing, (self._decision.queued_s, self._gated_s)
        if self._is_unsteered:
            again = own.later(self._gated_s)
            timing = replace(again, queued_s=self._decision.queued_s, gate_s=gate_s)
        else:  # what came before was held back
            held = tuple(max(at, self._gated_s) for at in own.tokens_s)
            timing = replace(own, tokens_s=held, gate_s=gate_s)
        report = replace(completion.steering, gate=self._decision.report)
        return replace(completion, steering=report, timing=timing)


def _without_top(tokens: tuple[ScoredToken, ...]) -> tuple[ScoredToken, ...]:
    return tuple(token._replace(top=()) for token in tokens)
