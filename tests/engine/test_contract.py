"""The library and the server need the contract of an engine, and nothing else of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import juice
from juice.checks.doctor import diagnose
from juice.engine import contract
from juice.engine.answer import Sink, Update
from juice.engine.contract import Capability, Engine
from juice.engine.load_options import Limits
from juice.engine.own.thread import BatchingEngine
from juice.engine.request import Contrast, Request, Running
from juice.errors import (
    ContextLengthError,
    EngineStoppedError,
    HeadSetError,
    HeadSetMismatchError,
    MissingCapabilityError,
    RequestError,
)
from juice.formula import CONTRASTS
from juice.head_set.head_set import HeadSet
from juice.steered_model import SteeredModel
from juice_server import app as server
from juice_server.settings import Settings
from tests.support import tiny
from tests.support.canned_engine import WORDS, CannedEngine, CannedRequest
from tests.support.conflicts import examples
from tests.support.running import loaded

TEXT = "".join(WORDS)


@pytest.fixture
def model() -> SteeredModel:
    return SteeredModel(CannedEngine())


def test_a_model_generates_on_any_engine(model: SteeredModel) -> None:
    completions = model.generate(["a", "bc"], max_tokens=5, temperature=[0.0, 0.7], seed=[None, 3])
    assert [c.text for c in completions] == [TEXT, TEXT]
    first, second = (one.request for one in model.engine.submitted)
    assert (first.prompt_ids, second.prompt_ids) == (model.tokenize("bc"), model.tokenize("a"))
    assert (first.options.temperature, first.options.seed) == (0.7, 3)
    assert (second.options.temperature, second.options.seed) == (0.0, None)
    assert list(model.stream("a")) == list(WORDS)


def test_a_request_carries_its_steering_resolved_once(model: SteeredModel) -> None:
    head_set = model.make_head_set(
        name="x", target="context", plus=[(1, 2)], minus=[(3, 0)], beta_plus=2.0, beta_minus=-1.0
    )
    done = model.generate("a", steer="context", head_set=head_set, strength=0.5)[0]
    steering = model.engine.submitted[0].request.steering
    assert {
        layer: coefficient.tolist() for layer, coefficient in steering.coefficients.items()
    } == {
        1: [0.0, 0.0, 1.0, 0.0],
        3: [-0.5, 0.0, 0.0, 0.0],
    }
    assert done.steering is steering.report
    assert (done.steering.beta_plus, done.steering.strength, done.steering.n_heads) == (2, 0.5, 2)
    assert model.engine.companion_layers(steering) == range(1, 4)


def test_a_set_made_with_a_model_without_a_fingerprint_is_known_until_it_is_saved(
    model: SteeredModel, tmp_path: Path
) -> None:
    head_set = model.make_head_set(name="x", target="context", plus=[(1, 2)], beta_plus=2.0)
    assert head_set.model.fingerprint is None
    assert model.generate("a", steer="context", head_set=head_set)
    head_set.save(tmp_path / "x")
    again = HeadSet.load(tmp_path / "x")
    with pytest.raises(HeadSetMismatchError, match="allow_unverified"):
        model.generate("a", steer="context", head_set=again)


@pytest.mark.parametrize("capability", Capability)
def test_what_an_engine_cannot_do_is_refused_by_name(
    capability: Capability, model: SteeredModel
) -> None:
    asked = {
        Capability.WATCH: lambda: model.next_token("a"),
        Capability.CONTRAST: lambda: model.generate(
            "a", context="b", steer=juice.Steer(target="context", method="cad")
        ),
        Capability.ACTIVATIONS: lambda: juice.identify(model, examples(), target="context"),
    }
    with pytest.raises(MissingCapabilityError, match="the engine 'canned' cannot") as caught:
        asked[capability]()
    assert capability.value in str(caught.value)
    assert not model.engine.submitted


def test_a_diagnosis_needs_activations(model: SteeredModel) -> None:
    with pytest.raises(MissingCapabilityError, match="juice doctor"):
        diagnose(model.engine, model.head_sets)


def test_our_own_engine_has_every_capability() -> None:
    assert BatchingEngine.capabilities == frozenset(Capability)


def test_length_and_tokens_are_checked_against_the_description(model: SteeredModel) -> None:
    engine: Engine = model.engine
    assert model.fits("a" * 76, max_tokens=4)
    assert not model.fits("a" * 77, max_tokens=4)
    with pytest.raises(ContextLengthError, match="the context has 80"):
        engine.check(Request.of(prompt_ids=(1,) * 77, max_tokens=4))
    with pytest.raises(RequestError, match="the model has tokens 0 to 299"):
        engine.check(Request.of(prompt_ids=(300,)))


def test_agenerate_and_astream_give_what_generate_and_stream_give() -> None:
    prompts, n_tokens = ["ab", "c"], [9, 4]  # the second is done first

    async def both(model: SteeredModel) -> tuple[list[tuple[int, ...]], list[str]]:
        done = await model.agenerate(prompts, max_tokens=n_tokens, ignore_eos=True)
        pieces = [piece async for piece in model.astream("c", max_tokens=9, ignore_eos=True)]
        return [c.token_ids for c in done], pieces

    with loaded() as model:
        tokens, pieces = asyncio.run(both(model))
        alone = model.generate(prompts, max_tokens=n_tokens, ignore_eos=True)
        assert tokens == [c.token_ids for c in alone]
        assert [len(token) for token in tokens] == n_tokens
        assert pieces == list(model.stream("c", max_tokens=9, ignore_eos=True))
        assert "".join(pieces)


def test_many_generate_in_one_event_loop_and_each_gets_its_own() -> None:
    with loaded() as model:
        prompts = ["a", "bcd", "ef", "g" * 30]
        alone = [model.generate(p, max_tokens=8, ignore_eos=True)[0].text for p in prompts]

        async def together() -> list[str]:
            asked = [model.agenerate(p, max_tokens=8, ignore_eos=True) for p in prompts]
            return [done[0].text for done in await asyncio.gather(*asked)]

        assert asyncio.run(together()) == alone


def test_leaving_an_asynchronous_stream_cancels_its_generation() -> None:
    async def first(model: SteeredModel) -> None:
        async for _piece in model.astream("ab", max_tokens=100, ignore_eos=True):
            break

    with loaded() as model:
        asyncio.run(first(model))
        model.generate("a", max_tokens=1)  # a step later
        assert model.engine.status.n_running == 0


def test_cancelling_a_task_that_generates_frees_its_rows() -> None:
    async def cancelled(model: SteeredModel) -> None:
        task = asyncio.create_task(model.agenerate(["ab"] * 4, max_tokens=100, ignore_eos=True))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with loaded() as model:
        asyncio.run(cancelled(model))
        model.generate("a", max_tokens=1)
        assert model.engine.status.n_running == model.engine.status.n_waiting == 0


def test_a_task_cancelled_while_it_waits_for_room_runs_nothing_though_its_loop_ends() -> None:
    room = Event()

    class Full(CannedEngine):
        def start(self, *arguments: Any, **options: Any) -> list[CannedRequest]:
            room.wait(30)
            return super().start(*arguments, **options)

    async def cancelled(model: SteeredModel) -> None:
        task = asyncio.create_task(model.agenerate("a"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        Timer(0.2, room.set).start()

    model = SteeredModel(Full())
    asyncio.run(cancelled(model))
    assert room.wait(30)
    assert [each.cancelled is not None for each in model.engine.submitted] == [True]


def test_updates_after_the_end_of_a_loop_raise_nothing_in_the_engine() -> None:
    model = SteeredModel(CannedEngine())
    sinks: list[Sink] = []

    def start(request: Request, sink: Sink, **_options: Any) -> CannedRequest:
        sinks.append(sink)
        sink(Update(index=0, text="a"))
        return CannedRequest(request, sink)

    model.engine.start = start

    async def first() -> None:
        await anext(model.astream("a"))

    asyncio.run(first())
    sinks[0](Update(index=0, text="b"))


def test_steer_may_be_written_as_in_json(model: SteeredModel) -> None:
    (done,) = model.generate("a", steer={"target": "none"})
    assert not done.steering.applied
    with pytest.raises(RequestError, match="steer"):
        model.generate("a", steer={"target": "none", "strenght": 2})


def test_an_empty_name_is_no_head_set(model: SteeredModel) -> None:
    with pytest.raises(HeadSetError, match="no head set ''"):
        model.request("a", steer="context", head_set="")


def test_a_model_closes_with_its_context() -> None:
    with loaded() as model:
        network = model.loaded.model
        assert model.generate("a", max_tokens=1)
    with pytest.raises(EngineStoppedError, match="closed"):
        model.generate("a")
    assert juice.load(network, tokenizer=model.description.tokenizer).generate("a", max_tokens=1)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """The whole application, on an engine that has neither a torch model nor a capability."""
    monkeypatch.setattr(server, "load", lambda *_args, **_options: SteeredModel(CannedEngine()))
    with TestClient(server.create(Settings())) as running:
        for _ in range(200):
            if running.get("/readyz").status_code == 200:
                break
        yield running


@pytest.mark.filterwarnings("ignore:head set:UserWarning")
def test_the_server_serves_any_engine(client: TestClient) -> None:
    info = client.get("/info").json()
    assert info["engine"] == {"name": "canned"}
    assert info["model"]["device"] == "nowhere"
    assert info["limits"]["kv_bytes_per_token"] == 16
    assert info["steering"]["methods"] == ["juice", "june"]
    assert client.post("/generate", json={"prompt": "a"}).json()["text"] == TEXT
    answer = client.post("/v1/completions", json={"prompt": ["a", "b"]}).json()
    assert [choice["text"] for choice in answer["choices"]] == [TEXT, TEXT]
    assert client.post("/tokenize", json={"text": "ab"}).json()["count"] == 2
    assert client.get("/metrics").text.count("juice_engine_up 1.0") == 1


@pytest.mark.filterwarnings("ignore:head set:UserWarning")
def test_the_server_refuses_what_its_engine_cannot_do(client: TestClient) -> None:
    for method, targets in CONTRASTS.items():
        steer = {"target": targets[0], "method": method}
        refused = client.post("/generate", json={"prompt": "a", "context": "b", "steer": steer})
        assert refused.status_code == 400
        assert "the engine 'canned' cannot contrast prompts" in refused.text
        assert method in refused.text


def test_a_contrast_is_a_capability_of_the_request() -> None:
    request = Request.of(prompt_ids=(1, 2), contrast=Contrast(prompt_ids=(3,)))
    with pytest.raises(MissingCapabilityError, match="methods cad"):
        CannedEngine().submit([request], lambda _update: None)


def test_the_contract_says_nothing_of_torch_models() -> None:
    """What a description holds is plain data and the tokenizer."""
    with loaded() as model:
        for name, value in vars(model.description).items():
            assert not isinstance(value, torch.nn.Module | torch.Tensor | torch.dtype), name


class FailsToStart(CannedEngine):
    """An engine that starts no request of more than three tokens."""

    def start(
        self, request: Request, sink: Sink, *, instead_of: Running | None = None
    ) -> CannedRequest:
        if len(request.prompt_ids) > 3:
            raise EngineStoppedError("it is too late")
        return super().start(request, sink, instead_of=instead_of)


@pytest.mark.parametrize("prompts", [[(1,) * 4], [(1,), (1,) * 4], [(1,) * 4, (1,)]])
def test_what_cannot_start_raises_its_error(prompts: list[tuple[int, ...]]) -> None:
    """Kills: a stream that ends without the answers, and says nothing."""
    engine = FailsToStart()
    requests = [Request.of(prompt_ids=prompt, max_tokens=3) for prompt in prompts]
    with pytest.raises(EngineStoppedError, match="too late"):
        engine.generate(requests)

    async def stream() -> None:
        async for _ in engine.astream(requests):
            pass

    with pytest.raises(EngineStoppedError, match="too late"):
        asyncio.run(asyncio.wait_for(stream(), 20))


@pytest.mark.parametrize("kind", [list, tuple])
def test_each_prompt_may_have_options(model: SteeredModel, kind: type) -> None:
    each = kind(juice.GenerationOptions(max_tokens=n) for n in (4, 2))
    model.generate(["a", "a"], each)
    given = [one.request.options.max_tokens for one in model.engine.submitted]
    assert sorted(given) == [2, 4]


@pytest.mark.parametrize("value", ["8", 1.5, True, 0, None])
def test_a_bound_that_is_no_whole_number_is_refused_as_one_below_1_is(value: Any) -> None:
    with pytest.raises(RequestError, match=f"max_batch is {value!r}; expected a whole") as caught:
        Limits(max_batch=value)
    assert caught.value.param == "max_batch"
    assert Limits(max_model_len=None, kv_memory_bytes=None).max_batch == 64


def test_bounds_may_be_numpys_whole_numbers() -> None:
    """Kills: a fingerprint or a report that differs by what a number was kept in."""
    given = Limits(max_batch=np.int64(3), max_model_len=np.int32(8))
    assert given == Limits(max_batch=3, max_model_len=8)
    assert {type(given.max_batch), type(given.max_model_len)} == {int}


def test_keys_and_values_fit_on_every_device_that_has_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills: the memory of the inputs' device for all layers."""
    free = {"cuda:0": 20 << 30, "cuda:1": 1 << 30}
    monkeypatch.setattr(contract, "free_bytes", lambda device: free[str(device)])
    first, second = map(torch.device, free)
    found = contract.settled(Limits(), 128, {first: 8, second: 24}, 1000)
    assert found.kv_memory_bytes == int(0.8 * (1 << 30) * 32 / 24)
    alone = contract.settled(Limits(), 128, {first: 32}, 1000)
    assert alone.kv_memory_bytes == int(0.8 * (20 << 30))
    given = contract.settled(Limits(kv_memory_bytes=5), 128, {first: 8, second: 24}, 1000)
    assert given.kv_memory_bytes == 5


