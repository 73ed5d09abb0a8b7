"""A head set as TransformerLens hooks, on the real bridge, against the oracle and the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import juice
from juice.errors import RequestError, UsageError
from juice.head_set.head_set import HeadSet
from tests.support import oracle, tiny

FP32 = 2e-5  # two implementations of attention, logits of order 1
IDS = [5, 200, 7, 31, 90, 150, 12, 260, 3, 77, 18, 42]  # longer than gemma2's sliding window of 8
PLUS, MINUS = [(1, 2), (2, 0)], [(2, 3), (3, 1), (1, 2)]  # one head with both signs


def bridge_of(shape: str) -> Any:
    """Return a bridge around its own model: it may change the model, and the engine's has hooks."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    model = tiny.tiny_model(shape)
    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config)


def set_of(model: juice.SteeredModel, **betas: float) -> HeadSet:
    return model.make_head_set(name="mine", target="context", plus=PLUS, minus=MINUS, **betas)


def scaled(
    beta_plus: float, beta_minus: float, strength: float = 1.0
) -> dict[tuple[int, int], float]:
    heads = dict.fromkeys(PLUS, strength * beta_plus)
    for head in MINUS:
        heads[head] = heads.get(head, 0.0) + strength * beta_minus
    return heads


def run(bridge: Any, ids: list[int], hooks: list[Any]) -> torch.Tensor:
    with torch.no_grad():
        return bridge.run_with_hooks(torch.tensor([ids]), fwd_hooks=hooks)[0]


@pytest.fixture(scope="module", params=tiny.SHAPES)
def pair(request: pytest.FixtureRequest) -> tuple[str, juice.SteeredModel, Any]:
    shape = request.param
    return (
        shape,
        juice.load(tiny.tiny_model(shape), tokenizer=tiny.tiny_tokenizer()),
        bridge_of(shape),
    )


@pytest.mark.parametrize("method", ["juice", "june"])
def test_the_steered_run_is_the_two_run_definition_and_the_engines(
    pair: tuple[str, juice.SteeredModel, Any], method: str
) -> None:
    """Kills: coefficients of the wrong sign, head or layer; a recorded or scaled steered z."""
    shape, model, bridge = pair
    head_set = set_of(model)
    hooks = head_set.to_lens_hooks(beta_plus=2.0, beta_minus=-1.0, strength=0.7, method=method)
    clean = run(bridge, IDS, hooks.record)
    steered = run(bridge, IDS, hooks.steer)
    plain = tiny.tiny_model(shape)
    expected = oracle.steered_logits(plain, IDS, scaled(2.0, -1.0, 0.7), method=method)
    torch.testing.assert_close(clean, oracle.forward(plain, IDS)[0], atol=FP32, rtol=0)
    torch.testing.assert_close(steered, expected, atol=FP32, rtol=0)
    assert (steered - clean).abs().max() > 0.1
    asked = juice.Steer(
        target="context", beta_plus=2.0, beta_minus=-1.0, strength=0.7, method=method
    )
    every = tuple(range(tiny.VOCAB_SIZE))
    completion = model.engine.generate(
        [model.request(IDS, steer=asked, head_set=head_set, max_tokens=1, watch=every)]
    )[0]
    torch.testing.assert_close(
        steered[-1].log_softmax(-1), torch.tensor(completion.watched), atol=FP32, rtol=0
    )


def test_the_tuned_betas_are_the_default_and_without_any_the_error_is_the_engines(
    pair: tuple[str, juice.SteeredModel, Any],
) -> None:
    _, model, bridge = pair
    tuned = set_of(model, beta_plus=1.0, beta_minus=-2.0).to_lens_hooks()
    given = set_of(model).to_lens_hooks(beta_plus=1.0, beta_minus=-2.0)
    logits = [
        (run(bridge, IDS, hooks.record), run(bridge, IDS, hooks.steer))[1]
        for hooks in (tuned, given)
    ]
    assert torch.equal(*logits)
    with pytest.raises(RequestError) as by_hooks:
        set_of(model).to_lens_hooks(beta_plus=1.0)
    with pytest.raises(RequestError) as by_engine:
        model.request(
            "a", steer=juice.Steer(target="context", beta_plus=1.0), head_set=set_of(model)
        )
    assert str(by_hooks.value) == str(by_engine.value)


