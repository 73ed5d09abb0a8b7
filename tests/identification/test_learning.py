"""Coefficients that are learned: what they do, their bounds, their line, and their head set."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch

import juice
from juice.errors import ExampleError, NoConsistentHeadError
from juice.formula import CONFLICTS
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Point
from juice.identification import learned as learning
from juice.identification import lessons, ordinary
from juice.identification.examples import known_examples
from juice.identification.find import find
from juice.identification.learned import (
    Learned,
    Reached,
    heads_of,
    learn,
    looked_at,
    responses_of,
)
from juice.identification.options import IdentificationOptions
from juice.identification.ordinary import ordinary_pieces
from juice.identification.task import Task, Unfinished
from tests.support import oracle, tiny
from tests.support.conflicts import conflicts
from tests.support.marks import FEW_EXAMPLES

pytestmark = FEW_EXAMPLES
ANYTHING = 1000.0  # nats a token


@pytest.fixture(scope="module")
def tiny_one() -> juice.SteeredModel:
    return juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())


@pytest.fixture(autouse=True)
def _few_steps(few_stages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "FIRST_WEIGHT", 3.0)
    monkeypatch.setattr(learning, "ALIKE", -10.0)  # nothing narrower is as good


def learned(
    model: juice.SteeredModel,
    *,
    method: str = "june",
    start: Reached | None = None,
    unfinished: Unfinished | None = None,
    **options: object,
) -> Learned:
    # A random model gains little, so nothing is protected.
    how = IdentificationOptions(**{"protect": (), **options})
    given = {"examples": conflicts(), "validation": conflicts(), "options": how}
    given["unfinished"] = unfinished or begun(model)
    task = Task(model=model, target="context", **given)
    return learn(task, looked_at(task), method=method, start=start)


def begun(model: juice.SteeredModel) -> Unfinished:
    """Return results with how text responds: the same however coefficients are learned."""
    return deepcopy(_begun(model))


@cache
def _begun(model: juice.SteeredModel) -> Unfinished:
    task = Task(model=model, target="context", options=IdentificationOptions(protect=()))
    responses_of(task)
    return task.unfinished


def test_a_learned_set_steers_with_a_beta_for_each_head_and_says_what_it_did(
    mini: juice.SteeredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gain is counted by `generate`, on facts that were neither learned from nor looked at."""
    monkeypatch.setattr(ordinary, "N_RESPONSES", 32)
    monkeypatch.setattr(lessons, "N_OPEN", 8)
    monkeypatch.setattr(lessons, "N_CONFLICTS", 4)
    monkeypatch.setattr(lessons, "N_PROTECTED", 2)
    facts = known_examples(mini, Random(3).sample(juice.read_examples("mini"), 30))
    drawn, validation, unseen = facts[:8], facts[8:14], facts[14:26]
    options = IdentificationOptions(
        target="context",
        name="own",
        method="learned",
        n_examples=len(drawn),
        june=True,
        max_divergence=0.1,
    )
    found = find(mini, drawn, options, validation=validation).head_sets["context"]
    found.save(tmp_path / "own")
    learned = HeadSet.load(tmp_path / "own")
    assert learned.identification.method == "learned"
    assert learned.identification.top_k is None
    assert learned.scores.kind == "learned"
    heads, betas = learned.heads, learned.betas()
    for sign, of_sign in ((1, heads.plus), (-1, heads.minus)):
        scores = learned.scores.plus if sign > 0 else learned.scores.minus
        given = betas.plus if sign > 0 else betas.minus
        assert len(given) == len(of_sign) == int(scores[0].count_nonzero())
        for head, beta in zip(of_sign, given, strict=True):
            assert scores[0][head] == pytest.approx(sign * beta)
    for method in ("juice", "june"):
        measured = learned.validation(method)
        assert learned.betas(method).is_per_head
        assert measured.accuracy.keys() == {"substitution", "coherent"}
        assert measured.allowed == options.max_divergence
        assert list(measured.harm) == ["0.5", "1", "2"]
        nats = [harm.divergence for harm in measured.harm.values()]
        assert nats == sorted(nats)
    assert learned.betas("june") != learned.betas("juice")
    assert learned.validation().gain > 0.1

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


