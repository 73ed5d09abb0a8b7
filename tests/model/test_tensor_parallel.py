"""A model sharded over two real processes gives the tokens of the whole one and of the oracle."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import juice
from juice.batching.engine import _give_up
from juice.batching.room import Room
from juice.engine import Contrast, GenerationRequest, Limits
from juice.errors import RankLostError, UnsupportedModelError, UsageError
from juice.model.wire import Address
from tests.support import oracle, tiny
from tests.support.mixed import TOLERANCE, mixed_requests, steering
from tests.support.running import Collector, loaded

HEADS = {(0, 1): 2.0, (1, 3): -1.0, (3, 0): 2.0}


@pytest.fixture(scope="module")
def sharded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, juice.SteeredModel]]:
    """Yield the tiny model of a shape over two ranks; the other one must be gone afterwards."""
    folder = tiny.save(tmp_path_factory.mktemp(request.param), tiny.tiny_model(request.param))
    model = juice.load(folder, tp=2, limits=Limits(max_batch=3, max_prefill_tokens=20))
    try:
        yield request.param, model
    finally:
        model.close()
    assert [other.process.returncode is not None for other in model.loaded.ranks._others] == [True]


@pytest.mark.parametrize("sharded", ["llama", "qwen3", "gemma2", "phi3"], indirect=True)
def test_a_sharded_model_is_steered_exactly(sharded: tuple[str, juice.SteeredModel]) -> None:
    """Kills: coefficients not sliced, or by the wrong rank; a slot moved on one rank; a lost plan.

    With three at a time, requests join as others leave; with 20 tokens a chunk, prompts take
    several. phi3's ranks all see the whole z, the others' their own heads.
    """
    shape, model = sharded
    network = tiny.tiny_model(shape)
    made = mixed_requests(seed=1)
    without = Contrast(prompt_ids=(5, 6, 7), weight=1.0)
    contrasted = GenerationRequest(
        prompt_ids=(9, 8, 5, 6, 7), contrast=without, max_tokens=6, ignore_eos=True
    )
    requests = [*(request for request, _, _ in made), contrasted]
    expected = [
        oracle.generate(network, list(r.prompt_ids), heads, r.max_tokens, method=method)
        for r, heads, method in made
    ]
    expected.append(oracle.generate_contrasted(network, [9, 8, 5, 6, 7], [5, 6, 7], 1.0, 6))
    alone = juice.load(
        network, tokenizer=tiny.tiny_tokenizer(), limits=Limits(max_batch=3, max_prefill_tokens=20)
    )
    assert model.loaded.n_ranks == 2
    assert model.loaded.identity.fingerprint == alone.loaded.identity.fingerprint is not None
    per_token = alone.engine.n_kv_bytes_per_token
    assert model.engine.n_kv_bytes_per_token == (per_token if shape == "phi3" else per_token // 2)
    completions = model.engine.generate(requests)
    for completion, whole, (tokens, logits) in zip(
        completions, alone.engine.generate(requests), expected, strict=True
    ):
        assert list(completion.token_ids) == tokens == list(whole.token_ids)
        logprobs = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens]
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), logprobs, rtol=0, atol=TOLERANCE
        )


@pytest.mark.parametrize("sharded", ["llama"], indirect=True)
def test_ranks_keep_in_step_when_one_has_no_memory_and_end_when_one_fails(
    sharded: tuple[str, juice.SteeredModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a resize that the other rank does not undo, so that its slots differ from rank 0's."""
    long = GenerationRequest(
        prompt_ids=(1, 2, 3), max_tokens=60, ignore_eos=True, steering=steering(HEADS)
    )
    short = GenerationRequest(
        prompt_ids=(4, 5), max_tokens=3, ignore_eos=True, steering=steering(HEADS)
    )
    expected = oracle.generate(tiny.tiny_model("llama"), [1, 2, 3], HEADS, 60)[0]
    _, model = sharded
    cache = model.engine.runner.cache
    resize = type(cache).resize

    def without_memory(room: Room) -> None:
        if room.n_mains > 1:
            raise MemoryError
        resize(cache, room)

    cache._resize(Room(1, (1,) * tiny.N_LAYERS, 64))
    monkeypatch.setattr(cache, "resize", without_memory)
    running, refused = Collector(), Collector()
    model.engine.submit([long], running)
    while not running.updates:
        time.sleep(0.01)
    model.engine.submit([short], refused)
    refused.wait(1)
    assert "memory" in str(refused.error())
    running.wait(1)
    assert list(running.completion().token_ids) == expected

    with pytest.raises(UnsupportedModelError, match="only its engine runs it"):
        model.loaded.model(input_ids=torch.tensor([[1, 2]]))
    with pytest.raises(UsageError, match="close the sharded model"):
        juice.load(model.id, tp=2)
    assert list(model.engine.generate([long])[0].token_ids) == expected

    lost: list[RankLostError] = []
    model.loaded.ranks.when_lost(lost.append)
    model.loaded.ranks.call(Address("no_such_thing"), lambda: None)
    with pytest.raises(juice.JuiceError, match=r"rank 1 failed: AttributeError.*needs them all"):
        model.engine.generate([replace(long, max_tokens=100)])
    assert "rank 1 failed" in str(lost[0])
    with pytest.raises(juice.JuiceError, match="rank 1 failed"):
        model.engine.generate([short])


def test_a_forward_that_waits_for_a_lost_rank_does_not_hold_up_its_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU the collective with a lost rank may never return; here, a forward that waits."""
    model, let_go, entered = loaded(), threading.Event(), threading.Event()

    def stuck(_batch: object) -> None:
        entered.set()
        let_go.wait()
        raise RankLostError("gone")

    monkeypatch.setattr(model.engine.runner, "forward", stuck)
    monkeypatch.setattr("juice.batching.engine.GIVE_UP_S", 0.1)
    collector = Collector()
    model.engine.submit([GenerationRequest(prompt_ids=(1,), max_tokens=3)], collector)
    entered.wait()
    _give_up(
        model.engine._inbox,
        model.engine._thread,
        model.engine._loop,
        RankLostError("rank 1 is gone"),
    )
    assert "rank 1 is gone" in str(collector.error())
    with pytest.raises(juice.JuiceError, match="rank 1 is gone"):
        model.engine.generate([GenerationRequest(prompt_ids=(1,), max_tokens=3)])
    let_go.set()
    model.close()
