"""The layers that a start prepares: two runs need companions in a window, one run needs none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

import juice
from juice.engine.contract import Engine
from juice.engine.request import Request
from juice.engine.vllm import worker
from juice.engine.vllm.arguments import Coefficients, Layers, choose_layers
from juice.engine.vllm.model import SteeredCausalLM, share_scales, starts_of
from juice.engine.vllm.patches import most_heads
from juice.engine.vllm.slots import capture_both
from juice.engine.vllm.state import RowWriter
from juice.errors import (
    GenerationError,
    HeadSetMismatchError,
    RequestError,
    UnsupportedModelError,
)
from juice.formula import Method
from juice.head_set.head_set import HeadSet
from tests.engine.vllm import mistakes
from tests.support import oracle, tiny
from tests.support.mixed import mixed_requests, steering
from tests.support.on_vllm import save_with_set, started, wide
from tests.support.running import Collector, assert_completes

NONE = range(0)


class Step(NamedTuple):
    """A step that is captured."""

    num_tokens: int


STEPS = (Step(8), Step(4))


def a_set(method: Method, *layers: int) -> HeadSet:
    with juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer()) as model:
        return model.make_head_set(
            name="context",
            target="context",
            plus=[(layer, 1) for layer in layers],
            beta_plus=1,
            method=method,
        )


IN_ONE, IN_TWO, IN_A_LAYER = a_set("june", 0, 1), a_set("juice", 1, 3), a_set("juice", 2)


@pytest.mark.parametrize(
    ("window", "sets", "expected"),
    [
        ("auto", [], Layers(NONE, NONE)),
        ("auto", [IN_ONE], Layers(NONE, range(2))),
        ("auto", [IN_ONE, IN_TWO], Layers(range(1, 4), range(4))),
        ("auto", [IN_A_LAYER], Layers(NONE, range(2, 3))),
        ("none", [IN_TWO], Layers(NONE, range(1, 4))),
        ("all", [IN_ONE], Layers(range(4), range(4))),
        ("2-3", [IN_ONE], Layers(range(2, 4), range(4))),
    ],
    ids=str,
)
def test_a_window_holds_the_sets_for_two_runs(
    window: str, sets: Sequence[HeadSet], expected: Layers
) -> None:
    assert choose_layers(window, sets, n_layers=4) == expected


@pytest.mark.parametrize("window", ["2-4", "3-2", "some", "1"])
def test_another_window_is_refused(window: str) -> None:
    with pytest.raises(RequestError, match="expected auto, none, all, or the first and the last"):
        choose_layers(window, [], n_layers=4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("one-run")
    save_with_set(root, "context", "june")
    return root


@pytest.fixture(scope="module")
def without(root: Path) -> Iterator[Engine]:
    """An engine whose only set is for one run."""
    with (
        mistakes.possible(),
        started(root / "model", window="auto", head_sets=root / "head_sets") as engine,
    ):
        yield engine


def test_sets_for_one_run_take_no_memory_for_companions(without: Engine) -> None:
    details = without.details
    assert (details["window"], details["steered_layers"]) == (None, [0, 3])
    assert details["n_companion_kv_bytes_per_token"] == 0
    assert details["check"]["least_effect"] > 0.1


def test_one_run_without_a_window_is_what_its_definition_gives(without: Engine) -> None:
    network = wide("Llama").build()
    mixed = [
        (each.with_options(watch=()), heads)
        for each, heads, method in mixed_requests(3, 32)
        if method == "june"
    ]
    completions = without.generate([request for request, _ in mixed])
    for completion, (request, heads) in zip(completions, mixed, strict=True):
        expected = oracle.generate(
            network, list(request.prompt_ids), heads, request.options.max_tokens, method="june"
        )
        assert_completes(completion, expected, 1e-4, is_watched=False)


def test_two_runs_without_a_window_are_refused_with_what_to_change(without: Engine) -> None:
    request = Request.of(prompt_ids=(1, 2), steering=steering({(0, 1): 1.0, (3, 0): 1.0}))
    with pytest.raises(HeadSetMismatchError, match="--window 0-3 or --window all, or"):
        without.generate([request])
    # In one layer both runs are the same.
    without.generate([Request.of(prompt_ids=(1, 2), steering=steering({(3, 0): 1.0}))])


def test_heads_that_the_workers_do_not_have_end_their_request_alone(
    without: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: an answer that nobody steered, an engine that one request ends."""
    plain = Request.of(prompt_ids=(1, 2), max_tokens=2)
    outside = [steering({(0, 1): 1.0, (3, 0): 1.0}), steering({(7, 0): 1.0}, "june")]
    monkeypatch.setattr(Layers, "check", lambda *_: None)  # as of another scan of the head sets
    for other in outside:
        with pytest.raises(GenerationError, match="its log has the reason"):
            without.generate([Request.of(prompt_ids=(1, 2), steering=other)])
        assert without.generate([plain])


