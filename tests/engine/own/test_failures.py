"""Requests that are cancelled or fail, and engines that die: nothing else ends, nothing leaks."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch

import juice
from juice.engine.answer import Update
from juice.engine.load_options import Limits
from juice.engine.own.sequence import Sequence
from juice.engine.request import Request
from juice.errors import CancelledError, EngineStoppedError, GenerationError, NonFiniteError
from juice.steered_model import SteeredModel
from tests.support import tiny
from tests.support.mixed import steering
from tests.support.running import Collector, loaded, random_request, rows_of, slot_layers_of

BROKEN, HUGE, GREEDY = 299, 298, 297  # tokens on which the faulty model below fails


def test_1000_cancelled_requests_leave_no_row_and_no_memory_behind() -> None:
    model = loaded(limits=Limits(max_batch=8))
    rng = Random(0)
    request = Request.of(
        prompt_ids=(1, 2, 3),
        max_tokens=100,
        ignore_eos=True,
        steering=steering({(0, 0): 1.0, (3, 0): 1.0}),
    )
    expected = model.engine.generate([request])[0].token_ids
    for _ in range(1000):
        collector = Collector()
        running = model.engine.submit([request], collector)[0]
        if rng.random() < 0.5:
            while not collector.updates:
                time.sleep(0.0002)
        running.cancel()
        collector.wait(1)
        status = model.engine.status
        assert status.n_running == status.n_waiting == status.n_kv_bytes == 0
    assert model.engine.generate([request])[0].token_ids == expected
    assert not rows_of(model.engine)


def test_a_cancelled_request_gets_no_token_after_the_next_step() -> None:
    model = loaded()
    collector = Collector()
    running = model.engine.submit(
        [Request.of(prompt_ids=(1, 2, 3), max_tokens=120, ignore_eos=True)], collector
    )[0]
    while len(collector.updates.get(0, ())) < 3:
        time.sleep(0.0001)
    running.cancel()
    n_then = len(collector.updates[0])
    collector.wait(1)
    n_tokens = sum(len(update.tokens) for update in collector.updates[0])
    assert n_tokens <= n_then + 1
    assert isinstance(collector.error(), CancelledError)


def test_a_request_that_is_cancelled_as_it_is_admitted_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills: text in no form, of a request whose structure could not be compiled meanwhile."""
    model, collector = loaded(), Collector()
    may_join = model.engine.loop.scheduler.may_join

    def cancelling(sequence: Sequence) -> bool:
        sequence.cancel()
        return may_join(sequence)

    monkeypatch.setattr(model.engine.loop.scheduler, "may_join", cancelling)
    model.engine.submit([Request.of(prompt_ids=(1, 2, 3), max_tokens=1)], collector)
    collector.wait(1)
    assert isinstance(collector.error(), CancelledError)
    assert not any(update.tokens for update in collector.updates[0])
    assert model.engine.status.n_running == 0


@pytest.fixture
def faulty() -> Iterator[SteeredModel]:
    """Yield a model that raises at BROKEN, runs out of memory at GREEDY, is not finite at HUGE."""
    model = loaded()
    network = model.loaded.model
    with torch.no_grad():
        network.get_input_embeddings().weight[HUGE] = torch.inf

    def raise_for(_module: object, args: tuple[torch.Tensor, ...]) -> None:
        if (args[0] == BROKEN).any():
            raise ValueError("this token is broken")
        if (args[0] == GREEDY).any():
            raise torch.OutOfMemoryError("no memory is left")

    network.get_input_embeddings().register_forward_pre_hook(raise_for)
    yield model
    model.engine.close()


