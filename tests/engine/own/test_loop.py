"""The engine under load: requests that join and leave, chunks of prompts, and full memory.

Each request must give what it gives alone.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import torch

from juice.engine.load_options import Limits
from juice.engine.own.scheduler import MAX_SCORED_CHUNK
from juice.engine.own.thread import BatchingEngine
from juice.engine.request import Request
from juice.errors import CancelledError, ContextLengthError, RequestError
from tests.support import tiny
from tests.support.mixed import steering
from tests.support.running import (
    Collector,
    loaded,
    n_slot_bytes,
    random_request,
    with_many_forwards,
)


@pytest.mark.parametrize(
    ("shape", "is_parted", "n"),
    [
        ("gpt2", True, 90),
        ("llama", False, 90),
        pytest.param("gpt2", True, 200, marks=pytest.mark.long),
        pytest.param("llama", False, 200, marks=pytest.mark.long),
        pytest.param("gemma2", True, 200, marks=pytest.mark.long),
    ],
)
def test_mixed_requests_that_join_and_are_cancelled_each_equal_their_run_alone(
    shape: str, is_parted: bool, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a slot moved wrongly, a stale layout, a lost companion.

    In fp64, so that the order of sums never decides a token. Requests come in bursts while others
    run, at most five at a time and nine tokens a chunk; about a third are cancelled at some moment.
    """
    rng = Random(shape)
    requests = [random_request(rng) for _ in range(n)]
    model = loaded(shape, dtype=torch.float64)
    alone = [model.engine.generate([request])[0] for request in requests]
    if is_parted:
        with_many_forwards(monkeypatch)
    engine = BatchingEngine(model.loaded, Limits(max_batch=5, max_prefill_tokens=9))
    waiting, sent = list(range(n)), {}
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
    assert 0 < n_cancelled < 0.75 * n
    assert engine.status.n_running == engine.status.n_waiting == 0


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_chunks_of_a_prompt_give_what_the_whole_prompt_gives(shape: str) -> None:
    model = loaded(shape)
    request = Request.of(
        prompt_ids=tuple(range(1, 90)),
        max_tokens=5,
        ignore_eos=True,
        steering=steering({(1, 0): 2.0, (3, 2): -1.0}),
        top_logprobs=5,
    )
    whole = model.engine.generate([request])[0]
    for n_tokens in (1, 2, 7, 64):
        engine = BatchingEngine(model.loaded, Limits(max_prefill_tokens=n_tokens))
        chunked = engine.generate([request])[0]
        assert chunked.token_ids == whole.token_ids
        torch.testing.assert_close(
            torch.tensor(chunked.logprobs), torch.tensor(whole.logprobs), rtol=0, atol=1e-5
        )


def test_padding_stays_within_the_models_positions(caplog: pytest.LogCaptureFixture) -> None:
    """The last ten tokens of a prompt of 110 share a forward with 40 tokens of another prompt.

    Their padding would be beyond GPT-2's 128 positions. A forward that fails is repeated request by
    request, so only the log shows it.
    """
    model = loaded("gpt2")
    requests = [
        Request.of(prompt_ids=tuple(range(1, n + 1)), max_tokens=4, ignore_eos=True)
        for n in (110, 40)
    ]
    expected = [model.engine.generate([request])[0].token_ids for request in requests]
    engine = BatchingEngine(model.loaded, Limits(max_prefill_tokens=100))
    with caplog.at_level("WARNING", logger="juice.engine.own"):
        assert [c.token_ids for c in engine.generate(requests)] == expected
    assert not caplog.records


def test_a_long_prompt_holds_up_what_runs_for_one_chunk_at_most() -> None:
    """A step costs 16 tokens: the one that decodes, and prompt tokens, fewer the more keys."""
    model = loaded(limits=Limits(max_prefill_tokens=16))
    fed: list[tuple[int, int]] = []
    embedding = model.loaded.model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _m, args: fed.append(tuple(args[0].shape)))
    first, second = Collector(), Collector()
    model.engine.submit([Request.of(prompt_ids=(1, 2), max_tokens=100, ignore_eos=True)], first)
    while not first.updates:
        time.sleep(0.001)
    model.engine.submit([Request.of(prompt_ids=tuple(range(1, 91)), max_tokens=1)], second)
    second.wait(1)
    first.wait(1)
    widths = [width for _, width in fed if width > 1]
    assert sum(widths) == 2 + 90
    keys_per_token = sum(p.numel() for p in model.loaded.model.parameters()) / (2 * 4 * 32)
    cached = 0
    for width in widths[1:]:
        cost = width * (1 + (cached + width / 2) / keys_per_token)
        last = cached + width == 90
        cached += width
        assert cost <= 15
        assert last or cost + 3 > 15
    places = [i for i, (_, width) in enumerate(fed) if width > 1]
    assert all(b - a == 2 for a, b in pairwise(places[1:])), "a decode step between any two chunks"