def test_a_step_on_a_cpu_has_fewer_tokens_the_larger_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chosen number holds for any model. Kills: the steps of a GPU on a CPU, and the reverse."""
    monkeypatch.setattr(contract, "free_bytes", lambda _device: 1 << 30)
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")

    def n_tokens(n_weights: float, *devices: torch.device, given: int | None = None) -> int | None:
        limits = Limits(max_prefill_tokens=given)
        on = dict.fromkeys(devices, 4)
        return contract.settled(limits, 128, on, int(n_weights)).max_prefill_tokens

    sizes = (0.135e9, 1.5e9, 7e9, 70e9)
    assert [n_tokens(size, cpu) for size in sizes] == [2048, 667, 143, 128]
    assert n_tokens(7e9, gpu) == 2048
    assert n_tokens(7e9, gpu, cpu) == 143
    assert n_tokens(7e9, cpu, given=4096) == 4096
    assert n_tokens(7e9, cpu, given=7) == 7


def test_an_engine_counts_its_models_weights_for_the_tokens_of_a_step() -> None:
    with juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer()) as model:
        assert model.engine.limits.max_prefill_tokens == 2048
        # As many weights as it says, in the memory of one.
        ballast = torch.nn.Parameter(torch.zeros(1).expand(10**9), requires_grad=False)
        model.loaded.model.register_parameter("ballast", ballast)
        larger = BatchingEngine(model.loaded)
        larger.stop()
    assert larger.limits.max_prefill_tokens == 1000


def test_a_models_layers_are_counted_where_they_are() -> None:
    with juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer()) as model:
        assert model.loaded.n_layers_on == {torch.device("cpu"): tiny.N_LAYERS}
        packed, empty = torch.nn.Module(), torch.nn.Module()  # as GPTQ's, without parameters
        packed.register_buffer("qweight", torch.zeros(2))
        fetched = torch.nn.Linear(2, 2, device="meta")
        layers = [SimpleNamespace(projection=one) for one in (packed, empty, fetched)]
        other = replace(model.loaded, layout=SimpleNamespace(layers=layers))
        assert other.n_layers_on == {torch.device("cpu"): 3}
