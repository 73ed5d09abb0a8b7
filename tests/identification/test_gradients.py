"""Gradients by head coefficients against finite differences of the engine's own dual run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import juice
from juice.engine.own.thread import BatchingEngine
from juice.engine.request import Request
from juice.engine.steer import Steering, SteeringReport
from juice.errors import JuiceError, UnsupportedModelError
from juice.formula import METHODS
from juice.identification import attribution as dual_run
from juice.identification import attribution as under_test
from juice.identification.attribution import backward, gradients
from juice.model.loaded import LoadedModel
from tests.support import tiny
from tests.support.architectures import ARCHITECTURES, SWITCH, Architecture, build

PROMPTS = [(5, 9, 2, 7, 1, 30), (3, 3, 8), (11, 4, 6, 2, 90, 14, 7, 21, 5, 60, 8)]
AHEAD, BEHIND = 17, 40
STEP = 1e-3


def lead(logits: torch.Tensor, _prompts: list[int]) -> torch.Tensor:
    return logits[:, AHEAD] - logits[:, BEHIND]


def coefficients(model: juice.SteeredModel, seed: int) -> torch.Tensor:
    layout = model.loaded.layout
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layout.n_layers, layout.n_heads, generator=generator) / 4


def steering(table: torch.Tensor, method: str) -> Steering:
    by_layer = {layer: row.clone() for layer, row in enumerate(table) if row.any()}
    report = SteeringReport(applied=True, target="context", strength=1.0, method=method)
    return Steering(coefficients=by_layer, report=report)


def differences(
    model: juice.SteeredModel, at: torch.Tensor, heads: list[tuple[int, int]], method: str
) -> torch.Tensor:
    """Return central differences of the engine's served leads, [prompts, heads]."""
    requests = []
    for prompt in PROMPTS:
        for layer, head in heads:
            for step in (STEP, -STEP):
                moved = at.clone()
                moved[layer, head] += step
                requests.append(
                    Request.of(
                        prompt_ids=prompt,
                        max_tokens=1,
                        steering=steering(moved, method),
                        watch=(AHEAD, BEHIND),
                    )
                )
    done = model.engine.generate(requests)
    leads = torch.tensor([c.watched[0] - c.watched[1] for c in done]).double()
    leads = leads.view(len(PROMPTS), len(heads), 2)
    return (leads[..., 0] - leads[..., 1]) / (2 * STEP)


def assert_equal_differences(model: juice.SteeredModel, at: torch.Tensor, method: str) -> None:
    heads = [
        (layer.index, head) for layer in model.loaded.layout.layers for head in range(layer.n_heads)
    ]
    found = gradients(model.loaded, PROMPTS, lead, at, method=method).by_head.double()
    derivatives = found[:, [h[0] for h in heads], [h[1] for h in heads]]
    expected = differences(model, at, heads, method)
    assert expected.abs().max() > 1e-2
    assert (derivatives - expected).abs().max() <= 0.01 * expected.abs().max()


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_gradients_are_those_of_the_dual_run_that_is_served(architecture: Architecture) -> None:
    """At zero, where attribution is, and elsewhere, where learning goes.

    The engine has generated before, so what it computed lazily is in inference mode. (Models with
    ReLUs have kinks; no step crosses one here.)
    """
    network = architecture.build().double()
    network.set_experts_implementation("eager")  # the other ones know no float64
    with juice.load(network, tokenizer=tiny.tiny_tokenizer()) as model:
        assert_equal_differences(model, torch.zeros_like(coefficients(model, 0)), "juice")
        assert_equal_differences(model, coefficients(model, 1), "juice")


