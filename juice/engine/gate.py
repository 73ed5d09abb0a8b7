"""Gates at work: a request runs steered, and unsteered instead where its gate says no.

A request is held back until the first new token of the run that decides: its own, or that of a
request beside it for the prompt without its context.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock

from juice.engine.answer import Completion, Sink, Update, cut
from juice.engine.request import GenerationOptions, Request, RequestGate, Running
from juice.engine.steer import GateReport, unsteered
from juice.errors import CancelledError, JuiceError

Start = Callable[..., Running | None]  # `Engine.attempt`


def start_gated(start: Start, requests: Sequence[Request], sink: Sink) -> list[Running | None]:
    """Start requests, those with a gate after the run that decides.

    None stands for each of which `start` has sent an error instead.
    """
    decisions: dict[int, _Decision] = {}
    gated: dict[int, _Run] = {}
    for i, request in enumerate(requests):
        if request.gate is not None:
            decision = decisions.setdefault(id(request.gate), _Decision(request, request.gate))
            gated[i] = _Run(start, request, decision, sink)
    # What decides goes first, so that nothing runs for long that need not.
    for decision in decisions.values():
        decision.ask(start)
    started: list[Running | None] = []
    for i, request in enumerate(requests):
        if (run := gated.get(i)) is not None:
            run.start()
            started.append(run)
        else:
            started.append(start(request, sink))
    return started


class _Decision:
    """The decision whether the requests of one prompt are steered."""

    def __init__(self, request: Request, gate: RequestGate) -> None:
        self.gate = gate
        self.report: GateReport | None = None
        self.queued_s = 0.0  # when the run that decides started
        self.runs: list[_Run] = []
        self._request = request
        self._asked: Running | None = None

    @property
    def is_asked_apart(self) -> bool:
        """Whether another request than those that wait for the decision answers it."""
        return self.gate.signal == "memory"

    def ask(self, start: Start) -> None:
        """Start the request for the prompt without its context, where that decides."""
        if not self.is_asked_apart:
            return
        question = replace(
            self._request,
            prompt_ids=self.gate.without_context,
            options=GenerationOptions(max_tokens=1, top_logprobs=1),
            steering=unsteered(),
            gate=None,
        )
        self._asked = start(question, self._answer)

    def leave(self) -> None:
        """End the request that decides, once no run waits for it any more."""
        if self._asked is not None and self.report is None and all(r.is_left for r in self.runs):
            self._asked.cancel()

    def see(self, update: Update) -> None:
        """Take the update with the first new token of a steered run."""
        if not self.is_asked_apart:
            self._decide(update)

    def _answer(self, update: Update) -> None:
        if update.error is not None:
            for run in self.runs:
                run.fail(update.error)
        elif update.tokens and self.report is None:
            self._decide(update)

    def _decide(self, update: Update) -> None:
        self.report = self.gate.decide(self._request.prompt_ids, update.tokens[0])
        self.queued_s = update.queued_s
        for run in self.runs:
            run.go_on(self.report)


class _Run:
    """A request with a gate; any thread may call `cancel`, the rest is the engine's."""

    def __init__(self, start: Start, request: Request, decision: _Decision, sink: Sink) -> None:
        self._start, self._request, self._sink = start, request, sink
        self._decision = decision
        decision.runs.append(self)
        self._held: list[Update] = []
        self._gated_s = 0.0
        self.is_over = self._is_unsteered = False
        self._lock = Lock()
        self._running: Running | None = None
        self._cancelled: JuiceError | None = None

    def start(self) -> None:
        """Start the steered run, unless the decision came first, by another run."""
        if self.is_over or self._is_unsteered:
            return
        n_top = max(1, self._request.options.top_logprobs)
        steered = replace(self._request.with_options(top_logprobs=n_top), gate=None)
        self._keep(self._start(steered, self._take), is_steered=True)

    def cancel(self, reason: JuiceError | None = None) -> None:
        """End it soon; its last update is then an error."""
        with self._lock:
            self._cancelled = reason or CancelledError("the request was cancelled")
            running = self._running
        if running is not None:
            running.cancel(reason)
        self._decision.leave()  # one that has ended is held back until then

    @property
    def is_left(self) -> bool:
        """Whether it waits for the decision no more."""
        return self.is_over or self._cancelled is not None

    def _keep(self, running: Running | None, *, is_steered: bool) -> None:
        """Keep what runs now; what has started too late is cancelled."""
        with self._lock:
            is_late = is_steered and (self.is_over or self._is_unsteered)
            if not is_late:
                self._running = running
            cancelled = self._cancelled
        if running is not None and (is_late or cancelled is not None):
            running.cancel(cancelled)

    def _take(self, update: Update) -> None:
        """Take an update of the steered run."""
        if self.is_over or self._is_unsteered:
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
        if self.is_over:
            return
        self._gated_s = time.monotonic() - self._request.arrived
        if report.steers:
            for update in held:
                self._send(update)
            return
        with self._lock:
            self._is_unsteered = True
            steered, self._running = self._running, None
        if self._cancelled is not None:
            self._send(Update(index=self._request.index, error=self._cancelled))
        else:
            # Before its place is free, so that nothing else is let in there.
            steering = self._request.steering.turned_off(report)
            plain = replace(self._request, gate=None, steering=steering)
            self._keep(self._start(plain, self._send, instead_of=steered), is_steered=False)
        if steered is not None:
            steered.cancel()

    def fail(self, error: JuiceError) -> None:
        """End it with an error."""
        if self.is_over:
            return
        self._send(Update(index=self._request.index, error=self._cancelled or error))
        if self._running is not None:
            self._running.cancel()

    def _send(self, update: Update) -> None:
        """Send an update as the request asked for it."""
        self.is_over = self.is_over or update.is_last
        if update.error is not None:
            self._decision.leave()
        update = cut(update, self._request.options.top_logprobs)
        if update.completion is not None:
            update = replace(update, completion=self._decided(update.completion))
        self._sink(update)

    def _decided(self, completion: Completion) -> Completion:
        """Return a completion with the gate's decision and the times of what was held back."""
        timing = replace(
            completion.timing,
            queued_s=self._decision.queued_s,
            tokens_s=tuple(max(at, self._gated_s) for at in completion.timing.tokens_s),
            gate_s=(self._decision.queued_s, self._gated_s),
        )
        report = replace(completion.steering, gate=self._decision.report)
        return replace(completion, steering=report, timing=timing)