@pytest.mark.parametrize(
    ("token", "error", "message"),
    [
        (BROKEN, GenerationError, "this token is broken"),
        (GREEDY, GenerationError, "not enough memory"),
        (HUGE, NonFiniteError, "not finite"),
    ],
)
@pytest.mark.parametrize("in_mid_stream", [False, True])
def test_a_failure_ends_only_its_own_request(
    faulty: SteeredModel, token: int, error: type[Exception], message: str, in_mid_stream: bool
) -> None:
    """The sick request fails in prefill among healthy ones, or later, when a bias forces the token.

    Its prompt is longer than those of some that get its slots next, and shorter than a neighbour's:
    what it left there would be among the keys of their forward. A weight of zero hides it, but does
    not help against values that are not finite.
    """
    rng = Random(3)
    never = dict.fromkeys((GREEDY, HUGE, BROKEN), -100.0)
    drawn = [
        replace(random_request(rng), prompt_ids=tuple(rng.randrange(1, 283) for _ in range(n)))
        for n in (70, 2, 9, 1, 3, 27)
    ]
    dual = steering({(0, 1): 1.0, (2, 2): -1.0})
    healthy = [
        replace(r.with_options(max_tokens=12, ignore_eos=True, logit_bias=never), steering=dual)
        for r in drawn
    ]
    alone = [faulty.engine.generate([request])[0].token_ids for request in healthy]
    sick = Request.of(
        prompt_ids=(5,) * 40 if in_mid_stream else (*(5,) * 39, token),
        max_tokens=30,
        ignore_eos=True,
        steering=dual,
    )
    if in_mid_stream:
        sick = sick.with_options(logit_bias={token: 100.0})
    collector = Collector()
    faulty.engine.submit([*healthy[:3], sick, *healthy[3:]], collector)
    collector.wait(7)
    assert isinstance(collector.error(3), error)
    assert message in str(collector.error(3))
    got = [collector.completion(i).token_ids for i in (0, 1, 2, 4, 5, 6)]
    assert got == alone
    # No value that is not finite is left in the slots: the next requests there are not affected.
    assert [c.token_ids for c in faulty.engine.generate(healthy)] == alone
    assert faulty.engine.status.is_alive


def test_a_sink_that_raises_ends_only_its_own_request() -> None:
    model = loaded()
    request = Request.of(prompt_ids=(1, 2, 3), max_tokens=20, ignore_eos=True)
    expected = model.engine.generate([request])[0].token_ids

    def broken_sink(update: Update) -> None:
        raise RuntimeError("nobody listens")

    collector = Collector()
    model.engine.submit([request], collector)
    model.engine.submit([request], broken_sink)
    collector.wait(1)
    assert collector.completion().token_ids == expected
    assert model.engine.generate([request])[0].token_ids == expected
    assert model.engine.status.n_running == 0


def test_an_engine_whose_loop_dies_ends_every_request_and_accepts_no_more() -> None:
    model = loaded()
    request = Request.of(prompt_ids=(1, 2, 3), max_tokens=100, ignore_eos=True)
    collector = Collector()
    model.engine.submit([request], collector)
    while not collector.updates:
        time.sleep(0.001)

    def die() -> None:
        raise SystemError("the loop itself is broken")

    model.engine.loop.step = die  # as only a bug in the engine could
    collector.wait(1)
    assert isinstance(collector.error(), EngineStoppedError)
    model.engine.thread.join(5)
    assert not model.engine.status.is_alive
    with pytest.raises(EngineStoppedError, match="the loop itself is broken"):
        model.engine.generate([request])


def test_an_engine_that_lost_its_slots_stops_and_reports_it() -> None:
    """Memory runs out while a layer's slots grow, and again while the others shrink back.

    No request may go on from such slots.
    """
    model = loaded()
    first, second = Collector(), Collector()
    request = Request.of(prompt_ids=(1, 2, 3), max_tokens=100, ignore_eos=True)
    model.engine.submit([request], first)
    while not first.updates:
        time.sleep(0.001)
    layers = slot_layers_of(model.engine)
    grow, left = type(layers[0]).reshaped, [5]

    def runs_out(layer: object, source: torch.Tensor, old: tuple[int, int, int]) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("no memory is left")
        return grow(layer, source, old)

    for layer in layers:
        layer.reshaped = runs_out.__get__(layer)
    model.engine.submit([request.with_options(max_tokens=120)] * 12, second)
    first.wait(1)
    second.wait(12)
    assert isinstance(first.error(), EngineStoppedError)
    assert all(second.error(i) is not None for i in range(12))
    model.engine.thread.join(5)
    assert not model.engine.status.is_alive


