"""The gate of a set: a threshold over conflicts, kept only if it is worth something."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest

import juice
from juice.data.example import ConflictExample, without_context
from juice.data.judging import contains_answer
from juice.engine.answer import Completion
from juice.engine.steer import unsteered
from juice.errors import RequestError
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Betas
from juice.identification import gates
from juice.identification.first_tokens import endangered_prompts
from juice.identification.gates import measured_gates
from juice.identification.options import PROTECTED
from juice.identification.outcomes import Trials
from juice.progress import silent

CONFLICTS = ("substitution", "coherent")
# Strong betas, toward which a gate has something to prevent.
SETS = {
    "parametric": {"plus": [(5, 7), (3, 6), (3, 7)], "minus": [(5, 0), (0, 3), (3, 2)]},
    "context": {"plus": [(5, 0), (0, 3), (3, 2)], "minus": [(5, 7), (3, 6), (3, 7)]},
}


@pytest.fixture(scope="module")
def facts(mini: juice.SteeredModel) -> list[ConflictExample]:
    """Facts that the model knows, of all relations."""
    some = juice.read_examples("mini")[::75]
    done = mini.generate([e.prompts["clean"] for e in some], max_tokens=8)
    return [e for e, c in zip(some, done, strict=True) if c.text.strip(" .") in e.parametric_answer]


def made(mini: juice.SteeredModel, target: str, **changes: object) -> HeadSet:
    options = {"beta_plus": 1.0, "beta_minus": -1.0, **SETS[target], **changes}
    return mini.make_head_set(name="own", target=target, **options)


def likeliest(
    mini: juice.SteeredModel, prompt: str, head_set: HeadSet | None = None
) -> tuple[int, float]:
    """Return the likeliest next token and its probability, from all the vocabulary's."""
    every = tuple(range(mini.description.vocabulary_size))
    steered = {"steer": head_set.target, "head_set": head_set} if head_set else {}
    request = mini.request(prompt, watch=every, max_tokens=1, **steered)
    (done,) = mini.engine.generate([request])
    token = max(every, key=lambda i: done.watched[i])
    return token, math.exp(done.watched[token])


def gate_of(model: juice.SteeredModel, head_set: HeadSet, facts: list[ConflictExample]):
    return measured_gates(model, head_set, ["juice"], facts, PROTECTED, silent)["juice"].gate


def value(mini: juice.SteeredModel, signal: str, head_set: HeadSet, prompt: str, alone: str):
    if signal == "memory":
        return likeliest(mini, alone)[1]
    token, probability = likeliest(mini, prompt, head_set)
    return 0.0 if signal == "copied" and token not in mini.tokenize(prompt) else probability


