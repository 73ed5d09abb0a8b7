"""Coefficients that are learned: what they do, their bounds, and the head set they become."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

import juice
from juice.data.example import ConflictExample
from juice.errors import NoConsistentHeadError
from juice.formula import CONFLICTS
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import HeadLists
from juice.identification import learned as learning
from juice.identification.examples import known_examples
from juice.identification.find import find
from juice.identification.learned import heads_of, learn
from juice.identification.options import IdentificationOptions
from juice.identification.task import Task
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
    options = IdentificationOptions(
        target="context", name="own", method="learned", n_examples=len(drawn), june=True
    )
    found = find(mini, drawn, options, validation=validation).head_sets["context"]
    found.save(tmp_path / "own")
    learned = HeadSet.load(tmp_path / "own")
    betas = learned.betas()
    assert betas.is_per_head
    assert len(betas.plus) == len(learned.heads.plus)
    assert learned.betas("june").is_per_head
    assert learned.betas("june") != betas
    assert learned.identification.method == "learned"
    assert learned.identification.top_k is None
    assert learned.scores.kind == "learned"
    for head, beta in zip(learned.heads.plus, betas.plus, strict=True):
        assert learned.scores.plus[0][head] == pytest.approx(beta)
    assert learned.validation().gain > 0.1
    assert learned.validation("june").accuracy.keys() == {"substitution", "coherent"}

    def share(steer: juice.Steer | str) -> float:
        hits = [
            e.context_answer[0] in completion.text
            for e in unseen
            for completion in mini.generate(
                [e.prompts[kind] for kind in CONFLICTS], steer=steer, max_tokens=6
            )
        ]
        return sum(hits) / len(hits)

    assert share(juice.Steer(target="context", head_set=learned)) > share("none") + 0.15


@pytest.mark.filterwarnings("ignore:what 'parametric' does is not measured")
def test_a_set_is_learned_from_its_own_examples_where_there_are_no_others(
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
    task = Task(model=mini, target="context", options=IdentificationOptions(penalty=0.0))
    every = learn(task, facts[:8], facts[8:12])
    task.unfinished.remove()  # else the second would go on from the first
    assert 0.25 < every.abs().max() <= 0.3
    assert not ((every != 0) & (every.abs() < learning.SMALLEST)).any()
    among = HeadLists(plus=((3, 4),), minus=((5, 7), (3, 6)))
    few = learn(task, facts[:8], facts[8:12], among=among)
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
        options = IdentificationOptions(protect=(), penalty=penalty)
        task = Task(model=mini, target="context", options=options)
        return int(learn(task, facts[:8], facts[8:12]).count_nonzero())

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
