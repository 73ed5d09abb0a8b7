"""Coefficients that are learned: what they do, their bounds, and the head set they become."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

import juice
from juice.data.example import ConflictExample
from juice.errors import NoConsistentHeadError
from juice.head_set import HeadLists, HeadSet
from juice.identification import IdentificationOptions, learning
from juice.identification.learning import heads_of, learn
from juice.identification.protection import Protection
from juice.identification.recipe import find_head_sets
from juice.identification.validation import known_examples
from juice.methods import CONFLICTS
from tests.support.marks import FEW_EXAMPLES

pytestmark = FEW_EXAMPLES


@pytest.fixture(scope="module")
def facts(mini: juice.SteeredModel) -> list[ConflictExample]:
    return known_examples(mini, Random(3).sample(juice.read_examples("mini"), 50))


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "N_STEPS", 15)
    monkeypatch.setattr(learning, "N_BATCH", 8)


def test_a_learned_set_steers_with_a_beta_for_each_head_and_says_what_it_did(
    mini: juice.SteeredModel, facts: list[ConflictExample], tmp_path: Path
) -> None:
    """The gain is counted by `generate`, on facts that were neither learned from nor looked at."""
    drawn, validation, unseen = facts[:8], facts[8:20], facts[20:36]
    found = find_head_sets(
        mini,
        drawn,
        ["context"],
        IdentificationOptions(method="learned"),
        names={"context": "own"},
        validation=validation,
        methods=("juice", "june"),
    )["context"]
    found.save(tmp_path / "own")
    own = HeadSet.load(tmp_path / "own")
    betas = own.betas()
    assert betas.is_per_head
    assert len(betas.plus) == len(own.heads.plus)
    assert own.betas("june").is_per_head
    assert own.betas("june") != betas
    assert own.identification.method == "learned"
    assert own.identification.top_k is None
    assert own.scores.kind == "learned"
    for head, beta in zip(own.heads.plus, betas.plus, strict=True):
        assert own.scores.plus[0][head] == pytest.approx(beta)
    assert own.validation().gain > 0.1
    assert own.validation("june").accuracy.keys() == {"substitution", "coherent"}

    def share(steer: juice.Steer | str) -> float:
        hits = [
            e.context_answer[0] in completion.text
            for e in unseen
            for completion in mini.generate(
                [e.prompts[kind] for kind in CONFLICTS], steer=steer, max_tokens=6
            )
        ]
        return sum(hits) / len(hits)

    assert share(juice.Steer(target="context", head_set=own)) > share("none") + 0.15


def test_juice_identify_learns_from_its_own_examples_alone(
    mini: juice.SteeredModel, facts: list[ConflictExample]
) -> None:
    found, again = (
        juice.identify(mini, facts[:8], target="parametric", method="learned", n_examples=8)
        for _ in range(2)
    )
    assert found.model_dump() == again.model_dump()
    assert found.validation() is None
    assert found.betas().is_per_head


def test_coefficients_stay_within_their_bounds(
    mini: juice.SteeredModel, facts: list[ConflictExample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "LARGEST", 0.3)
    options = {"protection": Protection(), "penalty": 0.0}
    every = learn(mini, "context", facts[:8], facts[8:12], **options)
    assert 0.25 < every.abs().max() <= 0.3
    assert not ((every != 0) & (every.abs() < learning.SMALLEST)).any()
    among = HeadLists(plus=((3, 4),), minus=((5, 7), (3, 6)))
    few = learn(mini, "context", facts[:8], facts[8:12], among=among, **options)
    assert {tuple(head) for head in few.nonzero().tolist()} <= {(3, 4), (5, 7), (3, 6)}
    assert few[3, 4] >= 0
    assert few[5, 7] <= 0
    heads, betas = heads_of(few, among)
    assert heads is among
    assert (len(betas.plus), len(betas.minus)) == (1, 2)


def test_a_penalty_leaves_fewer_heads_and_one_that_leaves_none_is_an_error(
    mini: juice.SteeredModel, facts: list[ConflictExample]
) -> None:
    def n_heads(penalty: float) -> int:
        options = {"protection": Protection(kinds=()), "penalty": penalty}
        return int(learn(mini, "context", facts[:8], facts[8:12], **options).count_nonzero())

    assert 0 < n_heads(0.5) < n_heads(0.0)
    with pytest.raises(NoConsistentHeadError, match="--penalty"):
        heads_of(torch.zeros(6, 8))


def test_the_strongest_head_comes_first() -> None:
    table = torch.tensor([[0.0, 0.5, -0.2], [1.5, -3.0, 0.0]])
    heads, betas = heads_of(table)
    assert heads.plus == ((1, 0), (0, 1))
    assert heads.minus == ((1, 1), (0, 2))
    assert betas.plus == (1.5, 0.5)
    assert betas.minus == (-3.0, pytest.approx(-0.2))
