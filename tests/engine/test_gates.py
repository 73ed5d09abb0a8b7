"""A gate steers or not as its definition says, and what comes out is exact either way.

The oracle is transformers' own model, uncached, in two runs.
"""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest
from transformers import PreTrainedModel

from juice.engine.answer import Sink
from juice.engine.contract import Engine
from juice.engine.request import Request, RequestGate, Running
from juice.engine.sampling_options import SamplingOptions
from juice.errors import CancelledError, ContextLengthError, JuiceError, RequestError
from tests.engine.conftest import LIMITS
from tests.support import oracle, tiny
from tests.support.canned_engine import CannedEngine, CannedRequest, HeldEngine
from tests.support.mixed import mixed_requests, steering
from tests.support.running import Collector, assert_completes

TOLERANCE = 1e-4
HEADS = {(1, 2): 2.0, (3, 0): -2.0, (2, 1): 1.0}
PROMPT = tuple(range(3, 20))
# Thresholds that every value reaches, and none.
ALWAYS, NEVER = 0.0, 1.1


def value_by_definition(
    network: PreTrainedModel, signal: str, ids: list[int], alone: list[int], logits: object
) -> float:
    """Return a signal's value; `logits` are the steered run's at the prompt's end."""
    if signal == "memory":
        logits = oracle.forward(network, alone)[0][-1]
    likeliest = int(logits.argmax())
    if signal == "copied" and likeliest not in ids:
        return 0.0
    return float(logits.softmax(-1)[likeliest])


def test_gated_requests_are_those_of_the_two_runs_or_of_one(
    engine: Engine, network: PreTrainedModel
) -> None:
    """Kills: a decision by the wrong run, prompt or token, a first token that is sent twice or
    lost, an unsteered run that keeps the heads, updates under another request's number.
    """
    rng, requests, expected = Random(5), [], []
    for i, (request, heads, method) in enumerate(mixed_requests(seed=6, n=32)):
        ids = list(request.prompt_ids)
        steered, plain = (
            oracle.generate(network, ids, each, request.options.max_tokens, method=method)
            for each in (heads, {})
        )
        if not heads:
            requests.append(request)
            expected.append((plain, None, None))
            continue
        signal = ("memory", "steered", "copied")[i % 3]
        if signal == "copied" and i % 2:  # a prompt that does hold the token
            ids = [*ids[:-1], steered[0][0], ids[-1]]
            request = replace(request, prompt_ids=tuple(ids))
            steered, plain = (
                oracle.generate(network, ids, each, request.options.max_tokens, method=method)
                for each in (heads, {})
            )
        alone = [rng.randrange(1, tiny.VOCAB_SIZE) for _ in range(rng.choice([1, 4, 20]))]
        value = value_by_definition(network, signal, ids, alone, steered[1][0])
        steers = rng.random() < 0.5 if value else False
        threshold = value * 0.9 if steers else value * 1.1 + 1e-3
        gate = RequestGate(
            signal=signal,
            threshold=threshold,
            without_context=tuple(alone) if signal == "memory" else (),
        )
        requests.append(replace(request.with_options(top_logprobs=rng.choice([0, 3])), gate=gate))
        expected.append((steered if steers else plain, steers, value))
    decisions = {
        (r.gate.signal, each[1]) for r, each in zip(requests, expected, strict=True) if r.gate
    }
    assert len(decisions) == 6, "every signal must decide both ways"
    for request, done, (item, steers, value) in zip(
        requests, engine.generate(requests), expected, strict=True
    ):
        assert_completes(done, item, TOLERANCE)
        assert {len(token.top) for token in done.tokens} == {request.options.top_logprobs}
        if steers is None:
            assert done.steering.gate is None
            continue
        report = done.steering.gate
        assert (report.steers, report.signal) == (steers, request.gate.signal)
        assert (report.value, report.threshold) == (
            pytest.approx(value, abs=TOLERANCE),
            request.gate.threshold,
        )
        assert done.steering.applied is steers
        assert done.steering.n_heads == (request.steering.report.n_heads if steers else 0)
        assert len(done.timing.tokens_s) == len(done.tokens)
        begun_s, decided_s = done.timing.gate_s
        assert 0 <= begun_s <= decided_s <= done.timing.tokens_s[0] <= done.timing.tokens_s[-1]
        assert 0 <= done.timing.queued_s <= done.timing.tokens_s[0]
        assert steers or done.timing.queued_s == begun_s
    assert engine.status.n_running == engine.status.n_waiting == 0


