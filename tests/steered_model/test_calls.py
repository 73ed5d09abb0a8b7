"""The calls of a SteeredModel: their options, what a list means, what a notebook shows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack, get_type_hints

import numpy as np
import pytest
import torch

import juice
from juice.engine.request import GenerationOptions, OptionFields, Request
from juice.errors import RequestError
from juice.steered_model import SteeredModel

TEXTS = ["The name of the capital city of Peru is", "The capital of France is"]
CALLS = ("generate", "agenerate", "stream", "astream", "next_token", "request")


@pytest.fixture(scope="module")
def model() -> Iterator[SteeredModel]:
    with juice.load("mini", head_sets="head_sets") as running:
        yield running


@pytest.mark.parametrize("name", CALLS)
def test_every_call_takes_the_options_and_each_of_their_fields(name: str) -> None:
    parameters = inspect.signature(getattr(SteeredModel, name)).parameters
    assert parameters["options"].default is None
    assert get_type_hints(getattr(SteeredModel, name))["fields"] == Unpack[OptionFields]
    named = [
        parameter
        for parameter in parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    assert all(each.default is not inspect.Parameter.empty for each in named)


def test_editors_know_every_option() -> None:
    """Kills: an option that a call takes and its type does not show, or the other way round."""
    assert get_type_hints(OptionFields).keys() == GenerationOptions.model_fields.keys()
    assert all(model_field.description for model_field in GenerationOptions.model_fields.values())


def test_options_and_fields_give_the_same_and_fields_win(model: SteeredModel) -> None:
    given = GenerationOptions(max_tokens=3, steer="context", strength=0.5)
    one, other = model.generate(TEXTS[0], given), model.generate(TEXTS[0], **dict(given))
    assert one[0].token_ids == other[0].token_ids
    assert one[0].steering == other[0].steering
    each = model.generate(TEXTS, [given, GenerationOptions(max_tokens=2)], ignore_eos=True)
    assert [len(c.token_ids) for c in each] == [3, 2]
    longer = model.generate(TEXTS[0], given, max_tokens=5, ignore_eos=True)
    assert len(longer[0].token_ids) == 5
    assert longer[0].steering.strength == 0.5


def test_a_list_is_one_value_a_prompt(model: SteeredModel) -> None:
    texts = TEXTS
    both = model.generate(texts, max_tokens=[2, 5], ignore_eos=True)
    assert [len(c.token_ids) for c in both] == [2, 5]
    free = [model.generate(text, max_tokens=20, ignore_eos=True)[0] for text in texts]
    stops = [(free[0].text[3], free[0].text[5]), " of "]  # a space comes earlier
    stopped = model.generate(texts, max_tokens=20, ignore_eos=True, stop=stops)
    ends = [min(free[0].text.index(part) for part in stops[0]), free[1].text.index(stops[1])]
    for each, alone, end in zip(stopped, free, ends, strict=True):
        assert (each.text, each.finish_reason) == (alone.text[:end], "stop")


def test_a_tuple_of_stop_strings_holds_for_every_prompt(model: SteeredModel) -> None:
    texts = TEXTS
    free = [c.text for c in model.generate(texts, max_tokens=20, ignore_eos=True)]
    stop = (free[0][4], free[1][4])
    for each, alone in zip(
        model.generate(texts, max_tokens=20, ignore_eos=True, stop=stop), free, strict=True
    ):
        end = min(at for part in stop if (at := alone.find(part)) >= 0)
        assert each.text == alone[:end]


@pytest.mark.parametrize("stop", [["\n"], ["\n", "."], ["a", "b", "c"]])
def test_a_list_of_another_length_is_refused_with_what_to_write(
    stop: list[str], model: SteeredModel
) -> None:
    texts = ["ab", "cd"] if len(stop) != 2 else ["ab"]
    with pytest.raises(RequestError, match=r"stop lists \d values .* are a tuple"):
        model.generate(texts, stop=stop)
    with pytest.raises(RequestError, match="several stop strings as a tuple"):
        model.request("ab", stop=stop)


def test_tokens_may_be_any_whole_numbers(model: SteeredModel) -> None:
    ids = list(model.tokenize(TEXTS[0]))
    for given in (np.array(ids), torch.tensor(ids), [np.int64(i) for i in ids], tuple(ids)):
        (one,) = model.requests(given)
        assert one.prompt_ids == model.request(given).prompt_ids == tuple(ids)
        assert {*map(type, one.prompt_ids)} == {int}
    for several in (np.array([ids, ids]), torch.tensor([ids, ids]), [np.array(ids), ids]):
        assert [each.prompt_ids for each in model.requests(several)] == [tuple(ids)] * 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([["a", "b"]], "prompt holds 'a' among its tokens; expected whole numbers, as `tokenize`"),
        ([1, None], "prompt holds None among"),
        ([[1, 1.5]], "prompt holds 1.5 among"),
        ([1.5], "prompt is 1.5; expected a text, or a list of whole numbers, its tokens"),
        ([True, False], "prompt holds True among"),
        (np.array([[1.0]]), "prompt holds 1.0 among"),
        (torch.tensor([True]), "prompt holds True among"),
        ([None], "prompt is None; expected a text"),
        (5, "prompt is 5; expected a text"),
        (torch.tensor(5), "prompt is 5; expected a text"),
        (None, "prompt is None; expected a text"),
    ],
    ids=repr,
)
def test_tokens_that_are_no_whole_numbers_are_refused_in_words(
    model: SteeredModel, given: Any, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        model.generate(given, max_tokens=1)
    assert caught.value.param == "prompt"


def test_an_engine_refuses_tokens_that_are_no_whole_numbers(model: SteeredModel) -> None:
    for ids in (("a",), (1, None), (1, 1.5)):
        with pytest.raises(RequestError, match="expected whole numbers"):
            model.engine.generate([Request(prompt_ids=ids)])


@pytest.mark.parametrize("at", [-5, 10**6])
def test_a_question_that_begins_outside_the_prompt_is_refused(model: SteeredModel, at: int) -> None:
    with pytest.raises(RequestError, match=f"question_at is {at}, and the prompt has") as caught:
        model.request(
            TEXTS[0], steer=juice.Steer(target="parametric", positions="question"), question_at=at
        )
    assert caught.value.param == "question_at"


@pytest.mark.parametrize("call", ["generate", "stream", "request"])
def test_a_misspelt_option_is_a_type_error(call: str, model: SteeredModel) -> None:
    with pytest.raises(TypeError, match="temprature"):
        getattr(model, call)("x", temprature=1)


def test_prompts_and_prompt_may_be_named(model: SteeredModel) -> None:
    assert model.generate(prompts="ab", max_tokens=1)[0].token_ids
    assert list(model.stream(prompt=TEXTS[0], max_tokens=3))


def test_progress_counts_the_prompts_that_are_done(model: SteeredModel) -> None:
    seen: list[tuple[str, int]] = []

    @contextmanager
    def progress(description: str, total: int) -> Iterator:
        seen.append((description, total))
        yield lambda n: seen.append(("advance", n))

    model.generate(["a", "b", "c"], max_tokens=1, progress=progress)
    assert seen == [("generating", 3), *[("advance", 1)] * 3]


def test_answers_are_scored_where_they_continue_their_prompts(model: SteeredModel) -> None:
    scores = model.answer_logprobs([("Q", "abc"), ("Q", ""), ("x " * 600, "y")])
    request = model.request("Q abc", max_tokens=0, prompt_logprobs=True)
    scored = model.engine.generate([request])[0].prompt_tokens
    start = len(model.tokenize("Q"))
    assert scores[0] == pytest.approx([t.logprob for t in scored[start:]], abs=1e-5)
    assert scores[1:] == [(), None]


def test_a_notebook_shows_models_sets_and_completions(model: SteeredModel) -> None:
    about = model.description
    assert repr(model) == (
        f"<SteeredModel 'mini': {about.identity.architecture}, {about.n_layers} layers of "
        f"{about.identity.n_heads} heads, float32 on cpu; head sets: context, parametric>"
    )
    head_set = model.head_sets.get("parametric")
    assert repr(head_set).startswith("<HeadSet 'parametric' toward parametric for mini: ")
    plain, steered = model.generate(
        [TEXTS[0]] * 2, steer=["none", "parametric"], strength=[None, 0.5], max_tokens=2
    )
    assert repr(plain) == f"<Completion {plain.text!r}: unsteered; 2 tokens, length>"
    betas = head_set.betas()
    assert betas is not None
    assert repr(steered) == (
        f"<Completion {steered.text!r}: juice toward parametric with parametric "
        f"({betas.plus:+g} {betas.minus:+g}, strength 0.5); 2 tokens, length>"
    )


def test_the_package_lists_its_public_names() -> None:
    assert set(juice.__all__) <= set(dir(juice))
