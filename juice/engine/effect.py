"""What steering and the context do to the first new token, beside requests that ask for it.

The prompt runs unsteered for one token, which says its likeliest tokens; then, for as long, steered
and unsteered without its context, and the probabilities of those tokens are read. A request's last
update waits for them, and its report says what they show.

A divergence is taken over these likeliest tokens, and all others as one. It is at most that of the
whole distributions, and lacks only what differs among unlikely tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from juice.engine.answer import Completion, Sink, Update, cut
from juice.engine.request import MAX_TOP_LOGPROBS, GenerationOptions, Request, Running
from juice.engine.steer import EffectReport, TokenChance, unsteered
from juice.errors import CancelledError, JuiceError

LEAST = 0.01  # nats; below, nothing has changed
SURE = 0.9
UNSTEERED, STEERED, ALONE = "unsteered", "steered", "alone"
Start = Callable[..., Running | None]  # `Engine.attempt`
Begin = Callable[[Sequence[Request], Sink], list[Running | None]]
TextOf = Callable[[int], str]


def start_explained(
    begin: Begin, requests: Sequence[Request], sink: Sink, start: Start, text_of: TextOf
) -> list[Running | None]:
    """Start requests as `begin` does, after what those are compared with that ask for it.

    Args:
        begin: Starts them; None stands for each of which it has sent an error instead.
        requests: Requests that are submitted together, numbered.
        sink: Takes their updates in the end.
        start: Starts one request, or sends its error.
        text_of: Returns the text of a token.
    """
    explained = {
        request.index: _Explained(request, sink, start, text_of)
        for request in requests
        if request.options.explain is not None
    }
    for one in explained.values():
        one.begin()

    def take(update: Update) -> None:
        one = explained.get(update.index)
        (sink if one is None else one.take)(update)

    asked = [
        r.with_options(top_logprobs=max(1, r.options.top_logprobs)) if r.index in explained else r
        for r in requests
    ]
    started = begin(asked, take)
    return [
        explained[request.index].of(running) if running and request.index in explained else running
        for request, running in zip(requests, started, strict=True)
    ]


class _Explained:
    """A request whose last update waits for its others.

    Any thread may call `cancel`, the rest is the engine's.
    """

    def __init__(self, request: Request, sink: Sink, start: Start, text_of: TextOf) -> None:
        self._request, self._sink, self._start, self._text_of = request, sink, start, text_of
        self._open = {UNSTEERED}
        self._found: dict[str, Completion | None] = {}
        self._others: list[Running] = []
        self._itself: Running | None = None
        self._is_left = False
        self._cancelled: JuiceError | None = None
        self._last: Update | None = None

    def begin(self) -> None:
        """Start the first of the others."""
        self._run(UNSTEERED, self._request.prompt_ids, top_logprobs=MAX_TOP_LOGPROBS)

    def of(self, itself: Running) -> Self:
        """Return it, with the request itself, which has started."""
        self._itself = itself
        return self

    def cancel(self, reason: JuiceError | None = None) -> None:
        """End it soon, whether itself or others still run; its last update is then an error."""
        self._cancelled = reason or CancelledError("the request was cancelled")
        if self._itself is not None:
            self._itself.cancel(reason)
        self._leave()

    def _leave(self) -> None:
        """End the others, which nobody waits for."""
        self._is_left = True
        for other in list(self._others):
            other.cancel()

    def take(self, update: Update) -> None:
        """Take an update of the request itself."""
        if update.completion is None:
            self._sink(cut(update, self._request.options.top_logprobs))
            if update.is_last:  # it was cancelled, or has failed
                self._leave()
            return
        self._last = update
        self._finish()

    def _run(self, name: str, ids: tuple[int, ...], **options: Any) -> None:
        request, is_steered = self._request, name == STEERED
        other = replace(
            request,
            prompt_ids=ids,
            options=GenerationOptions(max_tokens=1, **options),
            steering=request.steering if is_steered else unsteered(),
            contrast=request.contrast if is_steered else None,
            gate=None,
            without_context=(),
        )
        running = self._start(other, partial(self._answer, name))
        if running is not None:
            self._others.append(running)
            if self._is_left:  # meanwhile
                running.cancel()

    def _answer(self, name: str, update: Update) -> None:
        if not update.is_last:
            return
        self._found[name] = update.completion
        if name == UNSTEERED and update.completion is not None and not self._is_left:
            self._compare([token for token, _ in update.completion.tokens[0].top])
        self._open.discard(name)
        self._finish()

    def _compare(self, likeliest: Sequence[int]) -> None:
        """Start the runs that read the probabilities of the likeliest unsteered tokens."""
        request = self._request
        is_steered = bool(request.steering.coefficients or request.contrast)
        prompts = {
            STEERED: request.prompt_ids if is_steered else (),
            ALONE: request.without_context,
        }
        needed = {name: ids for name, ids in prompts.items() if ids}
        self._open |= needed.keys()
        for name, ids in needed.items():
            self._run(name, ids, top_logprobs=1, watch=tuple(likeliest))

    def _finish(self) -> None:
        """Send the last update, once all have come."""
        if self._last is None or self._open:
            return
        if self._cancelled is not None:
            self._sink(Update(index=self._request.index, error=self._cancelled))
            return
        completion = self._last.completion
        assert completion is not None
        report = completion.steering
        effect = self._effect(completion)
        if effect is None:
            said = ["the effect is not known: a request beside this one failed"]
        else:
            said = nothing_changed(effect, is_steered=report.applied)
        report = replace(report, effect=effect, warnings=(*report.warnings, *said))
        last = replace(self._last, completion=replace(completion, steering=report))
        self._sink(cut(last, self._request.options.top_logprobs))

    def _effect(self, completion: Completion) -> EffectReport | None:
        """Return what changed; None where one of the others failed."""
        plain, steered = self._found[UNSTEERED], self._found.get(STEERED)
        alone = self._found.get(ALONE)
        if plain is None or any(one is None for one in self._found.values()):
            return None
        changed = steered is not None and completion.steering.applied  # a gate may say no
        return EffectReport(
            unsteered=self._chance(plain),
            steered=self._chance(completion if changed else plain),
            divergence=divergence(plain, steered) if changed and steered else 0.0,
            without_context=None if alone is None else self._chance(alone),
            context_divergence=None if alone is None else divergence(plain, alone),
        )

    def _chance(self, run: Completion) -> TokenChance:
        token, logprob = run.tokens[0].top[0]
        return TokenChance(id=token, text=self._text_of(token), probability=math.exp(logprob))


def divergence(one: Completion, other: Completion) -> float:
    """Return KL(one || other) at their first token, in nats.

    It is taken over the alternatives of the one, which the other watched, and all tokens else.
    """
    first = [math.exp(logprob) for _, logprob in one.tokens[0].top]
    second = [math.exp(logprob) for logprob in other.watched]
    rests = [max(0.0, 1.0 - sum(part)) for part in (first, second)]
    pairs = [*zip(first, second, strict=True), (rests[0], rests[1])]
    total = sum(p * math.log(p / max(q, LEAST_PROBABILITY)) for p, q in pairs if p > ROUNDING)
    return max(0.0, total)


ROUNDING = 1e-6  # of the sums of probabilities
LEAST_PROBABILITY = 1e-30


def nothing_changed(effect: EffectReport, *, is_steered: bool) -> list[str]:
    """Return in words that steering, or the context, changed nothing at the first token."""
    said: list[str] = []
    if is_steered and effect.divergence < LEAST:
        token, chance = effect.unsteered.text, effect.unsteered.probability
        sure = f": the model was already sure of {token!r} ({chance:.2f})" * (chance >= SURE)
        said.append(f"steering changed nothing at the first token{sure}")
    if effect.context_divergence is not None and effect.context_divergence < LEAST:
        said.append("the context was not used: the model begins its answer alike without it")
    return said
