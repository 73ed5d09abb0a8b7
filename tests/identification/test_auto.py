"""Which way is kept: by the answers to the validation facts, and within the time that is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

import juice
from juice.data.example import ConflictExample
from juice.data.judging import normalise
from juice.data.memory import open_prompts
from juice.errors import ExampleError, NoConsistentHeadError, UsageError
from juice.formula import CONFLICTS
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Betas, Point
from juice.identification import auto, tune
from juice.identification import find as finding
from juice.identification import learned as learning
from juice.identification.auto import Way, best_way, decided, learned_ways
from juice.identification.examples import known_examples
from juice.identification.find import find, pool_of
from juice.identification.first_tokens import table_of
from juice.identification.learned import Reached
from juice.identification.options import IdentificationOptions
from juice.identification.task import Task, Unfinished
from juice.identification.tune import Line, Search, harm_of
from juice.progress import silent
from tests.support import oracle, tiny
from tests.support.conflicts import conflicts
from tests.support.marks import FEW_EXAMPLES

pytestmark = FEW_EXAMPLES
GOOD = {"plus": [(1, 2), (2, 0)], "beta_plus": 6.0}
IDLE = {"plus": [(0, 0)], "beta_plus": 1e-4}
N_FACTS, N_TOKENS = 6, 15
# A random model gains little, so that little is asked of it.
PROMPTS = [f"Fact {i} is" for i in range(8)]
FREE = {"n_examples": 4, "protect": (), "penalty": 0.0}


@pytest.fixture(scope="module")
def model() -> juice.SteeredModel:
    return model_of_letters()


def model_of_letters(ends: Sequence[int] = (0,)) -> juice.SteeredModel:
    """Return a random model that says letters alone, so that an answer has a token for each."""
    network, tokenizer = tiny.tiny_model("llama"), tiny.tiny_tokenizer()
    words = [tokenizer.decode([token]).strip() for token in range(len(network.lm_head.weight))]
    with torch.no_grad():
        network.lm_head.weight[[not (word.isascii() and word.isalpha()) for word in words]] = 0
    network.generation_config.eos_token_id = [*ends]
    return juice.load(network, tokenizer=tokenizer)


@pytest.fixture(autouse=True)
def _few_steps(few_stages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "FIRST_WEIGHT", 3.0)
    monkeypatch.setattr(learning, "N_FIRST_STEPS", 6)


def way(model: juice.SteeredModel, method: str, line: Line | None = None, **heads: object) -> Way:
    made = model.make_head_set(name="own", target="context", method=method, **heads)
    return Way(made, method, line)


def task_of(model: juice.SteeredModel, *good: Way) -> Task:
    """Return a task whose right answers are what good ways make the model say, and only they."""
    kinds = {"substitution": "Fact {} is", "coherent": "It is said that fact {} is"}
    prompts = [{kind: text.format(i) for kind, text in kinds.items()} for i in range(60)]
    asked = [text for one in prompts for text in one.values()]
    given = [answers(model, one, asked) for one in (way(model, "juice", **IDLE), *good)]
    facts = list[ConflictExample]()
    for i, of_fact in enumerate(prompts):
        unsteered, *steered = (every[2 * i : 2 * i + 2] for every in given)
        right = [answer for every in steered for answer in every]
        if not {"", *map(normalise, unsteered)} & set(map(normalise, right)):
            facts.append(
                ConflictExample(
                    subject=f"fact {i}",
                    parametric_answer="nothing",
                    context_answer=tuple(right),
                    prompts=of_fact,
                    match="begins",
                    n_words=N_TOKENS,  # so that answers have no more tokens than these
                )
            )
    facts = facts[:N_FACTS]
    assert len(facts) == N_FACTS
    # Nothing is protected: no true prompt can be made of what is not in the prompts.
    how = IdentificationOptions(target="context", name="own", protect=())
    return Task(model=model, target="context", validation=facts, options=how)


def answers(model: juice.SteeredModel, way: Way, prompts: list[str]) -> list[str]:
    steer = juice.Steer(target="context", head_set=way.head_set, method=way.method)
    return [done.text for done in model.generate(prompts, steer=steer, max_tokens=N_TOKENS)]


def n_right(task: Task, way: Way) -> int:
    """Return how many of the answers are those of the context, as `generate` gives them."""
    asked = [(e, e.prompts[kind]) for e in task.validation for kind in CONFLICTS]
    given = answers(task.model, way, [prompt for _, prompt in asked])
    return sum(e.is_right(answer, "context") for (e, _), answer in zip(asked, given, strict=True))


@pytest.mark.parametrize(
    ("one_run", "two_runs", "expected"),
    [(GOOD, GOOD, "june"), (IDLE, GOOD, "juice"), (GOOD, IDLE, "june")],
    ids=["a tie", "two runs are better", "two runs are worse"],
)
def test_one_run_is_kept_unless_two_are_likely_better(
    model: juice.SteeredModel,
    one_run: dict[str, object],
    two_runs: dict[str, object],
    expected: str,
) -> None:
    """The answers of the good ways are right, by construction, and those of the idle wrong.

    Kills: the wrong sign, ties that go to two runs, a method whose betas or effect are lost.
    """
    ways = [way(model, "june", **one_run), way(model, "juice", **two_runs)]
    good = [one for one, heads in zip(ways, (one_run, two_runs), strict=True) if heads is GOOD]
    task, most = task_of(model, *good), len(CONFLICTS) * N_FACTS
    found = decided(task, ways)
    assert found.method == expected
    for one in ways:
        assert found.intervention(one.method).heads == one.head_set.heads
        assert found.betas(one.method) == one.head_set.betas(one.method)
        measured, right = found.validation(one.method), n_right(task, one)
        assert right == most if one in good else right == 0
        assert sum(measured.accuracy.values()) / len(CONFLICTS) == pytest.approx(right / most)
        assert list(measured.harm) == ["0.5", "1", "2"]


def test_two_runs_that_are_a_little_better_are_not_enough(model: juice.SteeredModel) -> None:
    """Kills: the better mean alone."""
    idle, good = way(model, "june", **IDLE), way(model, "juice", **GOOD)
    task = task_of(model, good)
    first, *others = task.validation
    either = [
        e.model_copy(
            update={
                "context_answer": (
                    *e.context_answer,
                    *filter(normalise, answers(model, idle, list(e.prompts.values()))),
                )
            }
        )
        for e in others
    ]
    alike = replace(task, validation=[first, *either])
    assert n_right(alike, good) > n_right(alike, idle) > 0
    assert decided(alike, [idle, good]).method == "june"


@pytest.mark.parametrize(("protect", "expected"), [(("clean",), "juice"), ((), "june")])
def test_of_ways_that_win_alike_the_one_that_breaks_less_is_kept(
    model: juice.SteeredModel, protect: tuple[str, ...], expected: str
) -> None:
    """Neither wins, and one run says something else to most prompts that leave open what is said.

    Kills: a tie that goes to one run whatever it breaks, and a break that is counted for two runs.
    """
    ways = [way(model, "june", **GOOD), way(model, "juice", **IDLE)]
    task = task_of(model, way(model, "juice", **GOOD))
    answers_of_none = [e.model_copy(update={"context_answer": "0"}) for e in task.validation]
    how = task.options.but(protect=protect)
    found = decided(replace(task, validation=answers_of_none, options=how), ways)
    assert found.method == expected
    asked = [one.prompt for one in open_prompts(is_chat=False, held_out=True)]
    none = [done.tokens for done in model.generate(asked, max_tokens=1)]
    for one in ways:
        steer = juice.Steer(target="context", head_set=one.head_set, method=one.method)
        said = [done.tokens for done in model.generate(asked, steer=steer, max_tokens=1)]
        kept = [[t.id for t in a] == [t.id for t in b] for a, b in zip(none, said, strict=True)]
        assert (sum(kept) == len(kept)) == (one.method == "juice")
        effects = found.validation(one.method).side_effects
        share = sum(kept) / len(kept)
        assert effects == ({"open": pytest.approx((1.0, share))} if protect else {})


def test_it_is_measured_whether_replies_still_end_where_they_did(
    model: juice.SteeredModel,
) -> None:
    """Kills: the other answer, a place before or behind the end, replies that do not end."""
    said = Counter(t.id for done in model.generate(PROMPTS, max_tokens=20) for t in done.tokens)
    model = model_of_letters([token for token, _ in said.most_common()[1::3]])
    ways = [way(model, "june", **GOOD), way(model, "juice", **IDLE)]
    task = task_of(model, ways[0])
    facts, how = task.validation * 4, task.options.but(protect=("clean",))
    found = decided(replace(task, validation=facts, options=how), ways)
    asked = [f"{e.prompts[t]} {e.answer('context')}" for e, t in zip(facts, cycle(CONFLICTS))]
    replies = [
        (model.tokenize(prompt), done)
        for prompt, done in zip(asked, model.generate(asked, max_tokens=40), strict=True)
    ]
    ended = [(ids, done.token_ids) for ids, done in replies if done.finish_reason == "stop"]
    assert len(replies) / 4 < len(ended) < len(replies)
    shares = dict[str, float]()
    for one in ways:
        steer = juice.Steer(target="context", head_set=one.head_set, method=one.method)
        whole = [(*ids, *new[:-1]) for ids, new in ended]
        last = model.generate(whole, steer=steer, max_tokens=1)
        kept = [done.token_ids == new[-1:] for done, (_, new) in zip(last, ended, strict=True)]
        shares[one.method] = sum(kept) / len(kept)
        effect = found.validation(one.method).side_effects["ends"]
        assert effect == pytest.approx((1.0, shares[one.method]))
    assert shares["june"] < shares["juice"] == 1


@pytest.mark.filterwarnings("ignore:nothing keeps steering toward context from breaking clean")
def test_what_is_left_open_must_not_diverge_more_than_text_may(model: juice.SteeredModel) -> None:
    """The larger of the two counts. Kills: their mean, and prompts that are learned from."""
    given, network = task_of(model, way(model, "juice", **GOOD)), model.loaded.model
    of_text, of_both = (
        Search.of(replace(given, options=given.options.but(protect=p)), given.held_out)
        for p in ((), ("clean",))
    )
    asked = [model.tokenize(p.prompt) for p in open_prompts(is_chat=False, held_out=True)[::2]]
    clean = [oracle.forward(network, list(ids))[0][-1] for ids in asked]
    is_larger = set[bool]()
    for head in [(1, 1), (1, 2)]:
        table = torch.zeros(tiny.N_LAYERS, tiny.N_HEADS)
        table[head] = 3.0
        steered = [oracle.steered_logits(network, list(ids), {head: 3.0})[-1] for ids in asked]
        nats = map(oracle.relative_entropy, clean, steered)
        text, left_open = of_text.judged(table, "juice").divergence, sum(nats) / len(asked)
        both = of_both.judged(table, "juice").divergence
        assert both == pytest.approx(max(text, left_open), abs=1e-4)
        is_larger.add(left_open > text + 0.001)
    assert is_larger == {True, False}


def test_of_two_ways_of_a_method_the_better_one_is_kept_and_at_a_tie_the_first(
    model: juice.SteeredModel,
) -> None:
    line = Line((Point(weight=3.0, scale=1.0, won=0.5, divergence=0.1),), allowed=0.2)
    idle, good = way(model, "juice", **IDLE), way(model, "juice", line, **GOOD)
    task = task_of(model, good)
    for ways in ([idle, good], [good, idle]):
        found = decided(task, ways)
        assert (found.heads, found.betas()) == (good.head_set.heads, good.head_set.betas())
        assert (found.validation().line, found.validation().allowed) == line
    other = way(model, "juice", **IDLE | {"beta_plus": 2e-4})
    assert decided(task, [idle, other]).betas() == idle.head_set.betas()
    assert decided(task, [other, idle]).betas() == other.head_set.betas()


def test_by_default_both_runs_are_learned_and_the_set_says_how_it_was_chosen(
    model: juice.SteeredModel, tmp_path: Path
) -> None:
    facts = conflicts()
    found = juice.identify(model, facts, target="context", validation=facts, **FREE)
    for method in ("june", "juice"):
        assert found.betas(method) is not None
        assert found.validation(method).harm["1"].divergence > 0
        assert found.validation(method).allowed == IdentificationOptions().allowed
    assert found.betas("june").is_per_head
    assert found.validation("june").line
    found.save(tmp_path / "own")
    assert HeadSet.load(tmp_path / "own").validation() == found.validation()


def test_the_few_examples_on_which_heads_compete_are_of_all_relations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file may have one relation after the other."""
    model, scored = juice.load("mini"), list[ConflictExample]()

    def attribute(_model: object, examples: Sequence[ConflictExample], **_: object) -> None:
        scored.extend(examples)
        raise NoConsistentHeadError("enough")

    def learn_nothing(*_: object) -> None:
        raise NoConsistentHeadError("nothing")

    monkeypatch.setattr(finding, "attribute_heads", attribute)
    monkeypatch.setattr(auto, "learned_ways", learn_nothing)
    with pytest.raises(NoConsistentHeadError, match="nothing"):
        find(model, juice.read_examples("mini"), IdentificationOptions(target="context"))
    counts = Counter(one.relation for one in scored)
    assert len(counts) == 6
    assert max(counts.values()) - min(counts.values()) <= 1


