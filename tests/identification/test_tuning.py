"""The choice of betas on validation examples, and how their answers are judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import mean
from types import SimpleNamespace

import pytest

import juice
from juice.data.example import ConflictExample, fact_keys
from juice.data.judging import contains_answer
from juice.errors import ExampleError, UsageError
from juice.head_set.schema import Betas, HeadLists, Methods
from juice.identification import examples as validation
from juice.identification.gates import measured_gates
from juice.identification.options import PROTECTED, IdentificationOptions
from juice.identification.outcomes import answer, outcome
from juice.identification.task import Task
from juice.identification.tune import GRID_MINUS, GRID_PLUS, choose, grid_of, tune
from juice.progress import silent
from tests.support import tiny
from tests.support.conflicts import examples
from tests.support.marks import FEW_EXAMPLES
from tests.support.reciting import CUE, reciting

pytestmark = pytest.mark.usefixtures("little_text")


def test_the_papers_tuning_takes_the_best_pair_of_the_whole_grid() -> None:
    """The oracle walks the grid itself.

    The answers of a random model are arbitrary text, so those of one pair of betas are taken as the
    accepted ones, for accuracies to differ.
    """
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    head_set = model.make_head_set(name="t", target="context", plus=[(0, 1)], minus=[(2, 2)])
    prompts = [p for e in examples() for p in e.prompts.values()]
    wanted = [
        c.text
        for c in model.generate(
            prompts,
            steer=juice.Steer(target="context", beta_plus=3, beta_minus=-2),
            head_set=head_set,
            max_tokens=15,
        )
    ]
    validation = [
        ConflictExample(
            subject="x", parametric_answer="~", context_answer=text, prompts={"substitution": p}
        )
        for p, text in zip(prompts, wanted, strict=True)
        if text.split() and juice.data.judging.normalise(text)
    ]
    how = IdentificationOptions(method="probe")
    task = Task(model=model, target="context", validation=validation, options=how)
    with pytest.warns(UserWarning, match="examples tune the betas"):
        tuned = choose(task, [head_set])
    sums = {}
    for plus in GRID_PLUS:
        for minus in GRID_MINUS:
            steer = juice.Steer(target="context", beta_plus=plus, beta_minus=minus)
            answers = answer(
                model,
                validation,
                ["substitution"],
                "context",
                model.resolve(replace(steer, head_set=head_set)),
            )
            sums[plus, minus] = outcome(validation, answers, "context")
    best = tuned.betas()
    assert sums[best.plus, best.minus].rank == max(o.rank for o in sums.values())
    assert tuned.metrics["validation_juice"]["accuracy"] == sums[best.plus, best.minus].accuracy
    assert len({o.accuracy["substitution"] for o in sums.values()}) > 1


def test_every_example_is_judged_by_its_own_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    fact = {
        "subject": "x",
        "parametric_answer": "sea",
        "context_answer": "sand",
        "prompts": {"clean": "the river runs to"},
    }
    pair = [ConflictExample(**fact, match=match) for match in ("contains", "begins")]
    answers = {"clean": [SimpleNamespace(text=" the sea", watched=())] * 2}
    assert outcome(pair, answers, "parametric").accuracy == {"clean": 0.5}
    monkeypatch.setattr(validation, "answer", lambda *_: answers)
    assert validation.known_examples(None, pair) == pair[:1]


def test_an_answer_has_room_for_all_its_tokens(tmp_path: Path) -> None:
    said = "abcdefghijklmnopqrstuvwx"  # 24 tokens, and one word
    model = juice.load(reciting(tmp_path, list(said), "{{ messages[0].content }}"))
    fact = ConflictExample(
        subject="x",
        parametric_answer=(said,),
        context_answer=("y",),
        prompts={"clean": f"It is{CUE}"},
    )
    for form in (model, model.with_chat_template()):
        answers = answer(form, [fact], ["clean"], "parametric")
        assert outcome([fact], answers, "parametric").accuracy == {"clean": 1.0}
    assert validation.known_examples(model, [fact]) == [fact]


@pytest.mark.long
@FEW_EXAMPLES
def test_the_candidate_that_validates_best_is_chosen_and_its_gain_is_counted() -> None:
    """The oracle asks the model itself, by `generate`, with the betas that were chosen."""
    pool = juice.read_examples("mini")
    with juice.load("mini") as model:
        facts = validation.known_examples(model, Random(0).sample(pool, 30))[:20]
        good = model.head_sets.get("parametric")
        heads = HeadLists(plus=(juice.Head(0, 0),))
        bad = good.model_copy(update={"methods": Methods.sharing(heads)})
        # A few heads of a toy move ordinary text further than is allowed by default.
        options = IdentificationOptions(max_divergence=1.0)
        task = Task(model=model, target="parametric", validation=facts, options=options)
        chosen = choose(task, [bad, good])
        assert chosen.heads == good.heads

        def hits(example: ConflictExample, kind: str, steer: juice.Steer | str) -> bool:
            text = model.generate(example.prompts[kind], steer=steer, max_tokens=15)[0].text
            return contains_answer(text, example.parametric_answer)

        steer = juice.Steer(target="parametric", head_set=chosen)
        gains = [
            mean(
                hits(e, kind, steer) - hits(e, kind, "none")
                for kind in ("substitution", "coherent")
            )
            for e in facts
        ]
        measured = chosen.validation()
        assert measured.n_examples == len(facts)
        assert measured.gain == pytest.approx(mean(gains))
        low, high = measured.gain_interval
        assert low < measured.gain < high
        for name, (gain, n) in measured.by_relation.items():
            of_relation = [g for e, g in zip(facts, gains, strict=True) if e.relation == name]
            assert (gain, n) == (pytest.approx(mean(of_relation)), len(of_relation))
        assert set(measured.by_relation) == {e.relation for e in facts}
        assert not measured.is_weak
        assert set(measured.side_effects) == {*PROTECTED, "open"}
        weak = choose(task, [bad]).validation()
        assert weak.is_weak


@FEW_EXAMPLES
@pytest.mark.long
@pytest.mark.parametrize("target", ["context", "parametric"])
def test_protection_keeps_steering_from_breaking_what_needs_none(target: str) -> None:
    pool = juice.read_examples("mini")
    with juice.load("mini") as model:
        head_set = model.head_sets.get(target)
        facts = Random(1).sample(pool, 24)
        # A few heads of a toy move ordinary text further than is allowed by default.
        protections = {"protect": ()}, {"accepted_loss": 0.0}
        options = [IdentificationOptions(max_divergence=1.0, **one) for one in protections]
        free, kept = (
            choose(Task(model=model, target=target, validation=facts, options=how), [head_set])
            for how in options
        )
        for tuned in (free, kept):
            assert tuned.validation().gain > 0.2
        assert free.validation().side_effects == {}
        kind = {"parametric": "unknown", "context": "clean"}[target]
        before, after = kept.validation().side_effects[kind]
        assert after >= before - 0.1
        unprotected = free.betas()

        def right(plus: float, minus: float) -> float:
            betas = Betas(plus=plus, minus=minus)
            tuned = head_set.with_betas("juice", betas)
            found = measured_gates(model, tuned, ["juice"], facts, PROTECTED, silent)
            return found["juice"].side_effects[kind][1]

        assert after >= right(unprotected.plus, unprotected.minus)
        if target == "context":  # toward memory these heads break little
            assert right(1.0, -1.0) < after - 0.3


@pytest.mark.filterwarnings("ignore:only 4 examples")
def test_validation_without_a_conflict_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    made = model.make_head_set(name="t", target="parametric", plus=[(0, 1)])
    clean = [e.model_copy(update={"prompts": {"clean": e.prompts["clean"]}}) for e in examples()]
    monkeypatch.setattr(validation, "known_examples", lambda _model, given: list(given))
    with pytest.raises(ExampleError, match="hold no conflict for the parametric target"):
        juice.tune(model, made, clean)


def test_a_set_whose_heads_have_their_own_betas_is_not_tuned() -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    per_head = model.make_head_set(name="t", target="context", plus=[(0, 1)], beta_plus=[1.0])
    with pytest.raises(UsageError, match="there is nothing to tune"):
        juice.tune(model, per_head, examples())


def test_betas_are_tried_of_the_heads_that_the_method_has() -> None:
    """Kills: the default method's heads, where the two methods differ."""
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    plus = model.make_head_set(name="t", target="context", plus=[(0, 1)])
    minus = model.make_head_set(name="t", target="context", minus=[(2, 2)], method="june")
    methods = Methods(juice=plus.intervention("juice"), june=minus.intervention("june"))
    both = plus.model_copy(update={"methods": methods})
    assert {pair[1] for pair in grid_of(both, "juice")} == {0.0}
    assert {pair[0] for pair in grid_of(both, "june")} == {0.0}
    assert {pair[1] for pair in grid_of(both, "june")} == {*GRID_MINUS}


