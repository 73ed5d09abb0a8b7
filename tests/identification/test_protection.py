"""Prompts that steering should leave alone, made from the user's own examples."""

from __future__ import annotations

import warnings

import pytest

import juice
from juice.data.example import ConflictExample
from juice.errors import UsageError
from juice.formula import Target
from juice.identification.first_tokens import (
    conflict_prompts,
    endangered_prompts,
    protected_prompts,
)
from juice.identification.options import PROTECTED, IdentificationOptions
from tests.support import tiny
from tests.support.conflicts import examples

BOTH = ("unknown", "clean")


@pytest.fixture(scope="module")
def model() -> juice.SteeredModel:
    return juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())


def test_toward_memory_the_context_must_still_teach_what_is_new(
    model: juice.SteeredModel,
) -> None:
    """The subjects are swapped for invented ones; the answer is then the context's."""
    made = protected_prompts(model, "parametric", examples(), BOTH)
    assert list(made) == ["unknown", "clean"]
    prompts = endangered_prompts("parametric", examples())["unknown"]
    for example, endangered, (ids, token), kind in zip(
        examples(), prompts, made["unknown"], ["substitution", "coherent"] * 2, strict=True
    ):
        around = example.prompts[kind].split(example.subject)
        assert len(around) > 1
        assert example.subject not in endangered.prompt
        name = endangered.prompt[
            len(around[0]) : endangered.prompt.index(around[1], len(around[0]))
        ]
        assert name.istitle()
        assert endangered.prompt == name.join(around)
        assert endangered.alone is None or endangered.prompt.endswith(endangered.alone)
        assert endangered.answer == "context"
        assert endangered.example.answer("context") == example.answer("context")
        assert ids == model.tokenize(endangered.prompt)
        assert token == model.first_token(endangered.prompt, example.answer("context"))


def test_toward_the_context_prompts_without_one_must_still_be_answered(
    model: juice.SteeredModel,
) -> None:
    made = protected_prompts(model, "context", examples(), BOTH)
    assert list(made) == ["clean"]
    assert made["clean"] == [
        (
            model.tokenize(e.prompts["clean"]),
            model.first_token(e.prompts["clean"], e.answer("parametric")),
        )
        for e in examples()
    ]


@pytest.mark.parametrize("target", ["parametric", "context"])
def test_answers_that_begin_alike_are_asked_for_where_they_part(
    model: juice.SteeredModel, target: Target
) -> None:
    """Kills: a first token that both answers have, which teaches nothing."""
    years = examples()[0].model_copy(
        update={"parametric_answer": ("1987",), "context_answer": ("1912",)}
    )
    asked = {
        **conflict_prompts(model, target, [years]),
        **protected_prompts(model, "parametric", [years, *examples()[1:]], ("clean",)),
    }
    right = {"parametric": "8", "context": "1"}
    for kind, prompts in asked.items():
        ids, token = prompts[0]
        assert ids == model.tokenize(f"{years.prompts[kind]} 19")
        expected = right["parametric" if kind == "clean" else target]
        assert model.description.tokenizer.decode([token]) == expected


def test_what_is_not_asked_for_or_cannot_be_made_is_left_out(model: juice.SteeredModel) -> None:
    assert list(protected_prompts(model, "parametric", examples(), ("clean",))) == ["clean"]
    assert protected_prompts(model, "context", examples(), ("unknown",)) == {}
    assert protected_prompts(model, "context", examples(), ()) == {}
    elsewhere = [
        ConflictExample(
            subject="a subject that the prompt does not name",
            parametric_answer="x",
            context_answer="y",
            prompts={"substitution": "what is it?"},
        )
    ]
    assert protected_prompts(model, "context", elsewhere, ("unknown",)) == {}
    both = "parametric from breaking unknown prompts: no example.*; clean prompts: no example has"
    with pytest.warns(UserWarning, match=both):
        assert protected_prompts(model, "parametric", elsewhere, BOTH) == {}
    three = "context from breaking clean prompts: .*; true prompts: .*; irrelevant prompts: no"
    with pytest.warns(UserWarning, match=three):
        assert protected_prompts(model, "context", elsewhere, PROTECTED) == {}
    trap = [e.model_copy(update={"subject": e.prompts["substitution"]}) for e in elsewhere]
    assert protected_prompts(model, "parametric", trap, PROTECTED) == {}


def test_a_kind_that_cannot_be_protected_is_said_once(model: juice.SteeredModel) -> None:
    """Kills: a warning from each search and each lesson."""
    nameless = [e.model_copy(update={"subject": "Atlantis"}) for e in examples()]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for some in (nameless, nameless[1:]):
            assert list(protected_prompts(model, "parametric", some, BOTH)) == ["clean"]
    assert len(said) == 1


@pytest.mark.parametrize("wrong", [{"protect": ("everything",)}, {"accepted_loss": 2.0}])
def test_protection_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"protect.*everything|accepted_loss is 2\.0"):
        IdentificationOptions.of(**wrong)
