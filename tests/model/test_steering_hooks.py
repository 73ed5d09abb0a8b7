"""The hooks that steer: each row's own source and coefficients, and no row is passed by."""

from __future__ import annotations

import pytest
import torch

import juice
from juice.errors import UnsupportedModelError
from juice.loading import prepare
from juice.model.layout import AttentionLayer, Layout
from juice.model.steering_hooks import ModelHooks, SteeringPlan
from tests.support import tiny


def test_hooks_without_a_plan_leave_the_model_bit_identical() -> None:
    network = tiny.tiny_model("llama")
    ids = torch.arange(1, 20)[None]
    before = network(ids).logits
    prepare(network, tiny.tiny_tokenizer())
    assert torch.equal(network(ids).logits, before)


def test_each_row_gets_its_own_source_and_coefficients() -> None:
    z = torch.randn(3, 5, 8)
    coefficient = torch.tensor([[2.0, 0.0], [0.0, -1.0], [0.0, 0.0]])
    steered = through_a_layer(z, SteeringPlan({0: torch.tensor([1, 1, 0])}, {0: coefficient}))
    expected = z.clone()
    expected[0, :, :4] += 2 * z[1, :, :4]
    expected[1, :, 4:] -= z[1, :, 4:]
    torch.testing.assert_close(steered, expected)


def test_a_plan_steers_the_tokens_that_it_names_and_companions_are_unchanged() -> None:
    z = torch.randn(3, 2, 8)
    tokens = torch.tensor([[False, True], [True, False]])
    coefficient = torch.tensor([[2.0, 0.0], [0.0, -1.0], [0.0, 0.0]])
    plan = SteeringPlan({0: torch.tensor([2, 1, 2])}, {0: coefficient}, tokens)
    expected = z.clone()
    expected[0, 1, :4] += 2 * z[2, 1, :4]
    expected[1, 0, 4:] -= z[1, 0, 4:]
    torch.testing.assert_close(through_a_layer(z, plan), expected)


def test_a_coefficient_is_not_rounded_before_it_scales() -> None:
    """1.3 is 1.296875 in bfloat16."""
    z = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    plan = SteeringPlan({0: torch.tensor([1, 1])}, {0: torch.full((2, 2), 1.3)})
    expected = (z.float() + 1.3 * z.float()[[1, 1]]).bfloat16()
    assert torch.equal(through_a_layer(z, plan), expected)


def through_a_layer(z: torch.Tensor, plan: SteeringPlan) -> torch.Tensor:
    """Return what a plan makes of z, [rows, pos, 2 heads of 4], in front of a projection."""
    projection, output = torch.nn.Identity(), torch.nn.Identity()
    layer = AttentionLayer(0, torch.nn.Identity(), torch.nn.Identity(), projection, 2, 4)
    with ModelHooks(Layout((layer,), output)).steer(plan):
        return projection(z)


def test_a_projection_that_bypasses_its_hook_is_an_error_not_silence() -> None:
    network = tiny.tiny_model("gpt2")
    loaded = prepare(network, tiny.tiny_tokenizer())
    attention = network.transformer.h[1].attn

    class Bypass(torch.nn.Module):
        def forward(self, z):
            return skipped.forward(z)

    skipped, attention.c_proj = attention.c_proj, Bypass()
    plan = SteeringPlan({1: torch.tensor([0])}, {1: torch.ones(1, tiny.N_HEADS)})
    with (
        pytest.raises(RuntimeError, match="did not reach layers"),
        loaded.hooks.steer(plan),
    ):
        network(torch.tensor([[1, 2, 3]]))
    with loaded.hooks.steer(SteeringPlan({2: torch.tensor([0])}, {2: torch.ones(1, tiny.N_HEADS)})):
        network(torch.tensor([[1, 2, 3]]))


def test_a_model_object_is_hooked_once() -> None:
    network = tiny.tiny_model("gpt2")
    juice.load(network, tokenizer=tiny.tiny_tokenizer())
    with pytest.raises(UnsupportedModelError, match="already"):
        juice.load(network, tokenizer=tiny.tiny_tokenizer())
