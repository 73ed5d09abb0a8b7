"""A model sharded over two real processes gives the tokens of the whole one and of the oracle."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, PretrainedConfig

import juice
from juice.batching.engine import _give_up
from juice.batching.room import Room
from juice.engine import Contrast, GenerationRequest, Limits
from juice.errors import RankLostError, RequestError, UnsupportedModelError, UsageError
from juice.loading.pretrained import check_shardable
from juice.model.wire import Address
from tests.support import oracle, tiny
from tests.support.mixed import TOLERANCE, mixed_requests, steering
from tests.support.running import Collector, loaded
from tests.support.serving import Server, serving

SIZES = {"vocab_size": 300, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {(0, 1): 2.0, (1, 3): -1.0, (3, 0): 2.0}


@pytest.mark.parametrize(
    ("config", "n_ranks", "reason"),
    [
        (
            LlamaConfig(**SIZES, num_attention_heads=3, num_key_value_heads=3),
            2,
            "3 query heads in layer 0, which 2 ranks",
        ),
        (
            LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=1),
            2,
            "1 key-value heads",
        ),
        (
            LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2),
            4,
            "2 key-value heads in layer 0, which 4 ranks",
        ),
        (tiny.tiny_model("gpt2").config, 2, "no tensor parallel plan"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused_before_its_weights_are_read(
    config: PretrainedConfig, n_ranks: int, reason: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        juice.load(tmp_path, tp=n_ranks)


def test_heads_need_not_divide_where_attention_is_whole_on_every_rank(tmp_path: Path) -> None:
    DeepseekV3Config(
        **SIZES, num_attention_heads=3, num_key_value_heads=3, n_routed_experts=8
    ).save_pretrained(tmp_path)
    check_shardable(tmp_path, 2)


def test_what_would_run_on_only_one_rank_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save(tmp_path, tiny.tiny_model("llama"))
    with pytest.raises(RequestError, match="give its folder"):
        juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer(), tp=2)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="expected auto or cpu"):
            juice.load(folder, tp=2, device="cuda:1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one of torchrun's")
    for tp in (1, 2):
        with pytest.raises(UsageError, match="torchrun"):
            juice.load(folder, tp=tp)
    assert juice.load(folder, device="cpu").loaded.n_ranks == 1


def test_a_load_that_is_refused_leaves_no_rank_behind(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path, tiny.tiny_model("llama"))
    with pytest.raises(RequestError, match="max_model_len"):
        juice.load(folder, tp=2, limits=Limits(max_model_len=100_000))
    assert not torch.distributed.is_initialized()


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


def test_a_served_model_is_sharded_and_ends_with_all_its_ranks(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "model", tiny.tiny_model("llama"))
    alone = juice.load(folder)
    made = alone.make_head_set(
        name="parametric",
        target="parametric",
        plus=[(0, 1), (3, 0)],
        minus=[(1, 3)],
        beta_plus=2,
        beta_minus=-1,
    )
    made.save(tmp_path / "head_sets" / "tiny" / "parametric")
    arguments = ("--model", str(folder), "--head-sets", str(tmp_path / "head_sets"), "--tp", "2")
    body = {
        "prompt": "The capital of France is",
        "max_tokens": 12,
        "ignore_eos": True,
        "steer": "parametric",
    }
    expected = alone.generate(
        body["prompt"], max_tokens=12, ignore_eos=True, steer="parametric", head_set=made
    )[0].text
    with serving(*arguments) as server:
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()
        assert answer["text"] == expected
        assert answer["steering"]["applied"] is True
        assert httpx.get(f"{server.url}/info").json()["model"]["tp"] == 2
        (other,) = children(server)
        # As from a supervisor that ends every process of a group: rank 0 decides.
        os.kill(other, signal.SIGTERM)
        assert (
            httpx.post(f"{server.url}/generate", json=body, timeout=60).json()["text"] == expected
        )
    assert not Path(f"/proc/{other}").exists()


def test_a_killed_rank_ends_the_server_which_reports_the_rank(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path, tiny.tiny_model("llama"))
    server = Server("--model", str(folder), "--tp", "2")
    server.wait_until_ready()
    (other,) = children(server)
    os.kill(other, signal.SIGKILL)
    assert server.process.wait(60) == 1
    assert "juice: error: rank 1 ended with status -9" in server.errors()


def children(server: Server) -> list[int]:
    """Return the processes that any of a server's threads has started."""
    lists = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    return [int(pid) for own in lists for pid in own.read_text().split()]