@pytest.mark.parametrize("signal", ["memory", "steered"])
@pytest.mark.parametrize("threshold", [ALWAYS, NEVER])
def test_choices_of_a_prompt_share_a_decision_and_keep_their_seeds(
    engine: Engine, signal: str, threshold: float
) -> None:
    sampling = SamplingOptions(temperature=1.0, seed=1)
    request = Request.of(
        prompt_ids=PROMPT,
        max_tokens=12,
        ignore_eos=True,
        **dict(sampling),
        steering=steering(HEADS),
        gate=RequestGate(signal=signal, threshold=threshold, without_context=PROMPT[5:]),
    )
    choices = [request.with_options(seed=seed) for seed in range(5)]
    done = engine.generate(choices)
    assert len({id(one.steering.gate) for one in done}) == 1
    ungated = [replace(one, gate=None) for one in choices]
    if threshold == NEVER:
        none = Request.of(prompt_ids=PROMPT)
        ungated = [replace(one, steering=none.steering) for one in ungated]
    assert [one.token_ids for one in done] == [one.token_ids for one in engine.generate(ungated)]
    assert len({one.token_ids for one in done}) == 5


@pytest.mark.parametrize("signal", ["memory", "steered"])
def test_a_stream_is_held_until_the_decision_and_says_everything_once(
    engine: Engine, network: PreTrainedModel, signal: str
) -> None:
    request = Request.of(
        prompt_ids=PROMPT, max_tokens=10, ignore_eos=True, steering=steering(HEADS)
    )
    for threshold, heads in ((ALWAYS, HEADS), (NEVER, {})):
        gate = RequestGate(signal=signal, threshold=threshold, without_context=(5,))
        updates = list(engine.stream([replace(request, gate=gate)]))
        tokens = [token.id for update in updates for token in update.tokens]
        assert not any(token.top for update in updates for token in update.tokens)
        assert tokens == oracle.generate(network, list(PROMPT), heads, 10)[0]
        assert "".join(update.text for update in updates) == updates[-1].completion.text


def test_what_is_not_steered_runs_once(engine: Engine) -> None:
    gate = RequestGate(signal="steered", threshold=NEVER)
    request = Request.of(
        prompt_ids=PROMPT, max_tokens=100, ignore_eos=True, steering=steering(HEADS), gate=gate
    )
    for n, _ in enumerate(engine.stream([request])):
        if n > 20 and engine.status.n_running == 1:
            break
    else:
        pytest.fail("the steered run went on beside the unsteered one")


def test_what_is_not_steered_keeps_its_place(engine: Engine) -> None:
    """It has waited already: nothing that came later starts before it.

    What runs beside it goes on for as long as it can, which leaves time to decide.
    """
    gate = RequestGate(signal="steered", threshold=NEVER)
    gated = Request.of(
        prompt_ids=PROMPT, max_tokens=110, ignore_eos=True, steering=steering(HEADS), gate=gate
    )
    long = Request.of(prompt_ids=PROMPT, max_tokens=110, ignore_eos=True)
    n_running = LIMITS.max_batch
    collector = Collector()
    engine.submit([gated, *[long] * (n_running - 1), *[long] * 10], collector)
    collector.wait(n_running + 10)
    first = collector.completion(0).timing.tokens_s[0]
    assert all(
        first < collector.completion(i).timing.tokens_s[0] for i in range(n_running, n_running + 10)
    )


@pytest.mark.parametrize("signal", ["memory", "steered"])
@pytest.mark.parametrize("threshold", [ALWAYS, NEVER])
def test_what_is_cancelled_ends_whenever_that_is(
    engine: Engine, signal: str, threshold: float
) -> None:
    request = Request.of(
        prompt_ids=PROMPT, max_tokens=100, ignore_eos=True, steering=steering(HEADS)
    )
    for delay_s in (0.0, 0.002, 0.01):
        gate = RequestGate(signal=signal, threshold=threshold, without_context=PROMPT)
        collector = Collector()
        both = engine.submit([replace(request, gate=gate)] * 2, collector)
        time.sleep(delay_s)
        for one in both:
            one.cancel()
        collector.wait(2)
        time.sleep(0.02)
        assert all(isinstance(collector.error(i), CancelledError) for i in range(2))
        assert [sum(u.is_last for u in collector.updates[i]) for i in range(2)] == [1, 1]
    for _ in range(200):
        if engine.status.n_running == engine.status.n_waiting == 0:
            break
        time.sleep(0.01)
    assert engine.status.n_running == engine.status.n_waiting == 0


