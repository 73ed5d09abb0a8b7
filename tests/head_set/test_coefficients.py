"""Betas and strength become coefficients: one beta for a sign, or one for each head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import juice
from juice.errors import HeadSetError, RequestError
from juice.head_set.head_set import HeadSet
from tests.support import oracle, tiny

PLUS, MINUS = [(1, 2), (3, 0)], [(2, 1), (1, 2)]
BETAS = {"beta_plus": [2.0, 0.5], "beta_minus": [-1.0, -0.25]}
COEFFICIENTS = {(1, 2): 2.0 - 0.25, (3, 0): 0.5, (2, 1): -1.0}
IDS = [5, 9, 2, 7, 1]
FP32 = 2e-5  # two implementations of attention, logits of order 1


@pytest.fixture(scope="module")
def model() -> juice.SteeredModel:
    return juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())


def per_head(model: juice.SteeredModel, method: str = "juice", **changes: Any) -> HeadSet:
    heads: dict[str, Any] = {"plus": PLUS, "minus": MINUS, **BETAS, **changes}
    return model.make_head_set(name="own", target="context", method=method, **heads)


@pytest.mark.parametrize("method", ["juice", "june"])
@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_each_head_is_scaled_by_its_own_beta(
    model: juice.SteeredModel, method: str, strength: float
) -> None:
    steer = juice.Steer(
        target="context", head_set=per_head(model, method), method=method, strength=strength
    )
    every = tuple(range(tiny.VOCAB_SIZE))
    done = model.engine.generate([model.request(IDS, steer=steer, max_tokens=1, watch=every)])[0]
    scaled = {head: strength * value for head, value in COEFFICIENTS.items()}
    expected = oracle.steered_logits(tiny.tiny_model("llama"), IDS, scaled, method=method)
    torch.testing.assert_close(
        torch.tensor(done.watched), expected[-1].log_softmax(-1), atol=FP32, rtol=0
    )
    assert done.steering.beta_plus == (0.5, 2.0)
    assert done.steering.beta_minus == (-1.0, -0.25)
    assert (done.steering.n_heads, done.steering.strength) == (3, strength)


@pytest.mark.parametrize("given", [{"beta_plus": 1.0}, {"beta_minus": -1.0}])
def test_betas_of_a_request_are_refused_where_each_head_has_its_own(
    model: juice.SteeredModel, given: dict[str, float]
) -> None:
    with pytest.raises(RequestError, match="each head of the set 'own' has a beta of its own"):
        model.resolve(juice.Steer(target="context", head_set=per_head(model), **given))


def test_a_sign_without_heads_has_no_betas(model: juice.SteeredModel) -> None:
    made = per_head(model, plus=[], beta_plus=None)
    steering = model.resolve(juice.Steer(target="context", head_set=made))
    assert (steering.report.beta_plus, steering.report.beta_minus) == (0.0, (-1.0, -0.25))
    assert str(made.betas()) == "+0 -1..-0.25"


def test_a_list_must_have_a_beta_for_each_head(model: juice.SteeredModel) -> None:
    with pytest.raises(HeadSetError, match="lists 1 betas for 2 heads"):
        per_head(model, beta_plus=[1.0])


@pytest.mark.parametrize(
    ("default", "asked", "applied"),
    [("juice", None, "juice"), ("june", None, "june"), ("june", "juice", "juice")],
)
def test_a_request_is_steered_by_the_heads_of_its_method_else_of_the_sets_default(
    model: juice.SteeredModel, default: str, asked: str | None, applied: str
) -> None:
    """Kills: `juice` where a request names no method, and the heads of the other method."""
    two, one = per_head(model), per_head(model, "june", plus=[(2, 3)], beta_plus=[1.5])
    methods = two.methods.model_copy(update={"june": one.intervention("june")})
    made = two.model_copy(update={"methods": methods, "method": default})
    steer = juice.Steer(target="context", head_set=made, method=asked)
    every = tuple(range(tiny.VOCAB_SIZE))
    done = model.engine.generate([model.request(IDS, steer=steer, max_tokens=1, watch=every)])[0]
    heads = COEFFICIENTS if applied == "juice" else {(2, 3): 1.5, (2, 1): -1.0, (1, 2): -0.25}
    expected = oracle.steered_logits(tiny.tiny_model("llama"), IDS, heads, method=applied)
    torch.testing.assert_close(
        torch.tensor(done.watched), expected[-1].log_softmax(-1), atol=FP32, rtol=0
    )
    assert (done.steering.method, done.steering.n_heads) == (applied, len(heads))


@pytest.mark.parametrize("target", ["none", "context"])
def test_a_request_without_a_head_set_reports_its_method(
    model: juice.SteeredModel, target: str
) -> None:
    """Context-aware decoding uses none, and without steering there is no other word."""
    method = "cad" if target == "context" else None
    report = model.resolve(juice.Steer(target=target, method=method)).report
    assert (report.method, report.head_set) == (method or "juice", None)


def test_a_method_that_the_set_lacks_is_refused_with_those_it_has(
    model: juice.SteeredModel,
) -> None:
    made = per_head(model)
    only = made.methods.model_copy(update={"june": None})
    steer = juice.Steer(
        target="context", head_set=made.model_copy(update={"methods": only}), method="june"
    )
    with pytest.raises(RequestError, match="no heads for method 'june'; it has juice"):
        model.resolve(steer)
