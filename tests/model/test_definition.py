"""The definition of steering against the oracle, and the padded forward against single ones."""

from __future__ import annotations

import pytest
import torch

from juice.formula import add_scaled
from juice.loading import prepare
from juice.model.definition import PaddedPrompts, two_runs
from tests.support import oracle, tiny

FP32 = 2e-5
IDS = [5, 200, 7, 31, 90, 150, 12, 260, 3, 77, 18, 42]  # longer than gemma2's sliding window of 8
HEADS = {(1, 2): 1.4, (2, 0): -0.7, (2, 3): -0.7}


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("method", ["juice", "june"])
@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_the_two_runs_are_the_oracles(shape: str, method: str, first: int) -> None:
    """Kills: a head off by one, the steered run's own z, a position too many."""
    network = tiny.tiny_model(shape)
    coefficients = {layer: torch.zeros(tiny.N_HEADS) for layer, _ in HEADS}
    for (layer, head), value in HEADS.items():
        coefficients[layer][head] = value
    loaded = prepare(network, tiny.tiny_tokenizer())
    factors = (torch.arange(len(IDS)) >= first).float()
    clean, steered = two_runs(loaded, torch.tensor(IDS), coefficients, 4, factors, method)
    plain = tiny.tiny_model(shape)
    expected = oracle.steered_logits(plain, IDS, HEADS, method=method, first=first)
    torch.testing.assert_close(clean, oracle.forward(plain, IDS)[0][-4:], atol=FP32, rtol=0)
    torch.testing.assert_close(steered, expected[-4:], atol=FP32, rtol=0)
    assert (steered - clean).abs().max() > 0.01


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_padded_prompts_have_the_logits_of_each_alone(shape: str) -> None:
    """Kills: the logits of padding, or of another prompt."""
    prompts = [IDS, IDS[3:6], IDS[:1]]
    with torch.no_grad():
        found = PaddedPrompts(prepare(tiny.tiny_model(shape), tiny.tiny_tokenizer()), prompts)
        logits = found.logits()
    assert found.ids.shape == (3, len(IDS))
    for logit, ids in zip(logits, prompts, strict=True):
        expected = oracle.forward(tiny.tiny_model(shape), ids)[0][-1]
        torch.testing.assert_close(logit, expected, atol=FP32, rtol=0)


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_padded_prompts_have_the_logits_of_each_alone_everywhere(shape: str) -> None:
    """Kills: the places of padding, the prompts in another order, a place too few."""
    prompts = [IDS[3:6], IDS, IDS[:1]]
    loaded = prepare(tiny.tiny_model(shape), tiny.tiny_tokenizer())
    with torch.no_grad():
        logits = PaddedPrompts(loaded, prompts, [range(len(ids)) for ids in prompts]).logits()
    plain = tiny.tiny_model(shape)
    expected = torch.cat([oracle.forward(plain, ids)[0] for ids in prompts])
    assert logits.shape == (sum(map(len, prompts)), tiny.VOCAB_SIZE)
    torch.testing.assert_close(logits, expected, atol=FP32, rtol=0)


def test_the_formula_sums_in_float32_or_wider_and_broadcasts() -> None:
    z, source = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    coefficient = torch.tensor([1.3, -0.1])
    expected = z + coefficient.repeat_interleave(4) * source
    assert torch.equal(add_scaled(z, source, coefficient), expected)
    half = add_scaled(z.bfloat16(), source.bfloat16(), coefficient)
    wide = z.bfloat16().float() + coefficient.repeat_interleave(4) * source.bfloat16().float()
    assert torch.equal(half, wide.bfloat16())
    assert add_scaled(z.double(), source.double(), coefficient).dtype == torch.float64
    by_row = torch.stack([coefficient, 0 * coefficient, coefficient])[:, None]  # [rows, 1, heads]
    assert torch.equal(add_scaled(z, source, by_row)[[0, 2]], expected[[0, 2]])
    assert torch.equal(add_scaled(z, source, by_row)[1], z[1])