def test_what_decides_is_cancelled_with_the_last_that_waits_for_it() -> None:
    """Kills: a prompt that goes through the model to decide about what nobody waits for."""
    engine, collector = HeldEngine(), Collector()
    gate = RequestGate(signal="memory", threshold=NEVER, without_context=(5,))
    request = Request.of(prompt_ids=PROMPT, max_tokens=3, steering=steering(HEADS), gate=gate)
    running = engine.submit([request, request], collector)
    decides, *steered = engine.submitted
    for one, own in zip(running, steered, strict=True):
        assert decides.cancelled is None
        one.cancel()
        own.run()
    assert isinstance(decides.cancelled, CancelledError)
    decides.run()
    assert [sum(u.is_last for u in collector.updates[i]) for i in range(2)] == [1, 1]


def test_one_choice_can_be_cancelled_and_the_other_goes_on(
    engine: Engine, network: PreTrainedModel
) -> None:
    gate = RequestGate(signal="memory", threshold=NEVER, without_context=(5,))
    request = Request.of(
        prompt_ids=PROMPT, max_tokens=12, ignore_eos=True, steering=steering(HEADS), gate=gate
    )
    collector = Collector()
    first, _second = engine.submit([request, request], collector)
    first.cancel()
    collector.wait(2)
    assert isinstance(collector.error(0), CancelledError)
    expected = oracle.generate(network, list(PROMPT), {}, 12)[0]
    assert list(collector.completion(1).token_ids) == expected


def test_what_decides_for_one_that_is_cancelled_after_its_end_is_cancelled_with_it() -> None:
    """Kills: a prompt that goes through the model for a client that has left."""
    engine, collector = HeldEngine(), Collector()
    gate = RequestGate(signal="memory", threshold=NEVER, without_context=(5,))
    request = Request.of(prompt_ids=PROMPT, max_tokens=3, steering=steering(HEADS), gate=gate)
    first, second = engine.submit([request, request], collector)
    question, *steered = engine.submitted
    for one in steered:
        one.run()
    first.cancel()
    assert not question.cancelled, "the other one waits for it"
    reason = JuiceError("it took too long")
    second.cancel(reason)
    assert question.cancelled
    question.run()
    assert collector.n_last == 2
    assert isinstance(collector.error(0), CancelledError)
    assert collector.error(1) is reason


def test_what_cannot_run_is_refused_with_all_that_came_with_it(engine: Engine) -> None:
    request = Request.of(prompt_ids=PROMPT, max_tokens=2, steering=steering(HEADS))
    collector = Collector()
    for alone, error in (((1,) * 500, ContextLengthError), ((tiny.VOCAB_SIZE,), RequestError)):
        gate = RequestGate(signal="memory", threshold=NEVER, without_context=alone)
        with pytest.raises(error):
            engine.submit([request, replace(request, gate=gate)], collector)
    gate = RequestGate(signal="steered", threshold=NEVER)
    with pytest.raises(RequestError, match="gate decides by the first new token"):
        replace(request.with_options(max_tokens=0, prompt_logprobs=True), gate=gate)


class DecidesAtOnce(CannedEngine):
    """An engine that ends what decides as it starts, and the rest when it is told to."""

    def start(
        self,
        request: Request,
        sink: Sink,
        *,
        instead_of: Running | None = None,  # noqa: ARG002
    ) -> CannedRequest:
        made = CannedRequest(request, sink)
        if request.options.max_tokens == 1 or request.steering.coefficients:
            made.run()
        else:
            self.submitted.append(made)
        return made


@pytest.mark.parametrize("signal", ["memory", "steered"])
def test_a_decision_that_comes_before_a_run_has_started_does_not_cancel_it(signal: str) -> None:
    """Kills: a no that comes as the steered run starts, and ends the unsteered one."""
    engine, collector = DecidesAtOnce(), Collector()
    gate = RequestGate(signal=signal, threshold=NEVER, without_context=(5,))
    request = Request.of(prompt_ids=PROMPT, max_tokens=3, steering=steering(HEADS), gate=gate)
    engine.submit([request] * 3, collector)
    assert len(engine.submitted) == 3
    for unsteered in engine.submitted:
        unsteered.run()
    collector.wait(3)
    reports = [collector.completion(i).steering for i in range(3)]
    assert [(one.applied, one.gate.steers) for one in reports] == [(False, False)] * 3
