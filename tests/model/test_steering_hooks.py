"""The hooks that steer: each row's own source and coefficients, and no row is passed by."""

from __future__ import annotations

import pytest
import torch

import juice
from juice.errors import UnsupportedModelError
from juice.loading.pretrained import prepare
from juice.model.steering_hooks import SteeringPlan, add_scaled
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
    result = add_scaled(z, torch.tensor([1, 1, 0]), coefficient, n_heads=2)
    expected = z.clone()
    expected[0, :, :4] += 2 * z[1, :, :4]
    expected[1, :, 4:] -= z[1, :, 4:]
    torch.testing.assert_close(result, expected)


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
        loaded.steering_hooks.apply(plan),
    ):
        network(torch.tensor([[1, 2, 3]]))
    with loaded.steering_hooks.apply(
        SteeringPlan({2: torch.tensor([0])}, {2: torch.ones(1, tiny.N_HEADS)})
    ):
        network(torch.tensor([[1, 2, 3]]))


def test_a_model_object_is_hooked_once() -> None:
    network = tiny.tiny_model("gpt2")
    juice.load(network, tokenizer=tiny.tiny_tokenizer())
    with pytest.raises(UnsupportedModelError, match="already"):
        juice.load(network, tokenizer=tiny.tiny_tokenizer())
