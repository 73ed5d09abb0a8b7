"""Which examples can find heads, and those that are left out."""

from __future__ import annotations

import pytest
from tokenizers import normalizers, pre_tokenizers

import juice
from juice.errors import ExampleError
from juice.identification.examples import scored_prompt, usable_examples
from juice.identification.options import IdentificationOptions
from tests.support import tiny
from tests.support.conflicts import examples


def test_examples_that_cannot_be_scored_are_skipped_and_counted() -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    pool = examples()
    same_start = pool[0].model_copy(update={"context_answer": ("Paris, as ever",)})
    with pytest.warns(UserWarning, match="1 examples cannot be scored"):
        drawn, rest = usable_examples(
            model, [same_start, *pool], IdentificationOptions(method="probe", n_examples=4)
        )
    assert drawn == pool
    assert rest == [], "it is about a fact that was drawn"
    with (
        pytest.warns(UserWarning, match="not drawn"),
        pytest.raises(ExampleError, match="5 examples were requested, 4 can be used"),
    ):
        usable_examples(
            model, [same_start, *pool], IdentificationOptions(method="probe", n_examples=5)
        )


def test_answers_that_begin_alike_are_drawn_where_the_others_are_too_few() -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    pool = examples()
    years = pool[0].model_copy(update={"parametric_answer": ("1987",), "context_answer": ("1912",)})
    for n, expected in ((4, pool), (5, [years, *pool])):
        drawn, _ = usable_examples(
            model, [years, *pool], IdentificationOptions(method="probe", n_examples=n)
        )
        assert drawn == expected


def test_an_answer_without_tokens_of_its_own_cannot_be_scored() -> None:
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tokenizer)
    nothing = examples()[0].model_copy(update={"context_answer": ("~~",)})
    with pytest.raises(ExampleError, match=r"context answer '~~' has no tokens"):
        scored_prompt(model, nothing, "clean")


def test_an_example_without_a_prompt_that_others_have_is_not_drawn() -> None:
    """Otherwise one such example would silently drop a conflict type from the filter."""
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    pool = examples()
    partial = pool[0].model_copy(update={"prompts": {"clean": pool[0].prompts["clean"]}})
    with pytest.warns(UserWarning, match="no coherent and no substitution prompt"):
        drawn, _ = usable_examples(
            model, [partial, *pool[1:]], IdentificationOptions(method="probe", n_examples=3)
        )
    assert drawn == pool[1:]
    with pytest.raises(ExampleError, match="no conflict for the parametric target"):
        juice.identify(model, [partial], target="parametric", method="probe", n_examples=1)
