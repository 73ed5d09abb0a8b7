"""Prompts that steering should leave alone, made from the user's own examples."""

from __future__ import annotations

import pytest

import juice
from juice.data.example import ConflictExample
from juice.errors import UsageError
from juice.identification.first_tokens import endangered_prompts, protected_prompts
from juice.identification.options import IdentificationOptions
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
    assert protected_prompts(model, "parametric", elsewhere, BOTH) == {}
    assert protected_prompts(model, "context", elsewhere, BOTH) == {}


@pytest.mark.parametrize("wrong", [{"protect": ("everything",)}, {"accepted_loss": 2.0}])
def test_protection_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"protect.*everything|accepted_loss is 2\.0"):
        IdentificationOptions.of(**wrong)