def test_learning_needs_examples_that_it_does_not_learn_from(tiny_one: juice.SteeredModel) -> None:
    with pytest.raises(ExampleError, match="--validation"):
        juice.identify(tiny_one, conflicts(), target="parametric", method="learned", n_examples=4)


def test_coefficients_stay_within_their_bounds(
    tiny_one: juice.SteeredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "LARGEST", 0.3)
    found = learned(tiny_one, penalty=0.0, max_divergence=ANYTHING).best.coefficients
    assert 0.2 < found.abs().max() <= 0.3
    assert not ((found != 0) & (found.abs() < learning.SMALLEST)).any()


def test_a_penalty_leaves_fewer_heads_and_one_that_leaves_none_is_an_error(
    tiny_one: juice.SteeredModel,
) -> None:
    def n_heads(penalty: float) -> int:
        found = learned(tiny_one, penalty=penalty, max_divergence=ANYTHING)
        return int(found.best.coefficients.count_nonzero())

    assert 0 < n_heads(0.05) < n_heads(0.0)
    with pytest.raises(NoConsistentHeadError, match="--max-divergence"):
        n_heads(1e6)
    with pytest.raises(NoConsistentHeadError, match="--penalty"):
        heads_of(torch.zeros(4, 4))


def stages(found: Learned) -> list[Point]:
    """Return the points that were learned; the others are these at another scale."""
    return [point for point in found.line.points if point.scale == 1]


def nats_of(tiny_one: juice.SteeredModel, table: torch.Tensor, method: str) -> float:
    """Return the divergence of the held-out text, by two runs a piece and place."""
    heads = {(layer, head): float(table[layer, head]) for layer, head in table.nonzero().tolist()}
    nats = [
        oracle.relative_entropy(*pair)
        for ids in map(list, ordinary_pieces(tiny_one).held_out)
        for pair in zip(
            oracle.forward(tiny_one.loaded.model, ids)[0],
            oracle.steered_logits(tiny_one.loaded.model, ids, heads, method=method),
            strict=True,
        )
    ]
    return sum(nats) / len(nats)


@pytest.mark.parametrize("method", ["june", "juice"])
def test_what_is_chosen_lies_within_the_allowed_divergence(
    tiny_one: juice.SteeredModel, method: str
) -> None:
    """Every stage goes beyond so little, so a smaller scale of one is chosen.

    Kills: the divergence of another point, a scale that is not applied, points beyond the bound.
    """
    most = 0.01
    found = learned(tiny_one, method=method, max_divergence=most)
    whole = stages(found)
    assert len(whole) == learning.N_STAGES
    assert all(point.divergence > learning.CLOSE * most for point in whole)
    weights = [point.weight for point in whole]
    assert weights[0] == learning.FIRST_WEIGHT
    for before, after in pairwise(weights):
        assert 1 < after / before <= learning.MOST_CHANGE
    scaled = [point for point in found.line.points if point.scale < 1]
    if method == "juice":
        del scaled[-1]  # a narrower one, which is tried in two runs
    n_within = sum(point.divergence <= most for point in scaled)
    assert n_within == len(whole), "each stage has a scale that is within, and ends there"
    assert len(scaled) <= len(whole) * learning.N_TRIED
    for before, after in pairwise(scaled):
        if before.divergence > most:
            ideal = before.scale * (most / before.divergence) ** 0.5
            assert after.scale == pytest.approx(learning.NEAR * ideal)
    assert found.best.point in scaled
    assert found.best.point.divergence <= most
    within = [point for point in scaled if point.divergence <= most]
    assert all(point.divergence > most / 2 for point in within), "one is not near"
    nats = nats_of(tiny_one, found.best.coefficients, method)
    assert found.best.point.divergence == pytest.approx(nats, rel=1e-3)


