"""What steering costs elsewhere: answers where it is not needed, and plain text."""

from __future__ import annotations

import pytest
import torch

import juice
from juice.data.example import ConflictExample, unknown_subjects
from juice.data.judging import contains_answer
from juice.engine.load_options import Limits
from juice.evaluation import side_effects
from juice.evaluation.methods import Treatment
from juice.evaluation.splits import domain_of
from tests.support import oracle


def test_collateral_counts_right_answers_where_steering_is_not_needed(
    model: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    head_set = model.head_sets.get("parametric")
    steer = juice.Steer(target="parametric", head_set=head_set)
    examples = pool[4:10]
    measured = side_effects.collateral(
        model,
        examples,
        {domain_of(e): Treatment(target="parametric", steer=steer) for e in examples},
        3,
    )
    nobody = unknown_subjects(examples, 3)
    right = [
        contains_answer(
            model.generate(e.prompts["substitution"], steer="parametric", max_tokens=15)[0].text,
            e.context_answer,
        )
        for e in nobody
    ]
    assert measured["unknown_subject"]["substitution"]["accuracy"] == pytest.approx(
        sum(right) / len(right)
    )
    assert measured["clean"]["clean"]["n"] == 6


def test_contexts_about_another_subject_are_judged_by_memory(
    model: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    """The next fact's context before each question: as the example has it, and made true."""
    examples = pool[4:12]
    treatment = {"world_capital": Treatment(target="context", steer=juice.Steer(target="context"))}
    measured = side_effects.collateral(model, examples, treatment, 0)
    for control, is_true in (("irrelevant_context", False), ("irrelevant_truth", True)):
        right = []
        for i, e in enumerate(examples):
            other = examples[(i + 1) % len(examples)]
            told = other.prompts["substitution"].removesuffix(other.prompts["clean"])
            assert told.count(other.context_answer[0]) == 1
            if is_true:
                told = told.replace(other.context_answer[0], other.parametric_answer[0])
            prompt = told + e.prompts["clean"]
            text = model.generate(prompt, steer="context", max_tokens=15)[0].text
            right.append(contains_answer(text, e.parametric_answer))
        found = measured[control]["substitution"]
        assert (found["n"], found["accuracy"]) == (8, pytest.approx(sum(right) / 8))


def test_perplexity_of_plain_text_is_that_of_the_steered_model(model: juice.SteeredModel) -> None:
    text = "The capital of Peru is Lima. The official language of Peru is Spanish."
    ids = list(model.tokenize(text))
    steer = juice.Steer(target="parametric", beta_plus=1.0, beta_minus=-2.0)
    treatment = Treatment(target="parametric", steer=steer)
    signs = model.head_sets.get("parametric").heads
    heads = {tuple(h): 1.0 for h in signs.plus} | {tuple(h): -2.0 for h in signs.minus}
    logprobs = oracle.steered_logits(model.loaded.model, ids, heads).log_softmax(-1)
    expected = torch.exp(-logprobs[torch.arange(len(ids) - 1), ids[1:]].mean())
    assert side_effects.plain_text_perplexity(model, [text], {"a": treatment}) == pytest.approx(
        float(expected), rel=1e-4
    )
    assert side_effects.plain_text_perplexity(model, ["word " * 1200], {"a": treatment}) is None


def test_plain_text_beyond_the_engines_limit_is_left_out() -> None:
    """Kills: an evaluation that ends with an error, as text fits the model and not its engine."""
    none = {"a": Treatment(target="context", steer=juice.Steer(target="none"))}
    text = "Lima lies by the sea. " * 4
    with juice.load("mini", limits=Limits(max_model_len=20)) as model:
        alone = side_effects.plain_text_perplexity(model, ["Lima lies by the sea."], none)
        assert len(model.tokenize(text)) > 20
        assert side_effects.plain_text_perplexity(model, [text], none) is None
        both = side_effects.plain_text_perplexity(model, ["Lima lies by the sea.", text], none)
        assert both == pytest.approx(alone)