def test_prompts_on_both_sides_of_a_switch_of_positions_are_not_padded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kills: the short prompt padded beyond the switch, with the long ones' frequencies."""
    long = tuple(1 + i % 90 for i in range(SWITCH + 4))
    monkeypatch.setattr("tests.identification.test_gradients.PROMPTS", [long, *PROMPTS])
    with juice.load(build("Phi-3 (longrope)").double(), tokenizer=tiny.tiny_tokenizer()) as model:
        assert model.loaded.rope_switch is not None
        assert_equal_differences(model, coefficients(model, 1), "juice")


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_the_single_runs_gradients_are_its_own(shape: str) -> None:
    network = tiny.tiny_model(shape).double()
    with juice.load(network, tokenizer=tiny.tiny_tokenizer()) as model:
        at = coefficients(model, 1)
        assert_equal_differences(model, at, "june")
        dual, single = (
            gradients(model.loaded, PROMPTS, lead, at, method=m).by_head for m in ("juice", "june")
        )
        assert (dual - single).abs().max() > 0.05 * dual.abs().max()


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_micro_batches_and_checkpoints_change_nothing(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = tiny.tiny_model(shape)
    with juice.load(network, tokenizer=tiny.tiny_tokenizer()) as model:
        at = coefficients(model, 2)
        whole = gradients(model.loaded, PROMPTS, lead, at)
        monkeypatch.setattr(dual_run, "MAX_TOKENS", 1)
        assert dual_run.micro_batches([3, 9, 4], None) == [[1], [2], [0]]
        monkeypatch.setattr(under_test, "N_LARGE", 0)
        n_calls: list[int] = []
        attention = model.loaded.layout.layers[1].attention
        with attention.register_forward_pre_hook(lambda *_: n_calls.append(1)):
            apart = gradients(model.loaded, PROMPTS, lead, at)
        assert len(n_calls) == 3 * len(PROMPTS), "clean, steered, and computed again"
        torch.testing.assert_close(apart.by_head, whole.by_head, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(apart.values, whole.values, atol=1e-5, rtol=1e-4)
        again = gradients(model.loaded, PROMPTS, lead, at).by_head
        assert not any(module.training for module in network.modules())
        assert torch.equal(again, apart.by_head)


def test_a_micro_batch_is_bounded_with_its_padding_and_by_its_padding() -> None:
    """Kills: many short prompts padded to a long one's length."""
    assert dual_run.micro_batches([512] * 5, None) == [[0, 1, 2, 3], [4]]
    assert dual_run.micro_batches([512] * 5, None, most=1024) == [[0, 1], [2, 3], [4]]
    assert dual_run.micro_batches([200, 72, 200], None) == [[0, 2, 1]]
    assert dual_run.micro_batches([200, 71, 200], None) == [[0, 2], [1]]
    assert dual_run.micro_batches([200, 100, 100, 100], None) == [[0, 1], [2, 3]]
    assert dual_run.micro_batches([9, 8, 7], 8) == [[0], [1, 2]]


def test_layers_that_another_thread_computes_again_are_steered_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU autograd has a thread of its own. Kills: hooks that act in one thread alone."""
    calls: list[int] = []

    def elsewhere(loaded: LoadedModel, value: torch.Tensor) -> None:
        calls.append(1)
        with ThreadPoolExecutor(1) as other:
            other.submit(backward, loaded, value).result()

    with juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer()) as model:
        at = coefficients(model, 2)
        for method in METHODS:
            here = gradients(model.loaded, PROMPTS, lead, at, method=method)
            with monkeypatch.context() as patch:
                patch.setattr(under_test, "N_LARGE", 0)
                patch.setattr(under_test, "backward", elsewhere)
                there = gradients(model.loaded, PROMPTS, lead, at, method=method)
            torch.testing.assert_close(there.by_head, here.by_head, atol=1e-5, rtol=1e-4)
    assert calls


def test_memory_that_runs_out_on_either_way_is_an_error_with_the_remedy() -> None:
    def lacking(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    with juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer()) as model:
        norm = model.loaded.model.model.norm
        for register in (norm.register_forward_pre_hook, norm.register_full_backward_hook):
            with register(lacking), pytest.raises(JuiceError, match="--dtype bfloat16"):
                gradients(model.loaded, PROMPTS, lead)
        gradients(model.loaded, PROMPTS, lead)


def test_weights_get_no_gradients_and_are_trainable_again() -> None:
    network = tiny.tiny_model("llama")
    frozen = next(network.parameters())
    frozen.requires_grad_(False)
    with juice.load(network, tokenizer=tiny.tiny_tokenizer()) as model:
        before = model.generate("a b", max_tokens=4)[0]
        with torch.inference_mode():
            gradients(model.loaded, PROMPTS, lead)
        assert all(p.grad is None for p in network.parameters())
        assert not frozen.requires_grad
        assert all(p.requires_grad for p in network.parameters() if p is not frozen)
        assert model.generate("a b", max_tokens=4)[0].logprobs == before.logprobs


def test_half_precision_gives_the_gradients_of_single() -> None:
    single = juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())
    expected = gradients(single.loaded, PROMPTS, lead).by_head
    for dtype in (torch.bfloat16, torch.float16):
        model = juice.load(tiny.tiny_model("llama").to(dtype), tokenizer=tiny.tiny_tokenizer())
        found = gradients(model.loaded, PROMPTS, lead).by_head
        assert (found - expected).abs().max() <= 0.1 * expected.abs().max()


def test_a_model_that_gradients_do_not_pass_through_is_refused_with_the_remedy() -> None:
    class Stopped(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: object, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.clone()

    network = tiny.tiny_model("llama")
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    network.model.norm.register_forward_hook(lambda _m, _a, out: Stopped.apply(out))
    with pytest.raises(UnsupportedModelError, match="--method probe"):
        gradients(model.loaded, PROMPTS, lead)
    assert isinstance(model.engine, BatchingEngine)