def test_a_chunk_that_memory_lacks_for_is_halved_and_what_it_held_is_let_go() -> None:
    """Kills: a prompt that fails where a shorter chunk would fit; tensors of a failed forward, kept
    while its requests are tried alone.
    """
    model, most, held = loaded(), 16, list[weakref.ref[torch.Tensor]]()
    rng = Random(5)
    prompts = [tuple(rng.randrange(1, 283) for _ in range(n)) for n in (60, 33, 9)]
    asked = [Request.of(prompt_ids=p, max_tokens=6, ignore_eos=True) for p in prompts]
    expected = [model.engine.generate([request])[0] for request in asked]

    def lacks(_module: object, args: tuple[torch.Tensor, ...]) -> None:
        assert not [ref for ref in held if ref() is not None], "a failed forward still holds memory"
        if args[0].numel() > most:
            computed = torch.zeros(args[0].shape)
            held.append(weakref.ref(computed))
            raise torch.OutOfMemoryError("no memory is left")

    model.loaded.model.get_input_embeddings().register_forward_pre_hook(lacks)
    collector = Collector()
    model.engine.submit(asked, collector)
    collector.wait(3)
    for i, alone in enumerate(expected):
        assert collector.completion(i).token_ids == alone.token_ids
        assert collector.completion(i).logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert held


def test_chunks_of_others_stay_whole_when_a_request_fails_at_every_length(
    faulty: SteeredModel,
) -> None:
    """Kills: an engine that prefills a token at a time ever after."""
    sick = Request.of(prompt_ids=(GREEDY,) * 20, max_tokens=4)
    collector, lengths = Collector(), list[int]()
    faulty.engine.submit([sick], collector)
    collector.wait(1)
    assert "not enough memory" in str(collector.error())
    faulty.loaded.model.get_input_embeddings().register_forward_pre_hook(
        lambda _module, args: lengths.append(args[0].shape[1])
    )
    faulty.engine.generate([Request.of(prompt_ids=(5,) * 20, max_tokens=1)])
    assert lengths == [20]


def test_memory_that_runs_out_as_a_request_joins_ends_only_that_request() -> None:
    model = loaded()
    request = Request.of(
        prompt_ids=(1, 2, 3),
        max_tokens=60,
        ignore_eos=True,
        steering=steering({(0, 1): 1.0, (2, 2): -1.0}),
    )
    expected = model.engine.generate([request])[0].token_ids
    for n_allowed in range(8):  # four layers' keys and values
        first, second = Collector(), Collector()
        fresh = loaded()
        fresh.engine.submit([request], first)
        while not first.updates:
            time.sleep(0.001)
        layers = slot_layers_of(fresh.engine)
        fresh_copy, state = type(layers[0]).reshaped, {"left": n_allowed}

        def runs_out(layer, source, old, grow=fresh_copy, state=state):
            """Fail to grow after n_allowed times; shrinking back, which needs less, succeeds."""
            is_growing = sum(layer.shape) > sum(old)
            state["left"] -= is_growing
            if state["left"] < 0 and is_growing:
                raise torch.OutOfMemoryError("no memory is left")
            return grow(layer, source, old)

        for layer in layers:
            layer.reshaped = runs_out.__get__(layer)
        fresh.engine.submit([replace(request, prompt_ids=tuple(range(1, 50)))], second)
        first.wait(1)
        second.wait(1)
        assert first.completion().token_ids == expected
        assert "not enough memory" in str(second.error())
        for layer in layers:
            del layer.reshaped
        assert fresh.engine.generate([request, request])[1].token_ids == expected


def test_an_overflow_ends_its_generation_and_leaves_the_next_one_unchanged() -> None:
    """What is not finite in a slot would reach the next request there.

    Masked keys are multiplied by zero, which does not hide it.
    """
    network = tiny.tiny_model("llama")
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    before = model.generate(["abc", "x" * 30], max_tokens=6, ignore_eos=True)
    weight = network.model.layers[0].mlp.down_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.inf)
    with pytest.raises(juice.JuiceError, match="not finite"):
        model.generate(["y" * 40] * 3, max_tokens=3)
    with torch.no_grad():
        weight.copy_(kept)
    after = model.generate(["abc", "x" * 30], max_tokens=6, ignore_eos=True)
    assert [c.token_ids for c in after] == [c.token_ids for c in before]


def test_a_forked_child_is_refused_instead_of_waiting_for_ever() -> None:
    model = loaded()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            model.generate("abc", max_tokens=2)
        except EngineStoppedError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as message:
        assert b"after the fork" in message.read()
    os.waitpid(child, 0)


def test_an_engine_without_references_ends_its_thread() -> None:
    model = loaded()
    model.generate("abc", max_tokens=2)
    thread, gone = model.engine.thread, weakref.ref(model.loaded.model)
    del model
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
    gc.collect()
    assert gone() is None
