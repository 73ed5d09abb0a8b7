"""The engine under load: joins, leaves, cancels, failures and full memory, each request judged by its run alone."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import torch

import juice
from juice.engine import Completion, Engine, GenerationRequest, Limits, Sampling, Update
from juice.errors import (
    CancelledError,
    ContextLengthError,
    EngineStoppedError,
    GenerationError,
    NonFiniteError,
    OverloadedError,
    RequestError,
)
from juice.steered_model import SteeredModel
from tests import tiny
from tests.test_engine_exactness import steering

BROKEN, HUGE = 299, 298  # tokens that the faulty model below cannot bear


def loaded(shape: str = "llama", *, dtype: torch.dtype = torch.float32, limits: Limits | None = None) -> SteeredModel:
    return juice.load(tiny.tiny_model(shape).to(dtype), tokenizer=tiny.tiny_tokenizer(), limits=limits)


def random_request(rng: Random) -> GenerationRequest:
    """Any length, target, strength, heads and sampling."""
    heads = {
        (rng.randrange(tiny.N_LAYERS), rng.randrange(tiny.N_HEADS)): rng.choice([-3, -1, 0.5, 2]) * rng.choice([0.5, 1, 2])
        for _ in range(rng.choice([0, 1, 2, 3, 5]))
    }
    sampling = Sampling(
        temperature=rng.choice([0, 0, 0.7, 1.5]), top_k=rng.choice([0, 20]), top_p=rng.choice([1, 0.8]), seed=rng.randrange(99)
    )
    return GenerationRequest(
        prompt_ids=tuple(rng.randrange(1, 283) for _ in range(rng.choice([1, 2, 5, 13, 27, 60]))),
        max_tokens=rng.choice([1, 3, 9, 20]),
        ignore_eos=rng.random() < 0.8,
        sampling=sampling,
        **({"steering": steering(heads, rng.choice(["juice", "juice", "june"]))} if heads else {}),
    )


class Collector:
    """Collects what the engine sends, by request."""

    def __init__(self) -> None:
        self.updates: dict[int, list[Update]] = {}
        self.n_last = 0
        self.changed = threading.Condition()

    def __call__(self, update: Update) -> None:
        with self.changed:
            self.updates.setdefault(update.index, []).append(update)
            self.n_last += update.is_last
            self.changed.notify_all()

    def wait(self, n_last: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.n_last >= n_last, 120), f"{self.n_last} of {n_last} requests ended"

    def completion(self, index: int = 0) -> Completion:
        last = self.updates[index][-1]
        assert last.completion is not None, last.error
        return last.completion

    def error(self, index: int = 0) -> juice.JuiceError | None:
        return self.updates[index][-1].error


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_200_mixed_requests_that_join_and_are_cancelled_each_equal_their_run_alone(shape: str) -> None:
    """fp64, so that the order of sums never decides a token. Kills: a slot moved wrongly, a stale layout, a lost companion.

    Requests come in bursts while others run, five at a time at most and nine tokens a chunk, a third is cancelled at some moment.
    """
    rng = Random(shape)
    requests = [random_request(rng) for _ in range(200)]
    model = loaded(shape, dtype=torch.float64)
    alone = [model.engine.generate([request])[0] for request in requests]
    engine = Engine(model.loaded, Limits(max_batch=5, max_prefill_tokens=9))
    waiting, sent = list(range(200)), {}
    collectors = [Collector() for _ in requests]
    while waiting:
        for i in waiting[: rng.randint(1, 9)]:
            sent[i] = engine.submit([requests[i]], collectors[i])[0]
            waiting.remove(i)
        if sent and rng.random() < 0.5:
            sent[rng.choice(list(sent))].cancel()
        time.sleep(rng.choice([0, 0.002, 0.01]))
    for collector in collectors:
        collector.wait(1)
    n_cancelled = 0
    for expected, collector in zip(alone, collectors, strict=True):
        if isinstance(collector.error(), CancelledError):
            n_cancelled += 1
            got = [token.id for update in collector.updates[0] for token in update.tokens]
            assert got == list(expected.token_ids)[: len(got)]
            continue
        assert collector.completion().token_ids == expected.token_ids
        assert collector.completion().text == expected.text
        assert "".join(update.text for update in collector.updates[0]) == expected.text
    assert 0 < n_cancelled < 150
    assert engine.status.n_running == engine.status.n_waiting == 0


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_chunks_of_a_prompt_give_what_the_whole_prompt_gives(shape: str) -> None:
    model = loaded(shape)
    request = GenerationRequest(
        prompt_ids=tuple(range(1, 90)), max_tokens=5, ignore_eos=True, steering=steering({(1, 0): 2.0, (3, 2): -1.0}), top_logprobs=5
    )
    whole = model.engine.generate([request])[0]
    for n_tokens in (1, 2, 7, 64):
        engine = Engine(model.loaded, Limits(max_prefill_tokens=n_tokens))
        chunked = engine.generate([request])[0]
        assert chunked.token_ids == whole.token_ids
        torch.testing.assert_close(torch.tensor(chunked.logprobs), torch.tensor(whole.logprobs), rtol=0, atol=1e-5)


def test_a_long_prompt_holds_up_what_runs_for_one_chunk_at_most() -> None:
    """Between two tokens of the running request at most 16 prompt tokens go through."""
    model = loaded(limits=Limits(max_prefill_tokens=16))
    fed: list[tuple[int, int]] = []
    embedding = model.loaded.model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _m, args: fed.append(tuple(args[0].shape)))
    first, second = Collector(), Collector()
    model.engine.submit([GenerationRequest(prompt_ids=(1, 2), max_tokens=100, ignore_eos=True)], first)
    while not first.updates:
        time.sleep(0.001)
    model.engine.submit([GenerationRequest(prompt_ids=tuple(range(1, 91)), max_tokens=1)], second)
    second.wait(1)
    first.wait(1)
    widths = [width for _, width in fed if width > 1]
    assert widths == [2, 16, 16, 16, 16, 16, 10]
    places = [i for i, (_, width) in enumerate(fed) if width > 1]
    assert all(b - a == 2 for a, b in pairwise(places[1:])), "a decode step between any two chunks"


def test_memory_bounds_what_runs_at_once_and_nothing_is_lost() -> None:
    """Room for about three requests of 40 positions: the others wait, and a long one takes the room of the short ones."""
    model = loaded()
    request = GenerationRequest(
        prompt_ids=tuple(range(1, 31)), max_tokens=10, ignore_eos=True, steering=steering({(0, 0): 1.0, (2, 0): 1.0})
    )
    per_request = model.engine.n_kv_bytes(request)
    assert per_request == (40 + 1) * (4 + 3) * 2 * 2 * 8 * 4  # positions, rows in all layers, keys and values, kv heads, d_head, bytes
    engine = Engine(model.loaded, Limits(kv_memory_bytes=3 * per_request + 100))
    verified = Engine.generate(engine, [request])[0].token_ids
    long = replace(request, prompt_ids=tuple(range(1, 91)), max_tokens=20)
    collector = Collector()
    most = 0
    engine.submit([request] * 4 + [long] + [request] * 6, collector)
    while collector.n_last < 11:
        status = engine.status
        most = max(most, status.n_running)
        assert status.n_kv_bytes <= status.max_kv_bytes
        time.sleep(0.001)
    allocated = sum(kv.nbytes for layer in engine._loop.runner.cache.slot_layers for kv in (layer.keys, layer.values))
    assert allocated <= 3 * per_request + 100
    assert 2 <= most <= 3
    assert all(collector.completion(i).token_ids == verified for i in range(11) if i != 4)
    assert collector.completion(4).token_ids == model.engine.generate([long])[0].token_ids
    with pytest.raises(ContextLengthError, match="MiB"):
        Engine.generate(engine, [replace(request, max_tokens=98), replace(long, prompt_ids=tuple(range(1, 30)) * 4, max_tokens=8)])


def test_a_full_inbox_refuses_and_an_empty_one_takes_any_number() -> None:
    model = loaded(limits=Limits(max_batch=1, max_waiting=3))
    collector = Collector()
    request = GenerationRequest(prompt_ids=(1, 2, 3), max_tokens=100, ignore_eos=True)
    sent = model.engine.submit([request] * 5, collector)
    with pytest.raises(OverloadedError, match="3 may"):
        model.engine.submit([request] * 3, collector)
    for sequence in sent:
        sequence.cancel()
    collector.wait(5)
    model.engine.generate([replace(request, max_tokens=1)] * 5)


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


def test_n_threads_generate_at_once_what_each_gets_alone() -> None:
    model = loaded("gemma2", dtype=torch.float64)
    rng = Random(5)
    requests = [[random_request(rng) for _ in range(6)] for _ in range(4)]
    alone = [[c.token_ids for c in model.engine.generate(own)] for own in requests]
    got: dict[int, list[tuple[int, ...]]] = {}

    def work(i: int) -> None:
        got[i] = [c.token_ids for c in model.engine.generate(requests[i])]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[i] for i in range(4)] == alone


@pytest.mark.parametrize(("change", "param"), [
    ({"prompt_ids": (1, 5000)}, "prompt"), ({"prompt_ids": (-1,)}, "prompt"), ({"stop_token_ids": (300,)}, "stop_token_ids"),
    ({"sampling": Sampling(logit_bias={300: 1.0})}, "logit_bias"),
])  # fmt: skip
def test_tokens_that_the_model_does_not_have_are_refused_by_name(change: dict, param: str) -> None:
    model = loaded()
    with pytest.raises(RequestError, match="tokens 0 to 299") as caught:
        model.engine.generate([replace(GenerationRequest(prompt_ids=(1, 2), max_tokens=1), **change)])
    assert caught.value.param == param


def test_limits_beyond_the_model_are_refused() -> None:
    with pytest.raises(RequestError, match="context of 128"):
        loaded(limits=Limits(max_model_len=129))
    model = loaded(limits=Limits(max_model_len=20))
    with pytest.raises(ContextLengthError, match="20 tokens"):
        model.engine.generate([GenerationRequest(prompt_ids=(1,) * 15, max_tokens=6)])