def test_what_lies_a_little_beyond_is_not_chosen_whatever_it_wins(
    tiny_one: juice.SteeredModel,
) -> None:
    """An interrupted run had reached it, close enough for the line to end there."""
    most = 0.01
    within, unfinished = learned(tiny_one, max_divergence=most).best, begun(tiny_one)
    beyond = within.point.model_copy(update={"divergence": most * (1 + learning.CLOSE) / 2})
    kept = Reached(within.coefficients, 9.0, beyond)
    unfinished.put("learning context june", [kept.to_plain()])
    found = learned(tiny_one, unfinished=unfinished, max_divergence=most)
    assert beyond in found.line.points
    assert found.best.point.scale < 1
    assert found.best.point.divergence <= most


def test_the_line_ends_where_divergence_is_within_and_goes_on_where_there_is_much_room(
    tiny_one: juice.SteeredModel,
) -> None:
    """Kills: a weight that only grows, a stage that is learned for nothing, a worse one taken."""
    unfinished = begun(tiny_one)
    found = learned(tiny_one, unfinished=unfinished, max_divergence=ANYTHING)
    first, second = stages(found)
    values = [Reached.of_plain(one).value for one in unfinished.get("learning context june")]
    assert found.best.value >= max(values) > min(values)
    assert (first.weight, first.scale) == (learning.FIRST_WEIGHT, 1)
    assert second.weight == learning.LEAST_CHANGE * first.weight
    assert first.divergence > 0.001
    close = first.divergence / (1 + learning.FAR_BELOW) * 2
    found = learned(tiny_one, max_divergence=close)
    assert stages(found) == [first]