@pytest.mark.parametrize(
    ("reasons", "options"),
    [
        ((), {"max_tokens": 1}),
        (("stop",), {"max_tokens": 1}),
        (("abort",), {"max_tokens": 1}),
        (("abort",), {"max_tokens": 1, "watch": (3,)}),
        (("abort",), {"max_tokens": 0, "prompt_logprobs": True}),
    ],
    ids=["nothing", "no token", "aborted", "aborted while it watches", "aborted while it scores"],
)
def test_what_vllm_ends_without_an_answer_is_an_error(
    without: Engine,
    monkeypatch: pytest.MonkeyPatch,
    reasons: Sequence[str],
    options: dict[str, Any],
) -> None:
    """Kills: a caller that waits for ever, and scores that nobody computed."""

    async def ends(*_: object) -> AsyncIterator[SimpleNamespace]:
        for reason in reasons:
            new = SimpleNamespace(finish_reason=reason, token_ids=[], logprobs=[])
            yield SimpleNamespace(outputs=[new], prompt_logprobs=None, num_cached_tokens=0)

    monkeypatch.setattr(AsyncLLM, "generate", ends)
    collector = Collector()
    without.submit([Request.of(prompt_ids=(1, 2), **options)], collector)
    collector.wait(1)
    assert isinstance(collector.error(), GenerationError)
    assert "its log has the reason" in str(collector.error())


@pytest.mark.parametrize("given", [4, [2, 4, 3]])
def test_the_heads_of_a_layer_are_the_most_that_a_configuration_lists(
    given: int | list[int],
) -> None:
    """Kills: every steered request refused where the layers differ in heads."""
    text = SimpleNamespace(num_attention_heads=given)
    assert most_heads(SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text))) == 4


@pytest.mark.parametrize(
    ("heads", "is_single"),
    [([(1, 0, 2.0)], True), ([(2, 0, 2.0), (3, 3, 1.0)], False)],
)
def test_coefficients_are_those_of_heads_that_are_prepared(
    heads: list[tuple[int, int, float]], is_single: bool
) -> None:
    layers = Layers(window=range(2, 4), steered=range(1, 4))
    layers.check_coefficients(Coefficients(tuple(heads), is_single), n_heads=4)
    layer, head, value = heads[0]
    for at in ((layer - 1, head), (4, head), (layer, 4), (layer, -1)):
        other = (*at, value)
        with pytest.raises(RequestError, match=f"head L{other[0]}H{other[1]} cannot be steered"):
            layers.check_coefficients(Coefficients((*heads, other), is_single), n_heads=4)


def test_a_start_that_prepares_nothing_is_refused_where_steering_is_asked_for() -> None:
    """Without the plugin or JUICE_HEAD_SETS; one where JuICE is only installed is vLLM's own."""
    transformers = SimpleNamespace(architecture="TransformersForCausalLM")
    with pytest.raises(UnsupportedModelError, match=r"JUICE_HEAD_SETS, .* let it name juice"):
        RowWriter(SimpleNamespace(model_config=transformers, additional_config={}))
    unused = SimpleNamespace(is_prepared=False)
    assert SteeredCausalLM.get_model_state_cls(unused) is DefaultModelState


