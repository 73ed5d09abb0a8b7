"""Scores by attribution, the examples they are found on, and the heads they choose."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import juice
from juice.data.example import ConflictExample, fact_keys
from juice.errors import ExampleError
from juice.head_set.head_set import HeadSet
from juice.identification.attribution import attribute_heads
from juice.identification.examples import (
    known_examples,
    usable_examples,
    with_prompts_that_most_have,
)
from juice.identification.find import candidates
from juice.identification.options import IdentificationOptions
from juice.identification.task import Task
from tests.support import oracle, tiny
from tests.support.conflicts import TYPES, examples
from tests.support.marks import FEW_EXAMPLES

STEP = 1e-2
ATTRIBUTION = IdentificationOptions(method="attribution")


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_a_score_is_how_fast_the_lead_grows_with_the_head(shape: str) -> None:
    """The oracle is two runs a head and step, in its own code. Kills: another sign or position."""
    network, tokenizer = tiny.tiny_model(shape), tiny.tiny_tokenizer()
    pool = examples()

    def leads(target: str, kind: str, heads: dict[tuple[int, int], float]) -> list[float]:
        other = "context" if target == "parametric" else "parametric"
        found = []
        for example in pool:
            ids = tokenizer(example.prompts[kind])["input_ids"]
            logits = oracle.steered_logits(network, ids, heads)[-1]
            ahead, behind = (
                tokenizer(f" {example.answer(t)}")["input_ids"][0] for t in (target, other)
            )
            found.append(float(logits[ahead] - logits[behind]))
        return found

    model = juice.load(network, tokenizer=tokenizer)
    scores = attribute_heads(model, pool, targets={"parametric": TYPES, "context": TYPES[1:]})
    for target, types in (("parametric", TYPES), ("context", TYPES[1:])):
        of_target = scores[target]
        assert (of_target.kind, of_target.conflict_types) == ("attribution", types)
        assert torch.equal(of_target.minus, -of_target.plus)
        for i, kind in enumerate(types):
            for head in ((0, 0), (1, 3), (2, 1), (tiny.N_LAYERS - 1, 2)):
                up, down = (leads(target, kind, {head: step}) for step in (STEP, -STEP))
                slope = sum(a - b for a, b in zip(up, down, strict=True)) / len(pool) / (2 * STEP)
                assert float(of_target.plus[i, *head]) == pytest.approx(slope, abs=2e-3)
        assert of_target.plus.abs().max() > 0.1


@pytest.fixture(scope="module")
def pool() -> list[ConflictExample]:
    return juice.read_examples("mini")


@FEW_EXAMPLES
def test_examples_are_known_and_spread_over_the_relations(
    mini: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    drawn, rest = usable_examples(mini, pool, ATTRIBUTION)
    assert len(drawn) == 16
    assert known_examples(mini, drawn) == drawn
    of_relation = Counter(e.relation for e in drawn)
    assert len(of_relation) == len({e.relation for e in pool})
    assert max(of_relation.values()) - min(of_relation.values()) <= 2
    assert len(rest) == len(pool) - 16
    again, _ = usable_examples(mini, pool, ATTRIBUTION)
    other, _ = usable_examples(mini, pool, ATTRIBUTION.but(seed=1))
    assert again == drawn != other


@FEW_EXAMPLES
def test_a_small_file_leaves_half_of_its_examples_for_tuning(
    mini: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    few = known_examples(mini, pool[:14])[:10]
    drawn, rest = usable_examples(mini, few, ATTRIBUTION)
    assert (len(drawn), len(rest)) == (5, 5)


@FEW_EXAMPLES
def test_of_few_that_the_model_knows_some_are_left_for_validation(
    mini: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    """Kills: a share of the file, most of which is unknown. Rows and facts count once."""
    known = known_examples(mini, pool[:60])[:20]
    asked = {id(e) for e in known}
    others = [e for e in pool if id(e) not in asked][:30]
    unknown = [e.model_copy(update={"parametric_answer": ("Nowhere",)}) for e in others]
    other_wordings = [
        e.model_copy(update={"prompts": {**e.prompts, "clean": f"So, {e.prompts['clean']}"}})
        for e in known
    ]
    file = [*known, *unknown, *known, *unknown]
    for method, n in (("auto", 12), ("attribution", 10)):
        how = IdentificationOptions(method=method)
        drawn, rest = usable_examples(mini, file, how)
        assert len(drawn) == n
        assert known_examples(mini, rest) == [e for e in known if e not in drawn]
        assert len(rest) == len(known) + len(unknown) - n
        found, left = usable_examples(mini, [*file, *other_wordings], how.but(n_examples=n))
        assert not {*fact_keys(left)} & {*fact_keys(found)}
    every, _ = usable_examples(mini, file, IdentificationOptions(), n_kept=0)
    assert every == known


@FEW_EXAMPLES
@pytest.mark.usefixtures("little_text")
def test_a_kind_is_rare_among_the_examples_of_the_relation(
    mini: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    """Kills: a kind that every example of a relation has, left out for others in the file."""
    one = pool[0].relation
    whole = [e for e in pool if e.relation == one][:20]
    others = [
        e.model_copy(update={"prompts": {k: p for k, p in e.prompts.items() if k != "coherent"}})
        for e in pool
        if e.relation != one
    ]
    given = {"relation": one, "n_examples": 6, "method": "attribution", "top_k": 3, "tune": False}
    found = juice.identify(mini, [*whole, *others], target="context", **given)
    assert set(found.identification.conflict_types) == {"substitution", "coherent"}


def test_enough_clean_prompts_tell_what_the_model_knows(pool: list[ConflictExample]) -> None:
    """Kills: facts that nobody checked, where more than half of a file has no clean prompt."""
    bare = [
        e.model_copy(update={"prompts": {k: p for k, p in e.prompts.items() if k != "clean"}})
        for e in pool[:60]
    ]
    enough = [*bare, *pool[60:80]]
    assert with_prompts_that_most_have(enough) == enough
    with pytest.warns(UserWarning, match=r"clean \(19\): it is left out"):
        assert not any("clean" in e.prompts for e in with_prompts_that_most_have(enough[:-1]))


@FEW_EXAMPLES
@pytest.mark.usefixtures("little_text", "few_betas")
def test_a_few_prompts_of_a_kind_do_not_shut_out_the_examples_without_them(
    mini: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    """Kills: a few rows that find heads, and one that tunes, of all that are known."""
    known = known_examples(mini, pool[:20])[:10]
    few = [
        e.model_copy(update={"prompts": {k: p for k, p in e.prompts.items() if k != "coherent"}})
        for e in known[2:]
    ]
    mixed, options = [*known[:2], *few], {"target": "context", "method": "attribution", "top_k": 3}
    left_out = r"few of 10 examples .* coherent \(2\): it is left out"
    with pytest.warns(UserWarning, match=left_out):
        found = juice.identify(mini, mixed, **options)
    assert found.identification.conflict_types == ("substitution",)
    assert found.identification.n_examples == 5
    assert found.validation().n_examples == 5
    with pytest.warns(UserWarning, match=left_out):
        validated = juice.identify(
            mini, pool[40:50], validation=mixed, n_examples=2, protect=(), **options
        )
    assert validated.validation().n_examples == 10
    with pytest.warns(UserWarning, match=left_out):
        tuned = juice.tune(mini, mini.head_sets.get("context"), mixed)
    assert tuned.validation().n_examples == 10


@FEW_EXAMPLES
def test_validation_on_facts_that_find_the_heads_is_warned_of(
    mini: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    few, options = known_examples(mini, pool[:14])[:8], {"target": "context", "tune": False}
    with pytest.warns(UserWarning, match="4 of 5 validation examples are about facts that find"):
        juice.identify(
            mini, few[:4], validation=few[:5], method="attribution", n_examples=4, **options
        )


def test_facts_that_the_model_does_not_know_find_no_heads() -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    with pytest.raises(ExampleError, match="answers none of 4 clean prompts right"):
        juice.identify(model, examples(), target="context")


@FEW_EXAMPLES
def test_several_numbers_of_heads_compete_unless_one_is_asked_for(
    mini: juice.SteeredModel, pool: list[ConflictExample]
) -> None:
    drawn, _ = usable_examples(mini, pool, ATTRIBUTION)
    types = {"parametric": TYPES, "context": TYPES[1:]}
    scores = attribute_heads(mini, drawn, targets=types)

    def found(**options: object) -> dict[str, list[HeadSet]]:
        how = ATTRIBUTION.but(**options)
        tasks = [Task(model=mini, target=t, examples=drawn, options=how) for t in types]
        return {task.target: candidates(task, scores[task.target]) for task in tasks}

    every = found()
    for sets in every.values():
        assert [(len(s.heads.plus), len(s.heads.minus)) for s in sets] == [(3, 3), (5, 5), (10, 10)]
        assert [s.identification.top_k for s in sets] == [3, 5, 10]
        assert all(larger.heads.plus[:3] == sets[0].heads.plus for larger in sets)
    (one,) = found(top_k=5)["context"]
    assert one.heads == every["context"][1].heads
    found_alone = juice.identify(
        mini, pool, target="context", method="attribution", top_k=5, tune=False
    )
    assert one.heads == found_alone.heads