def test_what_one_run_reached_is_kept_where_two_reach_nothing(model: juice.SteeredModel) -> None:
    """An interrupted run had reached nothing with two: its stage is taken up as it is."""
    facts, unfinished = conflicts(), Unfinished()
    how = IdentificationOptions(target="context", **FREE)
    point = Point(weight=0.1, scale=1.0, won=0.0, divergence=how.allowed)
    nothing = Reached(torch.zeros(tiny.N_LAYERS, tiny.N_HEADS), -1.0, point)
    unfinished.put("learning context juice", [nothing.to_plain()])
    given = {"examples": facts, "validation": facts, "options": how, "unfinished": unfinished}
    task = Task(model=model, target="context", **given)
    (only,) = learned_ways(task, ("june", "juice"))
    assert only.method == "june"
    assert unfinished.n_found == 0  # nothing is of an earlier run
    with pytest.raises(NoConsistentHeadError):
        learned_ways(task, ("juice", "june"))


def test_a_budget_that_is_over_at_once_still_gives_a_set_from_one_step(
    model: juice.SteeredModel,
) -> None:
    """Kills: a stage that is finished, a second run or another way that is tried, too late."""
    n_done = dict[str, int]()

    @contextmanager
    def counted(description: str, _total: int) -> Iterator[Callable[[int], None]]:
        def advance(n: int) -> None:
            n_done[description] = n_done.get(description, 0) + n

        yield advance

    facts = conflicts()
    how = IdentificationOptions(target="context", budget=0.001, **FREE)
    found = find(model, facts, how, validation=facts, progress=counted).head_sets["context"]
    assert found.method == "june"
    assert found.betas("june").is_per_head
    assert found.validation("juice") is None
    assert len({point.weight for point in found.validation("june").line}) == 1
    learned = {what: n for what, n in n_done.items() if what.startswith("learning")}
    assert learned == {"learning context in one run": 1}
    assert "scoring heads" not in n_done
    assert n_done["reading context answers, ordinary text"] > 0  # what is learned is judged aloud


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("90s", 90), ("5m", 300), ("1h", 3600), ("1.5m", 90), (12, 12), (0.5, 0.5), (2e6, 2e6)],
)
def test_a_budget_is_a_time(given: float | str, seconds: float) -> None:
    assert IdentificationOptions(budget=given).seconds == seconds