def test_a_batch_of_prompts_is_steered_row_by_row(
    pair: tuple[str, juice.SteeredModel, Any],
) -> None:
    shape, model, bridge = pair
    hooks = set_of(model, beta_plus=1.0, beta_minus=-2.0).to_lens_hooks()
    rows = [IDS, IDS[::-1]]
    with torch.no_grad():
        bridge.run_with_hooks(torch.tensor(rows), fwd_hooks=hooks.record)
        steered = bridge.run_with_hooks(torch.tensor(rows), fwd_hooks=hooks.steer)
    for row, ids in zip(steered, rows, strict=True):
        expected = oracle.steered_logits(tiny.tiny_model(shape), ids, scaled(1.0, -2.0))
        torch.testing.assert_close(row, expected, atol=FP32, rtol=0)


def test_a_steered_run_without_a_clean_run_of_its_shape_is_refused() -> None:
    bridge, model = (
        bridge_of("gpt2"),
        juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer()),
    )
    hooks = set_of(model, beta_plus=1.0, beta_minus=-2.0).to_lens_hooks()
    with pytest.raises(UsageError, match="no clean run at layer 1"):
        run(bridge, IDS, hooks.steer)
    run(bridge, IDS, hooks.record)
    with pytest.raises(
        UsageError, match=r"\[1, 5, 4, 8\] at layer 1, the recorded clean run \[1, 12, 4, 8\]"
    ):
        run(bridge, IDS[:5], hooks.steer)
    run(bridge, IDS[:5], hooks.record)
    run(bridge, IDS[:5], hooks.steer)
    nothing = set_of(model).to_lens_hooks(beta_plus=3.0, beta_minus=-1.0, strength=0.0)
    assert (nothing.record, nothing.steer) == ([], [])
    assert set_of(model).to_lens_hooks(beta_plus=3.0, beta_minus=-1.0, method="june").record == []


def test_flat_z_is_steered_as_z_by_head_and_z_of_too_few_heads_is_refused() -> None:
    """A bridge gives the z of some architectures as [batch, pos, head * d_head]."""
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    hooks = set_of(model).to_lens_hooks(beta_plus=2.0, beta_minus=-1.0)
    clean, z = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 4, 8)
    for (name, record), (_, steer) in zip(hooks.record, hooks.steer, strict=True):
        layer = int(name.split(".")[1])
        record(clean)
        expected = z.clone()
        for (at, head), beta in scaled(2.0, -1.0).items():
            if at == layer:
                expected[:, :, head] += beta * clean[:, :, head]
        torch.testing.assert_close(steer(z), expected)
        record(clean.flatten(-2))
        torch.testing.assert_close(steer(z.flatten(-2)), expected.flatten(-2))
        record(clean[:, :, :3])
        with pytest.raises(UsageError, match="4 heads"):
            steer(z[:, :, :3])


def test_a_coefficient_is_not_rounded_to_zs_dtype() -> None:
    """Kills: 1.3 rounded to bfloat16's 1.296875 first; the sum rounded twice. The engine's bits."""
    model = juice.load(tiny.tiny_model("gpt2").bfloat16(), tokenizer=tiny.tiny_tokenizer())
    hooks = set_of(model).to_lens_hooks(beta_plus=1.3, beta_minus=0.0)
    draw = torch.Generator().manual_seed(0)
    clean, z = torch.randn(2, 1, 200, 4, 8, generator=draw).bfloat16()
    hooks.record[0][1](clean)
    steered = hooks.steer[0][1](z)
    expected = z.clone()
    expected[:, :, 2] = (z[:, :, 2].float() + 1.3 * clean[:, :, 2].float()).bfloat16()
    assert torch.equal(steered, expected)
    rounded = z[:, :, 2] + torch.tensor(1.3).bfloat16() * clean[:, :, 2]
    assert not torch.equal(rounded, expected[:, :, 2])


def test_a_record_is_not_changed_by_hooks_that_run_after_it() -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    hooks = set_of(model).to_lens_hooks(beta_plus=2.0, beta_minus=0.0)
    clean = torch.ones(1, 2, 4, 8)
    hooks.record[0][1](clean)
    clean.zero_()
    assert hooks.steer[0][1](torch.zeros(1, 2, 4, 8)).max() == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"method": "cad"}, "expected juice or june"),
        ({"beta_plus": -1.0}, "beta_plus is -1.0; expected a number from 0 to 100"),
        ({"beta_minus": 1.0}, "beta_minus"),
        ({"strength": float("nan")}, "strength"),
    ],
)
def test_hooks_refuse_what_a_request_refuses(options: dict[str, Any], named: str) -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    with pytest.raises(RequestError, match=named):
        set_of(model).to_lens_hooks(**{"beta_plus": 1.0, "beta_minus": -1.0, **options})