def test_memory_bounds_how_many_requests_run_together_and_none_is_lost() -> None:
    """There is room for about three requests of 40 positions: the others wait.

    A long one takes the room of the short ones.
    """
    model = loaded()
    request = Request.of(
        prompt_ids=tuple(range(1, 31)),
        max_tokens=10,
        ignore_eos=True,
        steering=steering({(0, 0): 1.0, (2, 0): 1.0}),
    )
    per_request = model.engine.n_kv_bytes(request)
    # Positions, rows in all layers, keys and values, KV heads, d_head, bytes.
    assert per_request == (40 + 1) * (4 + 3) * 2 * 2 * 8 * 4
    engine = BatchingEngine(model.loaded, Limits(kv_memory_bytes=3 * per_request + 100))
    verified = BatchingEngine.generate(engine, [request])[0].token_ids
    long = replace(request.with_options(max_tokens=20), prompt_ids=tuple(range(1, 91)))
    collector = Collector()
    most = 0
    engine.submit([request] * 4 + [long] + [request] * 6, collector)
    while collector.n_last < 11:
        status = engine.status
        most = max(most, status.n_running)
        assert status.n_kv_bytes <= status.max_kv_bytes
        time.sleep(0.001)
    assert n_slot_bytes(engine) <= 3 * per_request + 100
    assert 2 <= most <= 3
    assert all(collector.completion(i).token_ids == verified for i in range(11) if i != 4)
    assert collector.completion(4).token_ids == model.engine.generate([long])[0].token_ids
    with pytest.raises(ContextLengthError, match="MiB"):
        BatchingEngine.generate(
            engine,
            [
                request.with_options(max_tokens=98),
                replace(long.with_options(max_tokens=8), prompt_ids=tuple(range(1, 30)) * 4),
            ],
        )


def test_limits_hold_from_the_first_request_on() -> None:
    """Before the first forward no layer has shown how large its keys are."""
    network = loaded().loaded
    request = Request.of(prompt_ids=(1, 2, 3, 4), max_tokens=4, ignore_eos=True)
    engine = BatchingEngine(network, Limits(max_batch=20, kv_memory_bytes=20_000))
    with pytest.raises(ContextLengthError, match="MiB"):
        engine.generate([request, replace(request, prompt_ids=(1,) * 100)])
    assert len(engine.generate([request] * 20)) == 20
    assert n_slot_bytes(engine) <= 20_000


def test_prompts_that_are_scored_are_prefilled_a_few_tokens_at_a_time() -> None:
    model = loaded()
    projected: list[int] = []
    model.loaded.layout.output.register_forward_hook(
        lambda _m, _args, logits: projected.append(logits.shape[:-1].numel())
    )
    request = Request.of(prompt_ids=tuple(range(1, 101)), max_tokens=1, prompt_logprobs=True)
    completions = model.engine.generate([request] * 9)
    assert max(projected) <= MAX_SCORED_CHUNK
    assert [len(c.prompt_tokens) for c in completions] == [100] * 9
    scores = [[token.logprob or 0.0 for token in c.prompt_tokens] for c in completions]
    for score in scores:
        assert score == pytest.approx(scores[0], abs=1e-5)  # chunks round differently


def test_many_small_calls_do_not_keep_a_large_one_waiting_for_ever() -> None:
    model = loaded(limits=Limits(max_batch=2))
    request = Request.of(prompt_ids=(1, 2), max_tokens=3, ignore_eos=True)
    is_over = threading.Event()

    def small() -> None:
        while not is_over.is_set():
            model.engine.generate([request])

    threads = [threading.Thread(target=small) for _ in range(6)]
    for thread in threads:
        thread.start()
    large = threading.Thread(target=lambda: model.engine.generate([request] * 20))
    large.start()
    large.join(60)
    is_over.set()
    for thread in threads:
        thread.join(60)
    assert not large.is_alive()


def test_threads_that_generate_together_get_what_each_gets_alone() -> None:
    model = loaded("gemma2", dtype=torch.float64)
    rng = Random(5)
    requests = [[random_request(rng) for _ in range(6)] for _ in range(4)]
    alone = [[c.token_ids for c in model.engine.generate(request)] for request in requests]
    got: dict[int, list[tuple[int, ...]]] = {}

    def work(i: int) -> None:
        got[i] = [c.token_ids for c in model.engine.generate(requests[i])]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[i] for i in range(4)] == alone


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt_ids": (1, 5000)}, "prompt"),
        ({"prompt_ids": (-1,)}, "prompt"),
        ({"stop_token_ids": (300,)}, "stop_token_ids"),
        ({"logit_bias": {300: 1.0}}, "logit_bias"),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused_by_name(change: dict, param: str) -> None:
    model = loaded()
    with pytest.raises(RequestError, match="tokens 0 to 299") as caught:
        model.engine.generate([Request.of(**{"prompt_ids": (1, 2), "max_tokens": 1, **change})])
    assert caught.value.param == param


def test_limits_beyond_the_model_are_refused() -> None:
    with pytest.raises(RequestError, match="context of 128"):
        loaded(limits=Limits(max_model_len=129))
    model = loaded(limits=Limits(max_model_len=20))
    with pytest.raises(ContextLengthError, match="context has 20"):
        model.engine.generate([Request.of(prompt_ids=(1,) * 15, max_tokens=6)])