@pytest.mark.parametrize("method", ["june", "juice"])
def test_stages_go_on_where_little_is_won_and_the_mean_of_all_but_the_first_counts(
    tiny_one: juice.SteeredModel, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """What starts elsewhere has settled from the first on. Kills: a mean of others."""
    monkeypatch.setattr(learning, "N_STAGES", 3)
    first = learned(tiny_one, method=method, max_divergence=ANYTHING).best
    close = first.point.divergence / (1 + learning.FAR_BELOW) * 2
    monkeypatch.setattr(learning, "ENOUGH", 10.0)
    for start in (None, first):
        unfinished = begun(tiny_one)
        found = learned(
            tiny_one, method=method, start=start, unfinished=unfinished, max_divergence=close
        )
        every = [Reached.of_plain(one) for one in unfinished.get(f"learning context {method}")]
        assert found.line.points[:3] == tuple(one.point for one in every)
        settled = torch.stack([one.coefficients for one in every[start is None :]])
        mean = settled.mean(0)
        mean[mean.abs() < learning.SMALLEST] = 0.0
        nats = nats_of(tiny_one, mean, method)
        assert (found.line.points[3].scale, found.line.points[3].weight) == (
            1.0,
            every[-1].point.weight,
        )
        assert found.line.points[3].divergence == pytest.approx(nats, rel=1e-3)
        assert found.best.point in found.line.points[3:], "no single stage"


def test_more_divergence_is_taken_by_default_where_that_wins_clearly_more(
    tiny_one: juice.SteeredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All choose from the same stages, which are kept.

    Kills: a bound that does not hold where it is given, more that is taken without a word.
    """
    kept = begun(tiny_one)
    within = learned(tiny_one, unfinished=kept)
    assert within.line.allowed == IdentificationOptions().allowed
    assert within.best.point.divergence <= within.line.allowed
    monkeypatch.setattr(learning, "LITTLE", 10.0)
    monkeypatch.setattr(learning, "CLEARLY", -10.0)
    bound = within.line.allowed
    assert learned(tiny_one, unfinished=kept, max_divergence=bound).best.point == within.best.point
    with pytest.warns(UserWarning, match=f"which is taken; --max-divergence {bound:g} forbids"):
        more = learned(tiny_one, unfinished=kept)
    assert more.line.allowed == learning.MORE_DIVERGENCE
    assert within.line.allowed < more.best.point.divergence <= more.line.allowed
    gained = more.best.value - within.best.value
    monkeypatch.setattr(learning, "CLEARLY", gained + 1e-6)
    assert learned(tiny_one, unfinished=kept).best.point == within.best.point


def test_a_stage_that_leaves_room_is_tried_closer_to_what_may_be(
    tiny_one: juice.SteeredModel,
) -> None:
    """Kills: a scale above 1 that is not tried, or goes beyond."""
    first, _ = stages(learned(tiny_one, max_divergence=ANYTHING))
    most = 1.5 * first.divergence
    line = learned(tiny_one, max_divergence=most).line.points
    within = [p for p in line if p.scale > 1 and p.divergence <= most]
    assert within
    assert within[0].scale <= learning.NEAR * 1.5**0.5 + 1e-9
    assert within[0].divergence > 1.1 * first.divergence


@pytest.mark.parametrize(
    ("share", "alike", "left_out"),
    [
        (0.1, 10.0, [0]),
        (0.1, -10.0, []),
        (0.3, 10.0, []),  # without two layers it wins less
    ],
)
def test_outer_layers_that_two_runs_do_as_well_without_are_left_out(
    tiny_one: juice.SteeredModel,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    alike: float,
    left_out: list[int],
) -> None:
    """The stages are kept. Kills: an inner layer, too many, one left out whatever that loses."""
    monkeypatch.setattr(learning, "NARROW", share)
    kept, how = begun(tiny_one), {"method": "juice", "max_divergence": ANYTHING}
    whole = learned(tiny_one, unfinished=kept, **how).best
    sizes = whole.coefficients.square().sum(1)
    n_within = 1 if share == 0.1 else 2
    assert 0 < sizes[:n_within].sum() < share * sizes.sum() < sizes[: n_within + 1].sum()
    monkeypatch.setattr(learning, "ALIKE", alike)
    found = learned(tiny_one, unfinished=kept, **how)
    expected = whole.coefficients.clone()
    expected[left_out] = 0.0
    torch.testing.assert_close(found.best.coefficients, expected)
    assert (found.line.points[-1].won >= whole.point.won) == (n_within == 1)
    nats = nats_of(tiny_one, expected, "juice")
    assert found.best.point.divergence == pytest.approx(nats, rel=1e-3)


def test_what_starts_elsewhere_goes_on_from_there_with_the_same_weight(
    tiny_one: juice.SteeredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage of a step that is not felt stays near where it began."""
    first = learned(tiny_one, max_divergence=ANYTHING).best
    monkeypatch.setattr(learning, "N_STAGES", 1)
    monkeypatch.setattr(learning, "REACH", 1e-9)
    start = Reached(
        first.coefficients, first.value, first.point.model_copy(update={"weight": 24.0})
    )
    found = learned(tiny_one, method="juice", start=start, max_divergence=ANYTHING)
    assert [point.weight for point in stages(found)] == [24.0]
    assert {point.weight for point in found.line.points} == {24.0}
    best = found.best
    moved = (best.coefficients / best.point.scale - first.coefficients).abs()
    assert 0 < moved.max() <= learning.SMALLEST + 0.01


def test_no_step_moves_ordinary_text_further_than_it_may(
    tiny_one: juice.SteeredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a step as long as its slope, and one of another length than is said."""
    monkeypatch.setattr(learning, "N_STAGES", 1)
    monkeypatch.setattr(learning, "N_FIRST_STEPS", 1)
    monkeypatch.setattr(learning, "SMALLEST", 0.0)
    nats = []
    for reach in (1e-3, 4e-3):
        monkeypatch.setattr(learning, "FIRST_REACH", reach)
        (point,) = stages(learned(tiny_one, penalty=0.0, max_divergence=ANYTHING))
        assert 0 < point.divergence < 2 * reach
        nats.append(point.divergence)
    assert nats[1] == pytest.approx(4 * nats[0], rel=0.3)


def test_the_strongest_head_comes_first() -> None:
    given = heads_of(torch.tensor([[0.0, 0.5, -0.2], [1.5, -3.0, 0.0]]))
    assert given.heads.plus == ((1, 0), (0, 1))
    assert given.heads.minus == ((1, 1), (0, 2))
    assert given.betas.plus == (1.5, 0.5)
    assert given.betas.minus == (-3.0, pytest.approx(-0.2))