@pytest.mark.parametrize("given", ["soon", "5 minutes", "7", "-3s", "", "0s", 0, -1.0])
def test_a_budget_that_is_no_time_is_refused(given: float | str) -> None:
    with pytest.raises(UsageError, match="budget"):
        IdentificationOptions.of(budget=given)


def test_mini_is_asked_what_it_remembers_only_where_that_is_asked_for(
    mini: juice.SteeredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, own = IdentificationOptions(relation="world_capital"), juice.read_examples("mini")
    assert pool_of(mini, None, how) == own
    monkeypatch.setattr(finding, "N_REMEMBERED", 1000)
    founders = how.but(relation="company_founder")
    with pytest.warns(UserWarning, match=r"remembers \d+ facts with confidence, of 1000 wanted"):
        asked = pool_of(mini, "memory", founders)
    assert {e.relation for e in asked} == {"company_founder"}
    assert not {e.prompts["clean"] for e in asked} & {e.prompts["clean"] for e in own}


def test_another_model_is_asked_what_it_remembers_where_no_examples_are_given(
    model: juice.SteeredModel,
) -> None:
    with pytest.raises(ExampleError, match=r"none of .* subjects; give examples"):
        juice.identify(model, target="context", relation="element_symbol")


@pytest.mark.parametrize("reached", [-1000.0, 1000.0])
def test_betas_of_a_few_heads_are_searched_only_where_they_may_reach_what_was_learned(
    model: juice.SteeredModel, reached: float
) -> None:
    """Kills: a search whose result cannot matter, and a bound that shuts out what may win."""
    task = task_of(model, way(model, "juice", **GOOD))
    few = way(model, "juice", **GOOD).head_set
    chosen, pairs = Search.of(task, task.held_out).best([few], "juice", at_least=reached)
    assert chosen is few
    assert bool(pairs) == (reached < 0)


def test_a_few_heads_are_compared_at_the_largest_betas_that_should_be_within(
    model: juice.SteeredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is within is told by a hundredth of the betas' square. Kills: betas for their square."""
    few = model.make_head_set(name="own", target="context", plus=[(1, 2), (2, 0)], minus=[(0, 1)])
    compared = list[tuple[float, float]]()

    def best(_: Search, candidates: Sequence[HeadSet], _method: str, at: Any, *_more: Any) -> Any:
        compared.extend(pair for one in candidates for pair in at(one))
        return candidates[0], []

    def nothing_learned(*_: object) -> list[Way]:
        raise NoConsistentHeadError("nothing")

    gentle = few.with_betas("juice", Betas(plus=0.1, minus=-0.1))
    at_one = 100 * harm_of(model, gentle, ["juice"], silent)["juice"]["1"].divergence
    monkeypatch.setattr(Search, "best", best)
    monkeypatch.setattr(auto, "learned_ways", nothing_learned)
    unfinished, facts = Unfinished(), conflicts()
    for most in (2 * at_one, at_one / 2, at_one / 8, at_one / 100):
        how = IdentificationOptions(target="context", max_divergence=most, protect=())
        given = {"examples": facts, "validation": facts, "options": how, "unfinished": unfinished}
        with pytest.raises(NoConsistentHeadError):
            best_way(Task(model=model, target="context", **given), lambda: [few])
    assert compared == [(1.0, -1.0), (0.5, -0.5), (0.25, -0.25), (0.25, -0.25)]


def test_betas_that_diverge_a_little_more_than_they_may_are_no_better_than_none(
    mini: juice.SteeredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: conflicts that are won at the cost of the bound."""
    facts = known_examples(mini, juice.read_examples("mini")[:12])
    table = table_of(mini.loaded, mini.resolve(juice.Steer(target="context")))
    head_set = mini.head_sets.get("context")
    pair = (head_set.betas().plus, head_set.betas().minus)
    for grid in ("COARSE", "FINE"):  # no other betas are tried
        monkeypatch.setattr(tune, grid, tuple(sorted(map(abs, pair))))
    most = 1000.0
    for is_within in (True, False):
        how = IdentificationOptions(target="context", max_divergence=most, protect=())
        task = Task(model=mini, target="context", validation=facts, options=how)
        search = Search.of(task, facts)
        found = search.judged(table, "juice")
        assert found.won > search.unsteered.won + 0.2
        assert found.value > search.unsteered.value + 0.1, "whatever may be"
        _, pairs = search.best([head_set], "juice", lambda _: [pair], search.unsteered.value)
        assert bool(pairs) == is_within
        most = found.divergence / 1.05


def test_a_way_that_breaks_clean_prompts_is_not_the_default_beside_one_that_does_not(
    mini: juice.SteeredModel,
) -> None:
    """Kills: a good set that is refused for the harm of another way that wins more."""
    facts = known_examples(mini, juice.read_examples("mini")[:16])
    heads = mini.head_sets.get("context").heads
    ways = [
        way(mini, method, plus=heads.plus, minus=heads.minus, beta_plus=plus, beta_minus=minus)
        for method, plus, minus in (("june", 0.25, -0.25), ("juice", 1.0, -2.0))
    ]
    how = IdentificationOptions(target="context", name="own")
    found = decided(Task(model=mini, target="context", validation=facts, options=how), ways)
    gentle, strong = found.validation("june"), found.validation("juice")
    assert strong.gain > gentle.gain + 0.1
    assert strong.broken(0.1)
    assert not gentle.broken(0.1)
    assert not gentle.is_weak
    assert found.method == "june"