@pytest.mark.parametrize(
    "mistake",
    [mistakes.hooks_that_do_not_fire, mistakes.one_hook_that_does_not_fire, mistakes.another_head],
    ids=lambda one: one.__name__,
)
def test_a_mistake_without_a_window_is_refused(mistake: mistakes.Mistake, without: Engine) -> None:
    mistakes.assert_refused(without, mistake)


def test_only_steps_with_two_runs_have_companions(root: Path) -> None:
    ids, heads = tuple(range(1, 11)), {(1, 1): 1.0, (2, 0): 1.0}
    with (
        mistakes.possible(),
        started(root / "model", window="1-2", head_sets=root / "head_sets") as engine,
    ):
        workers = mistakes.Workers(engine)
        assert not workers.lost_in_sleep()
        workers.count()
        for method, n in (("none", 10), ("june", 10), ("juice", 20), ("june", 10)):
            given = {} if method == "none" else {"steering": steering(heads, method)}
            engine.generate([Request.of(prompt_ids=ids, max_tokens=1, **given)])
            engine.preempt().result()  # so that none of it is cached
            assert workers.most_tokens() == {0: 10, 1: n, 2: n, 3: 10}
        assert workers.padding_is_told() == {False}, "experts would look for as many tokens"
        of_both = [{}, {"steering": steering(heads)}]
        requests = [Request.of(prompt_ids=(1,), max_tokens=40, **given) for given in of_both]
        engine.generate([request.with_options(ignore_eos=True) for request in requests])
        # On a CPU those that are not steered have none; elsewhere all of a step have.
        n = 3 if engine.description.device == "cpu" else 4
        assert workers.most_tokens() == {0: 2, 1: n, 2: n, 3: 2}


@pytest.mark.parametrize(
    "twin", [True, pytest.param(False, marks=pytest.mark.long)], ids=["twin", "no twin"]
)
def test_a_compiled_step_runs_companions_where_one_is_in_two_runs(
    tmp_path: Path, twin: bool
) -> None:
    """Kills: the doubled variant for everybody, the plain one that is never taken."""
    tiny.save(tmp_path, wide("Llama").build())
    # Traced, and left as it is: which variant a step takes does not depend on the compiler.
    options = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
    with mistakes.possible(), started(tmp_path, window="1-2", twin=twin, **options) as engine:
        assert engine.details["compiled"]
        workers, n_tokens, heads = mistakes.Workers(engine), 3, {(1, 1): 1.0, (2, 0): 1.0}
        workers.count_shadows()
        for method, has_companions in (("none", not twin), ("june", not twin), ("juice", True)):
            given = {} if method == "none" else {"steering": steering(heads, method)}
            request = Request.of(prompt_ids=(1, 2), max_tokens=n_tokens, ignore_eos=True, **given)
            engine.generate([request])
            assert workers.n_shadows() == (2 * n_tokens if has_companions else 0), method


@pytest.mark.skipif(envs.VLLM_USE_V2_MODEL_RUNNER, reason="V2 has graphs for both kinds of steps")
def test_a_whole_step_that_is_replayed_does_all_that_one_may_need(root: Path) -> None:
    """V1 captures it for nobody, and replays it for everybody.

    Kills: a graph without hooks or companions, since nobody is steered when it is captured.
    """
    heads = {(1, 1): 1.0, (2, 0): 1.0}
    with (
        mistakes.possible(),
        started(root / "model", window="1-2", head_sets=root / "head_sets") as engine,
    ):
        workers = mistakes.Workers(engine)
        workers.replay_whole_steps()
        workers.count()
        for given in ({}, {"steering": steering(heads, "june")}, {"steering": steering(heads)}):
            engine.generate([Request.of(prompt_ids=(1, 2, 3), max_tokens=1, **given)])
            engine.preempt().result()
            assert workers.most_tokens() == {0: 3, 1: 6, 2: 6, 3: 3}


