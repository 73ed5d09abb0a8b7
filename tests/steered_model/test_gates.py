"""When a request may ask for a gate, and which rule of the head set then decides."""

from __future__ import annotations

from typing import Any

import pytest

import juice
from juice.errors import HeadSetError, RequestError
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Betas, Gate, GateRule
from tests.support import tiny

CONTEXT, PROMPT = "the moon is made of cheese.", "the moon is made of"


def rule(signal: str, threshold: float) -> GateRule:
    return GateRule(signal=signal, threshold=threshold, n_prompts=9, kept=1.0, side_effects={})


def gate(*rules: GateRule, chat_template_sha256: str | None = None) -> Gate:
    return Gate(chat_template_sha256=chat_template_sha256, rules=rules)


BOTH = gate(rule("memory", 0.25), rule("steered", 0.0))


@pytest.fixture(scope="module")
def model() -> juice.SteeredModel:
    return juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())


def made(model: juice.SteeredModel, given: Gate | None = BOTH, **options: Any) -> HeadSet:
    return model.make_head_set(
        name="own",
        target="parametric",
        plus=[(1, 2), (3, 0)],
        beta_plus=2.0,
        beta_minus=0.0,
        **options,
    ).with_gate("juice", given)


def test_a_gate_is_used_only_where_it_is_asked_for(model: juice.SteeredModel) -> None:
    head_set = made(model)
    for asked, has_one in ((None, False), ("off", False), ("auto", True)):
        done = model.generate(
            PROMPT, steer="parametric", head_set=head_set, gate=asked, max_tokens=2
        )[0]
        assert (done.steering.gate is not None) is has_one
        assert done.steering.applied
    assert model.request(PROMPT, steer="parametric", head_set=head_set).gate is None
    steer = juice.Steer(target="parametric", head_set=head_set, gate="auto")
    assert model.request(PROMPT, steer=steer).gate is not None


def test_memory_decides_where_the_context_is_apart_else_the_next_rule(
    model: juice.SteeredModel,
) -> None:
    options = {"steer": "parametric", "head_set": made(model), "gate": "auto"}
    apart = model.request(PROMPT, context=CONTEXT, **options).gate
    assert (apart.signal, apart.threshold) == ("memory", 0.25)
    assert apart.without_context == model.tokenize(PROMPT)
    joined = model.request(f"{CONTEXT} {PROMPT}", **options).gate
    assert (joined.signal, joined.threshold, joined.without_context) == ("steered", 0.0, ())


def test_strength_zero_needs_no_gate(model: juice.SteeredModel) -> None:
    options = {"steer": "parametric", "head_set": made(model, None), "strength": 0.0}
    assert model.generate(PROMPT, gate="auto", max_tokens=1, **options)[0].steering.gate is None


REFUSED = {
    "no gate": (None, {}, "has no gate for method 'juice'"),
    "another method": (BOTH, {"method": "june", "beta_plus": 1.0}, "has no gate for method 'june'"),
    "other betas": (BOTH, {"beta_plus": 1.0}, "for its own betas at strength 1"),
    "another strength": (BOTH, {"strength": 0.5}, "for its own betas at strength 1"),
    "a chat's gate": (gate(rule("steered", 0), chat_template_sha256="a" * 64), {}, "in a chat"),
    "needs the context": (gate(rule("memory", 0.5)), {}, "give it as `context`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_gate_is_refused_for_what_it_was_not_measured_on(
    model: juice.SteeredModel, case: str
) -> None:
    fields, options, message = REFUSED[case]
    steer = juice.Steer(target="parametric", head_set=made(model, fields), gate="auto", **options)
    with pytest.raises(RequestError, match=message) as refused:
        model.request(PROMPT, steer=steer)
    assert refused.value.param == "steer.gate"
    assert "gate=off" in str(refused.value)


def test_a_plain_gate_is_refused_in_a_chat(model: juice.SteeredModel) -> None:
    template = "{{ messages[0].content }}!"
    with pytest.raises(RequestError, match="measured on plain prompts"):
        model.with_chat_template(template).request(
            PROMPT, steer="parametric", head_set=made(model), gate="auto"
        )


@pytest.mark.parametrize(
    ("steer", "message"),
    [
        ({"target": "none", "gate": "auto"}, "gate is given, but steer is none"),
        ({"target": "context", "method": "cad", "gate": "auto"}, "method cad uses no heads"),
        ({"target": "context", "gate": "open"}, "gate is 'open'; expected one of auto, off"),
    ],
)
def test_a_gate_that_means_nothing_is_refused(steer: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        juice.Steer(**steer)


def test_no_gate_where_nothing_is_steered_is_allowed() -> None:
    assert juice.Steer(target="none", gate="off").gate == "off"
    assert juice.Steer(target="context", method="cad", gate="off").gate == "off"


def test_a_gate_is_saved_with_its_set_and_goes_with_its_betas(
    model: juice.SteeredModel, tmp_path: Any
) -> None:
    head_set = made(model)
    head_set.save(tmp_path / "own")
    assert HeadSet.load(tmp_path / "own").gate() == BOTH
    assert head_set.with_betas("june", Betas(plus=1, minus=0)).gate() == BOTH
    assert head_set.with_betas("juice", Betas(plus=1, minus=0)).gate() is None
    content = head_set.model_dump(mode="json")
    dual = content["methods"]["juice"]
    with pytest.raises(HeadSetError, match="a gate is given, but the betas that it is for are not"):
        HeadSet.parse({**content, "methods": {"juice": {**dual, "betas": None}}}, "test")
    dual["gate"]["rules"] = []
    with pytest.raises(HeadSetError, match="rules"):
        HeadSet.parse(content, "test")
