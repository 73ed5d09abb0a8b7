"""Rows for fine-tuning that need their context: measured by the answer's perplexity without it."""

from __future__ import annotations

import math

import pytest
import torch

import juice
from juice.data.critical import mark_critical
from juice.errors import ExampleError, UsageError
from juice.steered_model import SteeredModel
from tests.support import tiny
from tests.support.user_data import finetuning, rows

RELATIVE = 1e-4  # fp32 log-probabilities, exponentiated


@torch.no_grad()
def slow_perplexity(model: SteeredModel, question: str, answer: str) -> float:
    """Return an answer's perplexity by one plain forward per token."""
    ids = model.loaded.tokenizer(f"{question} {answer}")["input_ids"]
    start = len(model.loaded.tokenizer(question)["input_ids"])
    losses = []
    for i in range(start, len(ids)):
        logits = (
            model.loaded.model(input_ids=torch.tensor([ids[:i]], device=model.loaded.device))
            .logits[0, -1]
            .double()
        )
        losses.append(-logits.log_softmax(-1)[ids[i]].item())
    return math.exp(sum(losses) / len(losses))


def test_the_perplexity_of_an_answer_equals_plain_forwards() -> None:
    model = juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())
    data = finetuning("Lima", "a b", "Ciudad de Lima", "x", "1969")
    marked = mark_critical(model, data, share=0.4)
    for row in marked.rows:
        assert row["perplexity_without_context"] == pytest.approx(
            slow_perplexity(model, row["question"], row["answer"]), rel=RELATIVE
        )
    ranked = sorted(marked.rows, key=lambda row: row["perplexity_without_context"])
    assert [row["context_critical"] for row in ranked] == [False, False, True, True, True]
    assert marked.threshold == ranked[2]["perplexity_without_context"]


def test_a_model_needs_the_context_for_what_it_would_not_answer_itself(mini: SteeredModel) -> None:
    answers = {"Peru": "Lima", "Japan": "Tokyo", "Chad": "Oslo", "Fiji": "Rome"}
    data = rows(
        *(
            {"instruction": f"The name of the capital city of {s} is", "input": "c", "output": a}
            for s, a in answers.items()
        )
    )
    assert [row["output"] for row in mark_critical(mini, data, share=0.5).critical] == [
        "Oslo",
        "Rome",
    ]


def test_rows_that_cannot_be_measured_are_kept_outside_the_share(mini: SteeredModel) -> None:
    odd = [
        {"question": "q", "context": "", "answer": "a"},
        {"question": "q", "context": "c", "answer": ""},
    ]
    odd += [{"question": "q", "context": "c", "answer": "a " * 1200}]
    data = [*rows(*odd), *finetuning("Lima", "Oslo", "Rome")]
    marked = mark_critical(mini, data, share=0.5)
    assert marked.unmeasured == {"without_context": 1, "malformed": 1, "too_long": 1}
    assert [
        (row["perplexity_without_context"], row["context_critical"]) for row in marked.rows[:3]
    ] == [(None, False)] * 3
    assert len(marked.critical) == 2
    with pytest.raises(ExampleError, match="none of 3 rows can be measured: 1 have no context"):
        mark_critical(mini, rows(*odd))


@pytest.mark.parametrize(
    ("share", "n", "n_low"), [(0.25, 3, 0), (0.25, 4, 1), (0.25, 7, 1), (0.29, 100, 29)]
)
def test_the_share_is_rounded_down_and_ties_go_by_order(share: float, n: int, n_low: int) -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    same = rows(*[{"question": "q", "context": "c", "answer": "a"}] * n)
    assert [row["context_critical"] for row in mark_critical(model, same, share=share).rows] == [
        False
    ] * n_low + [True] * (n - n_low)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, math.nan])
def test_a_share_of_none_or_all_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match="share"):
        mark_critical(None, [], share=share)
