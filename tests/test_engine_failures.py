"""What is cancelled, fails or dies: it ends alone and leaves nothing behind."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch

from juice.engine import GenerationRequest, Limits, Sampling, Update
from juice.errors import CancelledError, EngineStoppedError, GenerationError, NonFiniteError
from juice.steered_model import SteeredModel
from tests.running import Collector, loaded, random_request
from tests.test_engine_exactness import steering

BROKEN, HUGE = 299, 298  # tokens that the faulty model below cannot bear


def test_1000_cancelled_requests_leave_no_row_and_no_memory_behind() -> None:
    model = loaded(limits=Limits(max_batch=8))
    rng = Random(0)
    request = GenerationRequest(prompt_ids=(1, 2, 3), max_tokens=100, ignore_eos=True, steering=steering({(0, 0): 1.0, (3, 0): 1.0}))
    expected = model.engine.generate([request])[0].token_ids
    for _ in range(1000):
        collector = Collector()
        sequence = model.engine.submit([request], collector)[0]
        if rng.random() < 0.5:
            while not collector.updates:
                time.sleep(0.0002)
        sequence.cancel()
        collector.wait(1)
        status = model.engine.status
        assert status.n_running == status.n_waiting == status.n_kv_bytes == 0
    assert model.engine.generate([request])[0].token_ids == expected
    lanes = [model.engine._loop.table.mains, *model.engine._loop.table.companions]
    assert not any(lane.rows or lane.n_decoding for lane in lanes)


def test_a_cancelled_request_gets_no_token_after_the_next_step() -> None:
    model = loaded()
    collector = Collector()
    sequence = model.engine.submit([GenerationRequest(prompt_ids=(1, 2, 3), max_tokens=120, ignore_eos=True)], collector)[0]
    while len(collector.updates.get(0, ())) < 3:
        time.sleep(0.0001)
    sequence.cancel()
    n_then = len(collector.updates[0])
    collector.wait(1)
    n_tokens = sum(len(update.tokens) for update in collector.updates[0])
    assert n_tokens <= n_then + 1
    assert isinstance(collector.error(), CancelledError)


@pytest.fixture
def faulty() -> Iterator[SteeredModel]:
    """A model that raises where a prompt holds BROKEN, runs out of memory at 297, and is not finite where one holds HUGE."""
    model = loaded()
    network = model.loaded.model
    with torch.no_grad():
        network.get_input_embeddings().weight[HUGE] = torch.inf

    def raise_for(_module: object, args: tuple[torch.Tensor, ...]) -> None:
        if (args[0] == BROKEN).any():
            raise ValueError("this token is broken")
        if (args[0] == 297).any():
            raise torch.OutOfMemoryError("no memory is left")

    network.get_input_embeddings().register_forward_pre_hook(raise_for)
    yield model
    model.engine.close()


@pytest.mark.parametrize(("token", "error", "message"), [
    (BROKEN, GenerationError, "this token is broken"), (297, GenerationError, "not enough memory"), (HUGE, NonFiniteError, "not finite"),
])  # fmt: skip
@pytest.mark.parametrize("in_mid_stream", [False, True])
def test_a_failure_ends_its_request_alone(
    faulty: SteeredModel, token: int, error: type[Exception], message: str, in_mid_stream: bool
) -> None:
    """The sick one sits between healthy ones in the prompts' forward, or is driven to the token by its bias while all decode."""
    rng = Random(3)
    never = dict.fromkeys((297, HUGE, BROKEN), -100.0)
    drawn = [random_request(rng) for _ in range(6)]
    healthy = [replace(r, max_tokens=12, ignore_eos=True, sampling=replace(r.sampling, logit_bias=never)) for r in drawn]
    alone = [faulty.engine.generate([request])[0].token_ids for request in healthy]
    sick = GenerationRequest(prompt_ids=(5, 6, 7) if in_mid_stream else (5, token, 7), max_tokens=30, ignore_eos=True,
                             steering=steering({(0, 1): 1.0, (2, 2): -1.0}))  # fmt: skip
    if in_mid_stream:
        sick = replace(sick, sampling=Sampling(logit_bias={token: 100.0}))
    collector = Collector()
    faulty.engine.submit([*healthy[:3], sick, *healthy[3:]], collector)
    collector.wait(7)
    assert isinstance(collector.error(3), error)
    assert message in str(collector.error(3))
    got = [collector.completion(i).token_ids for i in (0, 1, 2, 4, 5, 6)]
    assert got == alone
    # What was not finite is gone from the slots: whoever gets them next is not touched.
    assert [c.token_ids for c in faulty.engine.generate(healthy)] == alone
    assert faulty.engine.status.is_alive


def test_a_sink_or_tokenizer_that_raises_ends_its_request_alone() -> None:
    model = loaded()
    request = GenerationRequest(prompt_ids=(1, 2, 3), max_tokens=20, ignore_eos=True)
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


def test_an_engine_whose_loop_dies_ends_everything_and_takes_nothing_more() -> None:
    model = loaded()
    request = GenerationRequest(prompt_ids=(1, 2, 3), max_tokens=100, ignore_eos=True)
    collector = Collector()
    model.engine.submit([request], collector)
    while not collector.updates:
        time.sleep(0.001)

    def die() -> None:
        raise SystemError("the loop itself is broken")

    model.engine._loop._admit = die  # what only a bug of ours could do
    collector.wait(1)
    assert isinstance(collector.error(), EngineStoppedError)
    model.engine._thread.join(5)
    assert not model.engine.status.is_alive
    with pytest.raises(EngineStoppedError, match="the loop itself is broken"):
        model.engine.generate([request])


def test_an_engine_nobody_holds_ends_its_thread() -> None:
    model = loaded()
    model.generate("abc", max_tokens=2)
    thread, gone = model.engine._thread, weakref.ref(model.loaded.model)
    del model
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
    gc.collect()
    assert gone() is None