@pytest.mark.parametrize("target", ["parametric", pytest.param("context", marks=pytest.mark.long)])
def test_rules_are_those_of_their_definition(
    mini: juice.SteeredModel,
    facts: list[ConflictExample],
    target: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oracle asks for one signal at a time and finds the thresholds itself."""
    monkeypatch.setattr(gates, "TAIL", 0.08)
    head_set = made(mini, target)
    shuffled = Random(0).sample(facts, len(facts))
    rules = gate_of(mini, head_set, facts).rules
    assert [rule.signal for rule in rules] == (
        ["memory", "steered"] if target == "parametric" else ["copied"]
    )
    for rule in rules:
        values = [
            value(mini, rule.signal, head_set, e.prompts[t], without_context(e, t))
            for e in facts
            for t in CONFLICTS
        ]
        assert rule.n_prompts == len(values) == 2 * len(facts)
        low = sorted(values)
        least = low[int(0.08 * len(values))]
        kind = {"parametric": "unknown", "context": "clean"}[target]
        below = [
            value(mini, rule.signal, head_set, endangered.prompt, endangered.alone)
            for endangered in endangered_prompts(target, shuffled)[kind]
        ]
        most = sorted(below)[-1 - int(0.08 * len(below))]
        if most < least:
            assert rule.threshold == pytest.approx((most + least) / 2, abs=1e-5)
        else:
            quantiles = [low[int(share * len(low))] for share in (0, 0.02, 0.05, 0.1)]
            assert min(abs(rule.threshold - value) for value in quantiles) < 1e-5
            assert rule.side_effects[kind][0] - rule.side_effects[kind][1] <= 0.05
        assert rule.kept >= 0.9
        steer = juice.Steer(target=target, head_set=head_set)
        clean = [e.prompts["clean"] for e in facts]
        gated = [
            steer if value(mini, rule.signal, head_set, p, p) >= rule.threshold else "none"
            for p in clean
        ]
        for found, ways in zip(rule.side_effects["clean"], ("none", gated), strict=True):
            done = mini.generate(clean, steer=ways, max_tokens=15)
            right = [
                contains_answer(c.text, e.parametric_answer)
                for c, e in zip(done, facts, strict=True)
            ]
            assert found == pytest.approx(sum(right) / len(facts))


def test_a_gate_lets_a_strong_set_do_no_harm(
    mini: juice.SteeredModel, facts: list[ConflictExample]
) -> None:
    """Steered always, most clean prompts lose their answer."""
    head_set = made(mini, "context")
    head_set = head_set.with_betas("june", Betas(plus=0.0, minus=-0.25))
    of_methods = measured_gates(mini, head_set, ("juice", "june"), facts, PROTECTED, silent)
    gate, side_effects = of_methods["juice"]
    assert of_methods["june"].side_effects["clean"][1] > side_effects["clean"][1] + 0.2, "gentler"
    assert measured_gates(mini, head_set, ["june"], facts, PROTECTED, silent) == {
        "june": of_methods["june"]
    }
    gated = head_set.with_gate("juice", gate)
    answers = {
        how: mini.generate(
            [e.prompts["clean"] for e in facts],
            steer="context",
            head_set=gated,
            gate=how,
            max_tokens=15,
        )
        for how in ("off", "auto")
    }
    right = {
        how: sum(
            contains_answer(done.text, e.parametric_answer)
            for done, e in zip(completions, facts, strict=True)
        )
        for how, completions in answers.items()
    }
    assert right["off"] < 0.7 * len(facts)
    assert right["auto"] >= 0.9 * len(facts)
    assert side_effects["clean"] == pytest.approx((1.0, right["off"] / len(facts)))
    assert set(side_effects) == {"clean", "true", "irrelevant"}
    for rule in gate.rules:
        saved = {kind: after for kind, (_, after) in rule.side_effects.items()}
        assert saved["true"] >= 0.9
        assert saved["irrelevant"] >= side_effects["irrelevant"][1], "no worse than without it"


def test_answers_that_are_known_are_not_asked_again(
    mini: juice.SteeredModel, facts: list[ConflictExample]
) -> None:
    """Kills: another prompt's answer, or another way's, and signals that a known answer lacks."""
    head_set, n_asked = made(mini, "parametric"), list[int]()
    steer = juice.Steer(target="parametric", head_set=head_set)
    tried = {"none": unsteered(), "juice": mini.resolve(steer)}
    trials = Trials(mini, facts, "parametric", tried, "", silent)

    def known(example: ConflictExample, prompt: str, method: str | None) -> Completion | None:
        return trials.completion(example, prompt, method or "none")

    @contextmanager
    def counted(_description: str, total: int) -> Iterator[Callable[[int], None]]:
        n_asked.append(total)
        yield lambda _: None

    bare, spared = (
        measured_gates(mini, head_set, ["juice"], facts, PROTECTED, counted, *more)["juice"]
        for more in ((), (known,))
    )
    # Three prompts of each fact steered, its clean one as it is, and that as what has no context.
    assert n_asked[1] <= n_asked[0] - 5 * len(facts)
    assert spared.side_effects == bare.side_effects
    for one, other in zip(spared.gate.rules, bare.gate.rules, strict=True):
        assert one.threshold == pytest.approx(other.threshold, abs=1e-5)
        assert (one.kept, one.side_effects) == (other.kept, other.side_effects)


def test_there_is_no_gate_where_it_would_shut_out_conflicts(
    mini: juice.SteeredModel, facts: list[ConflictExample]
) -> None:
    """Heads that push away from the context: hardly a steered token is copied from it."""
    wrong = made(mini, "context", **SETS["parametric"])
    assert gate_of(mini, wrong, facts) is None


def test_there_is_no_gate_where_nothing_shows_what_it_is_good_for(
    mini: juice.SteeredModel, facts: list[ConflictExample]
) -> None:
    bare = [
        e.model_copy(
            update={"prompts": {t: p for t, p in e.prompts.items() if t != "clean"}, "subject": "?"}
        )
        for e in facts
    ]
    for target in ("parametric", "context"):
        assert gate_of(mini, made(mini, target), bare) is None


@pytest.mark.long
def test_a_gate_in_a_chat_is_measured_there(
    mini: juice.SteeredModel, facts: list[ConflictExample]
) -> None:
    chat = mini.with_chat_template()
    head_set = made(mini, "parametric")
    head_set = head_set.with_gate("juice", gate_of(chat, head_set, facts))
    assert head_set.gate().chat_template_sha256 == chat.prompts.sha256
    prompt, asked = facts[0].prompts["substitution"], {"head_set": head_set, "gate": "auto"}
    assert chat.request(prompt, steer="parametric", **asked).gate is not None
    with pytest.raises(RequestError, match="measured in a chat"):
        mini.request(prompt, steer="parametric", **asked)
    plain = gate_of(mini, made(mini, "parametric"), facts)
    assert plain.chat_template_sha256 is None
    assert len(facts) <= gates.N_MEASURED