@FEW_EXAMPLES
@pytest.mark.parametrize("how", ["probe", "attribution"])
def test_a_method_that_a_set_lacks_is_tuned_with_the_heads_of_its_default(how: str) -> None:
    facts = juice.read_examples("mini")[:4]
    with juice.load("mini") as model:
        shipped = model.head_sets.get("context")
        lacking = shipped.model_copy(
            update={"methods": Methods(juice=shipped.intervention("juice"))}
        )
        task = Task(
            model=model,
            target="context",
            validation=facts,
            options=IdentificationOptions(method=how, protect=()),
        )
        tuned = choose(task, [lacking], "june")
        assert tuned.intervention("june").heads == shipped.heads
        assert tuned.betas("june") is not None
        assert tuned.betas("juice") == shipped.betas("juice")


@FEW_EXAMPLES
def test_what_tunes_a_set_joins_the_facts_that_found_it() -> None:
    facts = juice.read_examples("mini")[:3]
    with juice.load("mini") as model:
        shipped = model.head_sets.get("context")
        found = shipped.identification.model_copy(update={"facts": tuple(fact_keys(facts[:2]))})
        listing = shipped.model_copy(update={"identification": found})
        with pytest.warns(UserWarning, match="1 of 2 validation examples .* found or tuned"):
            tuned = tune(model, listing, facts[1:])
        assert tuned.facts == tuple(sorted(fact_keys(facts)))
        assert tune(model, shipped, facts[1:2]).facts == ()
