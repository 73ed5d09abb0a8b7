"""The metrics of an evaluation, against libraries that have the same ones, and by hand."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, jaccard_score, log_loss

from juice.data.critical import perplexity
from juice.data.example import ConflictExample
from juice.evaluation.answers import Answer, context_reliance, overlap, repetition
from juice.evaluation.results import by_popularity, table


def test_accuracy_is_scikit_learns() -> None:
    rng = Random(0)
    right = [rng.random() < 0.7 for _ in range(200)]
    answers = [Answer("text", r, 0.2, 0.3) for r in right]
    made = table([example(f"s{i}", "one") for i in range(200)], {"clean": answers})
    assert made["one"]["clean"]["accuracy"] == pytest.approx(
        accuracy_score([True] * 200, right), abs=1e-12
    )


def test_overlap_is_scikit_learns_jaccard_score() -> None:
    rng = Random(1)
    for _ in range(20):
        a, b = rng.sample(range(30), 7), rng.sample(range(30), 5)
        labels = np.array([[i in a, i in b] for i in range(30)])
        assert overlap(a, b) == pytest.approx(jaccard_score(labels[:, 0], labels[:, 1]))
    assert overlap([], []) is None
    assert overlap([1], []) == 0


def test_perplexity_is_the_exponential_of_scikit_learns_log_loss() -> None:
    rng = np.random.default_rng(2)
    p = rng.dirichlet(np.ones(6), size=40)
    tokens = rng.integers(0, 6, size=40)
    logprobs = [math.log(p[i, token]) for i, token in enumerate(tokens)]
    assert perplexity(logprobs) == pytest.approx(math.exp(log_loss(tokens, p, labels=range(6))))
    with pytest.raises(ValueError, match="no tokens"):
        perplexity([])


def test_the_interval_of_an_average_over_domains_is_around_it() -> None:
    examples = [
        *(example(f"s{i}", "large") for i in range(100)),
        *(example(f"t{i}", "small") for i in range(5)),
    ]
    answers = [
        Answer("", is_correct=i >= 98, p_parametric=None, p_context=None) for i in range(105)
    ]
    average = table(examples, {"clean": answers})["average"]["clean"]
    assert average["accuracy"] == pytest.approx((0.02 + 1) / 2)
    low, high = average["interval"]
    assert low < average["accuracy"] < high
    assert high - low > 0.3  # of five facts it says little, however many the other domain has


def test_repetition_counts_what_came_before() -> None:
    assert repetition([1, 2, 3, 4, 5]) == 0
    assert repetition([1, 2, 3, 1, 2, 3]) == pytest.approx(1 / 4)  # 123 231 312 123
    assert repetition([7] * 10) == pytest.approx(7 / 8)
    assert repetition([1, 2]) == 0


def test_context_reliance_is_the_contexts_share() -> None:
    assert context_reliance(0.3, 0.1) == pytest.approx(0.75)
    assert context_reliance(0.0, 0.0) is None


def example(subject: str, relation: str, popularity: float | None = None) -> ConflictExample:
    prompts = {"clean": f"{subject} is", "substitution": f"{subject} is b. {subject} is"}
    return ConflictExample(
        subject=subject,
        relation=relation,
        parametric_answer="a",
        context_answer="b",
        prompts=prompts,
        popularity=popularity,
    )


def test_a_table_averages_over_domains_not_over_facts() -> None:
    examples = [example("s", "one"), example("t", "one"), example("u", "one"), example("v", "two")]
    right, wrong = (
        Answer("a", is_correct=True, p_parametric=0.8, p_context=0.2),
        Answer("b", False, 0.1, 0.3),
    )
    made = table(
        examples,
        {"clean": [right, right, wrong, wrong], "substitution": [None, right, wrong, right]},
    )
    assert made["one"]["clean"]["accuracy"] == pytest.approx(2 / 3)
    assert made["two"]["clean"]["accuracy"] == 0
    assert made["average"]["clean"]["accuracy"] == pytest.approx(1 / 3)  # not 2 of 4
    assert made["average"]["clean"]["n"] == 4
    assert made["one"]["substitution"]["n"] == 2
    assert made["two"]["substitution"]["context_reliance"] == pytest.approx(0.2)
    assert made["average"]["substitution"]["p_context"] == pytest.approx((0.25 + 0.2) / 2)


def test_accuracy_by_popularity_has_terciles_least_popular_first() -> None:
    examples = [
        example(f"s{i}", "one", popularity=float(p)) for i, p in enumerate([50, 1, 3, 2, 40, 60])
    ]
    answers = [
        Answer("", is_correct=p > 30, p_parametric=None, p_context=None)
        for p in (50, 1, 3, 2, 40, 60)
    ]
    bins = by_popularity([*examples, example("nobody", "one")], {"clean": [*answers, None]})
    assert [(b["from"], b["to"], b["n"]) for b in bins] == [(1, 2, 2), (3, 40, 2), (50, 60, 2)]
    assert [b["cells"]["clean"]["accuracy"] for b in bins] == [0, 0.5, 1]
    assert by_popularity([example("s", "one")], {"clean": [None]}) is None
