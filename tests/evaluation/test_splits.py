"""Which examples find heads, tune and test, and the control situations made from them."""

from __future__ import annotations

from typing import Any

import pytest

import juice
from juice.data.example import (
    ConflictExample,
    context_end,
    examples_sha256,
    fact_keys,
    irrelevant_contexts,
    true_contexts,
    unknown_subjects,
    without_context,
)
from juice.data.judging import contains_answer
from juice.evaluation import splits
from juice.evaluation.head_sets import probing
from juice.evaluation.methods import methods_for
from juice.evaluation.options import EvaluationOptions
from juice.evaluation.splits import Data, domain_of, limited, split
from juice.identification.examples import (
    known_share,
    unseen,
    usable_examples,
    validation_share,
    with_scored_answers,
)
from juice.identification.options import IdentificationOptions
from tests.support.marks import FEW_EXAMPLES

pytestmark = FEW_EXAMPLES


def test_the_large_set_is_larger_than_the_small_one_where_the_small_one_has_its_own_file(
    model: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    made = split(
        model,
        Data(pool[10:], identification=pool[:4]),
        {},
        IdentificationOptions(method="probe"),
        n_large=30,
        limit=None,
    )
    assert len(made.large) == 30
    assert {e.subject for e in made.identification["context"]} == {e.subject for e in pool[:4]}
    assert not {e.subject for e in made.large} & {
        e.subject for e in [*pool[:4], *made.test, *made.validation]
    }


def test_an_instruction_has_no_subject_to_replace(pool: list[ConflictExample]) -> None:
    ending = {"classes": [" heavy.", " fonder."], "answer_index": 0}
    texts = (
        'End in "heavy": Absence makes the heart grow',
        'Absence, with "heavy", makes the heart',
    )
    traps = juice.read_examples([{"prompt": text, **ending} for text in texts])
    asked = pool[0].model_copy(
        update={"subject": "Who rules Albania", "question": "Question: Who rules Albania? Answer:"}
    )
    assert true_contexts(traps) == unknown_subjects([*traps, asked], 0) == []
    founded = {"clean": "Microsoft was founded by"}
    founded["substitution"] = "Microsoft was founded by Jeff Bezos. Microsoft was founded by"
    named = {"subject": "Microsoft", "question": founded["clean"], "prompts": founded}
    assert len(unknown_subjects([pool[0].model_copy(update=named)], 0)) == 1
    symbol = pool[0].model_copy(update={"match": "begins"})
    assert len(true_contexts([symbol])) == len(unknown_subjects([symbol], 0)) == 1


@pytest.mark.parametrize("method", ["attribution", "learned"])
def test_splits_are_disjoint_and_the_head_sets_own_examples_are_found_again(
    model: juice.SteeredModel, method: str
) -> None:
    every = juice.read_examples("mini")
    head_sets = {t: model.head_sets.get(t) for t in ("parametric", "context")}
    for target, one in head_sets.items():
        found = one.identification.model_copy(update={"method": method})
        head_sets[target] = one.model_copy(update={"identification": found})
    how = probing(EvaluationOptions())
    made = split(model, Data(every), head_sets, how, n_large=200, limit=60)
    for target, head_set in head_sets.items():
        assert (
            examples_sha256(made.identification[target]) == head_set.identification.examples_sha256
        )
    groups = [*made.identification.values(), made.large, made.validation, made.test]
    keys = [{(e.relation, e.subject) for e in group} for group in groups]
    assert not any(a & b for i, a in enumerate(keys[1:], 1) for b in keys[i + 1 :])
    assert not (keys[0] | keys[1]) & keys[-1]
    assert len(made.large) == 200
    assert [sum(domain_of(e) == d for e in made.test) for d in made.domains] == [10] * 6
    known = model.generate([e.prompts["clean"] for e in made.validation], max_tokens=15)
    assert all(
        contains_answer(c.text, e.parametric_answer)
        for c, e in zip(known, made.validation, strict=True)
    )


def test_what_a_served_set_was_tuned_on_is_not_tested(model: juice.SteeredModel) -> None:
    """`juice identify` tunes on some that it did not draw: any 40 once, now 48 that are known."""
    every = juice.read_examples("mini")
    head_sets = {t: model.head_sets.get(t) for t in ("parametric", "context")}
    made = split(model, Data(every), head_sets, IdentificationOptions(), n_large=0, limit=None)
    tested = {(e.relation, e.subject) for e in made.test}
    for head_set in head_sets.values():
        found = head_set.identification
        how = IdentificationOptions(method=found.method, n_examples=found.n_examples)
        drawn, rest = usable_examples(model, every, how.but(seed=found.seed))
        assert examples_sha256(drawn) == found.examples_sha256
        for shared in (
            validation_share(rest, found.seed, n=40),
            known_share(model, rest, found.seed),
        ):
            tuned_on = {(e.relation, e.subject) for e in shared}
            assert len(tuned_on) >= 40
            assert not tested & tuned_on


@pytest.mark.parametrize("relation", ["capital_of_country", "World_Capital", None])
def test_facts_are_recognised_under_another_name_of_their_relation(
    model: juice.SteeredModel, relation: str | None
) -> None:
    head_set, every = model.head_sets.get("context"), juice.read_examples("mini")
    capitals = [e for e in every if e.relation == "world_capital"]
    found = head_set.identification.model_copy(update={"facts": tuple(fact_keys(capitals[:9]))})
    measured = head_set.validation().model_dump() | {"by_relation": {"world_capital": (0.5, 9)}}
    head_set = head_set.model_copy(update={"identification": found}).with_metrics(
        {f"validation_{head_set.method}": measured}
    )
    renamed = [e.model_copy(update={"relation": relation}) for e in capitals]
    assert unseen(capitals, [head_set]) == capitals[9:]
    assert unseen(renamed, [head_set]) == renamed[9:]
    other = measured | {"by_relation": {"capital_of_country": (0.5, 9)}}
    of_others = head_set.with_metrics({f"validation_{head_set.method}": other}).model_copy(
        update={"identification": found.model_copy(update={"facts": ("0" * 12,)})}
    )
    assert unseen(renamed, [of_others, head_set]) == renamed[9:]


@pytest.mark.long
def test_what_a_set_was_tuned_on_must_be_usable_to_tune_on(model: juice.SteeredModel) -> None:
    """One of the 40 has a right answer among its context answers."""
    every = juice.read_examples("mini")
    head_set = model.head_sets.get("context")
    _, rest = usable_examples(model, every, IdentificationOptions(method="attribution"))
    one = validation_share(rest, 0, n=40)[0]
    answers = (*one.context_answer, *one.parametric_answer)
    changed = one.model_copy(update={"context_answer": answers})
    data = [changed if e is one else e for e in every]
    made = split(
        model, Data(data), {"context": head_set}, IdentificationOptions(), n_large=0, limit=10
    )
    assert made.holds_finders_of(head_set)
    assert changed not in made.validation
    assert len(made.validation) > 40


def test_what_a_served_set_was_found_on_elsewhere_is_not_tested(
    model: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    head_set = model.head_sets.get("context")
    sets = {"context": head_set.model_copy(update={"identification": None})}
    options = IdentificationOptions()
    before = split(model, Data(pool), sets, options, n_large=0, limit=None)
    seen = before.test[0]
    shouted = seen.model_copy(update={"subject": seen.subject.upper()})
    elsewhere = head_set.identification.model_copy(
        update={"examples_sha256": "0", "facts": tuple(fact_keys([shouted]))}
    )
    sets = {"context": head_set.model_copy(update={"identification": elsewhere})}
    after = split(model, Data(pool), sets, options, n_large=0, limit=None)
    assert after.test == before.test[1:]
    assert after.left_out["facts that a head set was found on"] == 1


def test_what_both_targets_heads_were_found_on_is_drawn_once(
    model: juice.SteeredModel, pool: list[ConflictExample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: the same draws for each target, or twice where no relation is asked for."""
    drawn = list[IdentificationOptions]()

    def noted(model: juice.SteeredModel, examples: list[ConflictExample], how: Any) -> Any:
        drawn.append(how)
        return usable_examples(model, examples, how)

    monkeypatch.setattr(splits, "usable_examples", noted)
    sets = {t: model.head_sets.get(t) for t in ("parametric", "context")}
    made = split(model, Data(pool), sets, IdentificationOptions(), n_large=0, limit=None)
    # As they may have been found: on all facts, or on those of a relation; then anew.
    expected = [None, "book_author", "world_capital", None]
    assert [how.relation for how in drawn] == expected
    assert made.identification["parametric"] == made.identification["context"]


def test_what_cannot_be_used_is_left_out_and_counted(
    model: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    long = pool[0].model_copy(
        update={"subject": "long", "prompts": {**pool[0].prompts, "coherent": "word " * 1200}}
    )
    right = pool[1].model_copy(
        update={
            "subject": "right",
            "context_answer": ("somewhere", pool[1].parametric_answer[0].upper()),
        }
    )
    same = pool[2].model_copy(
        update={
            "subject": "same",
            "context_answer": (pool[2].parametric_answer[0].split()[0] + " x",),
        }
    )
    made = split(
        model, Data([long, right, same, *pool]), {}, IdentificationOptions(), n_large=0, limit=None
    )
    counted = {reason: n for reason, n in made.left_out.items() if "validation" not in reason}
    assert counted["prompts that are too long for the model"] == 1
    assert counted["context answers that are a right answer"] == 1
    assert counted["answers that begin with the same token, or with none"] >= 1
    assert not {"long", "right", "same"} & {e.subject for e in made.test}


def test_a_limit_spreads_over_the_domains_and_uses_up_the_small_ones(
    pool: list[ConflictExample],
) -> None:
    few = [*pool[:30], *pool[60:63]]
    kept = limited(few, 11, seed=0)
    assert [sum(domain_of(e) == d for e in kept) for d in ("world_capital", "book_author")] == [
        8,
        3,
    ]
    assert kept == [e for e in few if e in kept]


def test_the_answer_likeliest_to_the_model_is_scored_where_the_data_leaves_it_open(
    model: juice.SteeredModel,
) -> None:
    fact = {
        "subject": "Peru",
        "parametric_answer": ["Zurich", "Lima"],
        "context_answer": "Oslo",
        "prompts": {"clean": "The name of the capital city of Peru is"},
    }
    given, left_open = (
        juice.ConflictExample(**fact),
        juice.ConflictExample(**fact, scored="likeliest"),
    )
    assert [e.parametric_answer[0] for e in with_scored_answers(model, [given, left_open])] == [
        "Zurich",
        "Lima",
    ]


def test_control_situations_state_the_truth_or_concern_unknown_subjects(
    pool: list[ConflictExample],
) -> None:
    e = pool[0]
    truth, nobody = true_contexts([e])[0], unknown_subjects([e], seed=0)[0]
    assert e.context_answer[0] not in truth.prompts["coherent"]
    assert truth.prompts["coherent"].count(e.parametric_answer[0]) == e.prompts["coherent"].count(
        e.context_answer[0]
    )
    assert truth.prompts["clean"] == e.prompts["clean"]
    assert all(e.subject not in prompt for prompt in nobody.prompts.values())
    assert e.context_answer[0] in nobody.prompts["substitution"]
    assert true_contexts([e.model_copy(update={"context_answer": ("nowhere",)})]) == []


def test_an_irrelevant_context_is_of_another_relation_and_what_is_asked_stays(
    pool: list[ConflictExample],
) -> None:
    """Kills: a fact's own context, one of the same relation, an answer that changes with it."""
    first, *others = pool
    elsewhere = [e for e in others if e.relation != first.relation]
    some = [first, others[0], elsewhere[0], elsewhere[-1]]
    made = irrelevant_contexts(some)
    assert [e.subject for e in made] == [e.subject for e in some]
    for e, control in zip(some, made, strict=True):
        assert control.prompts["clean"] == e.prompts["clean"]
        assert control.parametric_answer == e.parametric_answer
        for kind in ("substitution", "coherent"):
            asked = without_context(e, kind)
            context = control.prompts[kind].removesuffix(asked)
            assert control.prompts[kind] == context + asked
            assert e.subject not in context
            contexts = {o.prompts[kind].removesuffix(without_context(o, kind)): o for o in some}
            assert contexts[context].relation != e.relation


def test_irrelevant_contexts_are_many(pool: list[ConflictExample]) -> None:
    """Kills: the first fact of the next relation, for all facts of one."""
    some = sorted(pool, key=lambda e: e.relation or "")[::10]
    made = irrelevant_contexts(some)
    contexts = {
        control.prompts["substitution"].removesuffix(without_context(e, "substitution"))
        for e, control in zip(some, made, strict=True)
    }
    assert len(contexts) > len(some) / 3


def test_an_irrelevant_context_needs_another_fact_whose_context_can_be_parted(
    pool: list[ConflictExample],
) -> None:
    first, same = (e for e in pool[:2])
    assert first.relation == same.relation
    assert [e.subject for e in irrelevant_contexts([first, same])] == [first.subject, same.subject]
    assert irrelevant_contexts([first]) == []
    joined = same.model_copy(update={"prompts": {**same.prompts, "substitution": "It is Rome, or"}})
    assert irrelevant_contexts([first, joined]) == []
    fewer = {t: prompt for t, prompt in same.prompts.items() if t != "coherent"}
    assert irrelevant_contexts([first, same.model_copy(update={"prompts": fewer})]) == []


def test_controls_that_come_with_an_example_are_taken(pool: list[ConflictExample]) -> None:
    controls = {"true": "Tirana is right. Who?", "irrelevant": "It rains. Who?"}
    given, other = pool[0].model_copy(update={"controls": controls}), pool[1]
    truth = true_contexts([given, other])
    assert truth[0].prompts == {
        "clean": given.prompts["clean"],
        "substitution": controls["true"],
    }
    assert truth[1:] == true_contexts([other])
    elsewhere = irrelevant_contexts([given, other, pool[-1]])
    assert elsewhere[0].prompts["substitution"] == controls["irrelevant"]
    assert elsewhere[1:] == irrelevant_contexts([other, pool[-1]])
    clean = {"clean": given.prompts["clean"]}
    alone = given.model_copy(update={"prompts": clean})
    for made, control in ((true_contexts, "true"), (irrelevant_contexts, "irrelevant")):
        assert [e.prompts for e in made([alone])] == [clean | {"substitution": controls[control]}]


def test_subjects_and_answers_are_found_where_words_have_no_spaces_between_them() -> None:
    """Kills: protection that vanishes in Chinese, and a name that is taken for its question."""
    asked, told = "法国的首都是", "法国的首都是东京。"
    e = ConflictExample(
        subject="法国",
        parametric_answer="巴黎",
        context_answer="东京",
        question=asked,
        prompts={"clean": asked, "substitution": told + asked},
    )
    (truth,), (nobody,) = true_contexts([e]), unknown_subjects([e], 0)
    assert truth.prompts["substitution"] == "法国的首都是巴黎。" + asked
    assert "法国" not in nobody.prompts["substitution"]
    assert nobody.prompts["substitution"].endswith(nobody.prompts["clean"])
    for whole in (asked, f"{asked}？"):
        assert unknown_subjects([e.model_copy(update={"subject": whole})], 0) == []
    framed = {"subject": "法国的首都是哪里", "question": "Question: 法国的首都是哪里? Answer:"}
    assert unknown_subjects([e.model_copy(update=framed)], 0) == []


def test_a_prompt_without_its_context_is_its_question(pool: list[ConflictExample]) -> None:
    e = pool[0]
    assert without_context(e, "substitution") == e.prompts["clean"]
    assert (
        without_context(e, "coherent")
        == e.prompts["coherent"][e.prompts["coherent"].index("Question:") :]
    )
    assert context_end(e, "coherent") == e.prompts["coherent"].index("Question:")
    given = e.model_copy(update={"question": "Say:", "prompts": {"substitution": "Told. Say:"}})
    assert without_context(given, "substitution") == "Say:"
    faq = {"substitution": "Question: Who sits there? In Oslo, all do. Where is Oslo? Say."}
    given = e.model_copy(update={"question": "Where is Oslo? Say.", "prompts": faq})
    assert without_context(given, "substitution") == "Where is Oslo? Say."
    asked = {"substitution": "Told. Question: Where is Oslo? Say."}
    given = given.model_copy(update={"prompts": asked})
    assert without_context(given, "substitution") == "Question: Where is Oslo? Say."
    asked = {"coherent": "Told. Question: Where is Oslo? Answer: Oslo is in"}
    given = given.model_copy(update={"question": "Oslo is in", "prompts": asked})
    assert without_context(given, "coherent") == "Question: Where is Oslo? Answer: Oslo is in"
    assert (
        context_end(e.model_copy(update={"prompts": {"substitution": "No seam"}}), "substitution")
        is None
    )
    asked = ("original", "cad", "ckplug", "grd", "juice")
    assert methods_for("parametric", asked) == ("original", "ckplug", "grd", "juice")
    assert methods_for("context", asked) == ("original", "cad", "ckplug", "juice")