def test_breakable_graphs_always_run_companions_or_are_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are replayed whoever is in a step: V2 captures them with companions, V1 without hooks.

    Kills: prompts whose clean run is left out, as vLLM's invariant mode on GPUs has such graphs.
    """
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    start = started(root / "model", window="1-2", head_sets=root / "head_sets")
    if not envs.VLLM_USE_V2_MODEL_RUNNER:
        with (
            pytest.raises(UnsupportedModelError, match=r"V2 .*VLLM_USE_BREAKABLE_CUDAGRAPH=0"),
            start,
        ):
            pass
        return
    with mistakes.possible(), start as engine:
        workers = mistakes.Workers(engine)
        workers.count()
        for given in ({}, {"steering": steering({(1, 1): 1.0, (2, 0): 1.0})}):
            engine.generate([Request.of(prompt_ids=(1, 2, 3), max_tokens=1, **given)])
            assert workers.most_tokens() == {0: 3, 1: 6, 2: 6, 3: 3}


@pytest.mark.parametrize(
    "options", [{}, {"logits_soft_cap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}]
)
def test_the_definition_attends_in_parts_as_at_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, n_heads, 13, 8, generator=generator) for n_heads in (4, 2, 2)
    )
    for window in (None, 5):
        module = SimpleNamespace(
            attention_arguments={"scale": 0.3, **options},
            attn=SimpleNamespace(sliding_window=window),
        )
        given = []
        for n in (1000, 4):
            monkeypatch.setattr(worker, "N_QUERIES", n)
            given.append(worker.dense_attention(module, query, key, value))
        torch.testing.assert_close(*given)


def test_companions_have_the_scales_that_were_loaded_for_their_layer() -> None:
    """vLLM loads them by name, and those of another name stay at -1, which means none."""
    attn, shadow = torch.nn.Module(), torch.nn.Module()
    for module, value in ((attn, 0.5), (shadow, -1.0)):
        module.k_scale = torch.nn.Parameter(torch.tensor(value), requires_grad=False)
    share_scales(attn, shadow)
    assert float(shadow.k_scale) == 0.5


def test_attention_that_does_not_say_where_requests_begin_is_refused() -> None:
    class Told:
        query_start_loc = torch.tensor([0, 2])

    class Silent:
        """As FlashInfer's."""

    assert starts_of({"a": Told()}) is Told.query_start_loc
    with pytest.raises(UnsupportedModelError, match=r"Silent does not say .* V2"):
        starts_of({"a": Silent()})


@pytest.mark.parametrize("may_rest", [True, False])
def test_steps_with_and_without_companions_have_graphs_of_their_own(
    monkeypatch: pytest.MonkeyPatch, may_rest: bool
) -> None:
    """vLLM captures on GPUs alone: what stands in for that notes what the model was to run.

    Kills: a set that replays the other's steps, memory for one set where there are two.
    """
    replayed: list[int] = []

    def capture(self: Any, *_: Any) -> None:
        for step in STEPS:
            self.graphs[step] = self.model.n_runs
            self._capture_mem_samples.append(100 * self.model.n_runs + step.num_tokens)

    monkeypatch.setattr(CudaGraphManager, "capture", capture)
    monkeypatch.setattr(
        CudaGraphManager, "run_fullgraph", lambda self, step: replayed.append(self.graphs[step])
    )
    capture_both()
    manager, model = object.__new__(ModelCudaGraphManager), SimpleNamespace(may_rest=may_rest)
    vars(manager).update(
        is_last_pp_rank=True,
        use_breakable_cg=False,
        cudagraph_mode=CUDAGraphMode.FULL,
        hidden_states=torch.zeros(8, 1),
        _capture_mem_samples=[],
    )
    manager.capture(model, *range(6))
    assert manager._capture_mem_samples == ([316, 308] if may_rest else [208, 204])
    for n_runs in (0, 1, 2, 0):
        model.n_runs = n_runs
        manager.run_fullgraph(STEPS[1])
    assert replayed == ([1, 1, 2, 1] if may_rest else [2, 2, 2, 2])
