"""What `integration.real.measure` reports, on the bundled model instead of a real one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn

import pytest

import juice
from integration.real import chat, facts, measure, prose
from integration.real.answers import UNSTEERED, Answers, Row, ways_of
from juice.data.example import (
    ConflictExample,
    context_end,
    fact_keys,
    to_json_line,
    unknown_subjects,
)
from juice.data.memory import open_prompts
from juice.engine.steer import Steer
from juice.errors import HeadSetNotFoundError, UsageError
from juice.formula import Target
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import HARM_STRENGTHS, Gate, GateRule
from juice.identification import ordinary
from juice.identification.first_tokens import Case, endangered_prompts
from juice.identification.task import UnfinishedFile
from juice.progress import silent

LIMIT = 6
EXAMPLES = juice.read_examples("mini")
FACTS = EXAMPLES[::90]
USED = EXAMPLES[1]
TEXT = (ordinary.TEXT / "prose.txt").read_text(encoding="utf-8")
STRENGTHS = {f"{way} x {s:g}" for way in ("juice", "june") for s in HARM_STRENGTHS}
TYPES = ("clean", "substitution", "coherent")
ROWS = {
    *(("parametric", t, way) for t in TYPES for way in ("unsteered", "juice", "june")),
    *(("parametric", t, "june - juice") for t in (*TYPES, "conflicts")),
    *(
        ("parametric", measured, way)
        for kind in ("clean", "true", "irrelevant", "unknown")
        for measured, way in (
            (f"right {kind}", "unsteered"),
            (f"kept {kind}", "juice"),
            (f"kept {kind}", "june"),
        )
    ),
    *(("parametric", "kept unknown", f"{way}, gate") for way in ("juice", "june")),
    *(("context", m, w) for m in ("won", "kept follow", "kept clean") for w in ("juice", "june")),
    ("context", "right clean", "unsteered"),
    *((part, "harm to prose", way) for part in ("parametric", "context") for way in STRENGTHS),
    *(
        ("chat", kind, way)
        for kind in ("memory", "context")
        for way in (
            "unsteered",
            *(f"{t}, {w}" for t in ("parametric", "context") for w in ("juice", "june")),
        )
    ),
}


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Iterator[juice.SteeredModel]:
    """Yield the bundled model with its sets, one of which says that a fact found it."""
    folder = tmp_path_factory.mktemp("sets")
    for target in ("parametric", "context"):
        head_set = HeadSet.load(Path(__file__).parents[1] / "head_sets" / "mini" / target)
        if target == "parametric":
            assert head_set.identification is not None
            shouted = USED.model_copy(update={"subject": USED.subject.upper()})
            found = head_set.identification.model_copy(
                update={"facts": tuple(fact_keys([shouted]))}
            )
            head_set = head_set.model_copy(update={"identification": found})
        head_set.save(folder / "mini" / target)
    with juice.load("mini", head_sets=folder) as model:
        yield model


@pytest.fixture(scope="module")
def result(
    mini: juice.SteeredModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    data = tmp_path_factory.mktemp("facts") / "facts.jsonl"
    data.write_text("".join(map(to_json_line, [*FACTS, USED])))
    plan = measure.Plan(
        data=[str(data)],
        text=TEXT,
        limit=LIMIT,
        n_prose=1,
        chat_prompts=chat.chat_prompts()[:2],
    )
    with pytest.warns(UserWarning, match="'context' does not say which facts it was found on"):
        yield measure.measure(mini, plan)


def name(row: dict[str, Any]) -> tuple[str, str, str]:
    strength = f" x {row['strength']:g}" if "strength" in row else ""
    return row["part"], row["measure"], row["way"] + strength


def row_of(result: dict[str, Any], *wanted: str) -> dict[str, Any]:
    (row,) = (row for row in result["rows"] if name(row) == wanted)
    return row


def answers(
    model: juice.SteeredModel, prompts: Sequence[str], steer: Steer, **options: Any
) -> list[str]:
    return [c.text for c in model.generate(prompts, steer=steer, max_tokens=8, **options)]


def right(
    model: juice.SteeredModel, examples: Sequence[ConflictExample], kind: str, steer: Steer
) -> list[bool]:
    texts = answers(model, [e.prompts[kind] for e in examples], steer)
    return [e.is_right(t, "parametric") for e, t in zip(examples, texts, strict=True)]


NONE = Steer(target="none")


@pytest.fixture(scope="module")
def known(mini: juice.SteeredModel) -> list[ConflictExample]:
    shuffled = facts.Random(facts.SEED).sample(FACTS, len(FACTS))
    is_right = right(mini, shuffled, "clean", NONE)
    return [e for e, known in zip(shuffled, is_right, strict=True) if known][:LIMIT]


def test_the_result_has_a_row_for_every_measure_and_way(result: dict[str, Any]) -> None:
    assert len(result["rows"]) == len(ROWS)
    assert {name(row) for row in result["rows"]} == ROWS
    assert all(row["n"] for row in result["rows"] if row["measure"] != "won")


def test_the_result_says_which_model_and_sets_were_measured(
    mini: juice.SteeredModel, result: dict[str, Any]
) -> None:
    written = json.loads(json.dumps(result, allow_nan=False))
    assert written["model"]["fingerprint"] == mini.description.identity.fingerprint
    for target in ("parametric", "context"):
        described = written["head_sets"][target]
        assert described["seal"] == mini.head_sets.get(target).seal
        assert described["method"] == "juice"
        assert described["says_its_facts"] is (target == "parametric")


def test_a_fact_that_a_set_was_found_on_is_left_out(result: dict[str, Any]) -> None:
    """Kills: comparing subjects with their case."""
    assert result["facts"] == {"n": len(FACTS) + 1, "n_excluded": 1}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("way", ["unsteered", "juice", "june"])
def test_shares_of_known_facts_are_those_of_generate(
    mini: juice.SteeredModel,
    result: dict[str, Any],
    known: list[ConflictExample],
    kind: str,
    way: str,
) -> None:
    steer = NONE if way == "unsteered" else Steer(target="parametric", method=way)
    hits = right(mini, known, kind, steer)
    row = row_of(result, "parametric", kind, way)
    assert (row["n"], row["share"]) == (len(known), pytest.approx(sum(hits) / len(hits)))
    assert row["interval"][0] <= row["share"] <= row["interval"][1] + 1e-9


def test_one_run_is_compared_with_two_fact_by_fact(
    mini: juice.SteeredModel, result: dict[str, Any], known: list[ConflictExample]
) -> None:
    gains = [0.0] * len(known)
    for method, sign in (("june", 0.5), ("juice", -0.5)):
        for kind in ("substitution", "coherent"):
            hits = right(mini, known, kind, Steer(target="parametric", method=method))
            gains = [g + sign * hit for g, hit in zip(gains, hits, strict=True)]
    row = row_of(result, "parametric", "conflicts", "june - juice")
    assert (row["n"], row["difference"]) == (len(known), pytest.approx(sum(gains) / len(gains)))


def test_answers_about_invented_subjects_are_kept_by_the_gate_as_generate_keeps_them(
    mini: juice.SteeredModel, result: dict[str, Any], known: list[ConflictExample]
) -> None:
    kinds = ("substitution", "coherent")
    asked = [
        (e, e.prompts[kinds[i % 2]], context_end(e, kinds[i % 2]) or 0)
        for i, e in enumerate(unknown_subjects(known, seed=0))
    ]
    unsteered = answers(mini, [prompt for _, prompt, _ in asked], NONE)
    before = [
        one for one, text in zip(asked, unsteered, strict=True) if one[0].is_right(text, "context")
    ]
    for way, gate in (("juice", "off"), ("juice, gate", "auto")):
        texts = answers(
            mini,
            [prompt[end:].strip() for _, prompt, end in before],
            Steer(target="parametric", gate=gate),
            context=[prompt[:end].strip() for _, prompt, end in before],
        )
        hits = [e.is_right(t, "context") for (e, *_), t in zip(before, texts, strict=True)]
        row = row_of(result, "parametric", "kept unknown", way)
        assert (row["n"], row["share"]) == (len(before), pytest.approx(sum(hits) / len(hits)))


def test_the_context_wins_where_memory_won_as_generate_says(
    mini: juice.SteeredModel, result: dict[str, Any]
) -> None:
    """Kills: taking the prompts that follow the context for those that stick to memory."""
    stuck, following = facts.by_answer(Answers(mini), FACTS, LIMIT)
    for measured, cases, said in (
        ("won", stuck, "parametric"),
        ("kept follow", following, "context"),
    ):
        prompts = [case.prompt for case in cases]
        before = answers(mini, prompts, NONE)
        assert all(c.example.is_right(t, said) for c, t in zip(cases, before, strict=True))
        after = answers(mini, prompts, Steer(target="context"))
        hits = [c.example.is_right(t, "context") for c, t in zip(cases, after, strict=True)]
        row = row_of(result, "context", measured, "juice")
        assert (row["n"], row["share"]) == (len(cases), pytest.approx(sum(hits) / len(hits)))


def test_conflict_prompts_are_asked_until_enough_stick_to_memory(mini: juice.SteeredModel) -> None:
    everything, following = facts.by_answer(Answers(mini), FACTS, 2 * len(FACTS))
    assert 2 < len(everything) < 2 * len(FACTS)
    assert following
    assert facts.by_answer(Answers(mini), FACTS, 2)[0] == everything[:2]


@pytest.mark.parametrize(("threshold", "steers"), [(0.0, True), (2.0, False)])
def test_a_gate_by_memory_asks_the_prompt_without_its_context(
    mini: juice.SteeredModel, known: list[ConflictExample], threshold: float, steers: bool
) -> None:
    """Kills: leaving out the prompt alone, without which such a gate cannot decide."""
    rule = GateRule(signal="memory", threshold=threshold, n_prompts=1, kept=1.0, side_effects={})
    gate = Gate(chat_template_sha256=None, rules=(rule,))
    (way, *_) = ways_of(mini.head_sets.get("parametric").with_gate("juice", gate))
    cases = endangered_prompts("parametric", known)["unknown"]
    asked = Answers(mini)
    assert asked.has_gate(way, cases)
    assert not asked.has_gate(way, [cases[0]._replace(alone=None)])
    assert asked.texts(cases, way.gated) == asked.texts(cases, way if steers else UNSTEERED)
    assert asked.texts(cases, way) != asked.texts(cases, UNSTEERED)


def test_answers_that_are_kept_are_not_asked_for_again(
    mini: juice.SteeredModel, known: list[ConflictExample], tmp_path: Path
) -> None:
    """Kills: a run of hours that is lost when it is cut off, and an answer of another way."""
    kept_in = tmp_path / "results.answers"
    (way, *_) = ways_of(mini.head_sets.get("parametric"))
    cases = [Case(e.prompts["substitution"], e, "parametric") for e in known]
    steered, plain = (Answers(mini, kept_in=kept_in).texts(cases, w) for w in (way, UNSTEERED))
    assert steered != plain

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("asked again")

    again = Answers(mini, refuse, kept_in)
    assert (again.texts(cases, way), again.texts(cases, UNSTEERED)) == (steered, plain)
    kept_in.write_text(kept_in.read_text()[:-9])
    with pytest.raises(AssertionError, match="asked again"):
        Answers(mini, refuse, kept_in).texts(cases, UNSTEERED)
    assert Answers(mini, kept_in=kept_in).texts(cases, UNSTEERED) == plain
    assert Answers(mini, refuse, kept_in).texts(cases, UNSTEERED) == plain


def test_harm_is_that_of_all_chunks_together(mini: juice.SteeredModel) -> None:
    """The mean over chunks of one length is that over their tokens."""
    chunks = [chunk[:40] for chunk in prose.chunks_of(mini, TEXT, 1500)]
    (way, *_) = ways_of(mini.head_sets.get("context"))
    (row,) = prose.harm(mini, chunks, [way], strengths=[2.0])
    steering = mini.resolve(Steer.of(way.steer, strength=2.0))
    together = ordinary.OrdinaryText(mini.loaded, chunks).harm([steering], silent, "")
    assert len(chunks) == row["n"] == 3
    assert row["divergence"] == pytest.approx(together[0].divergence, rel=1e-4)
    assert row["perplexity"] == pytest.approx(together[0].perplexity, rel=1e-4)
    assert row["interval"][0] < row["divergence"] < row["interval"][1]


def test_prose_that_was_read_is_not_read_again(mini: juice.SteeredModel, tmp_path: Path) -> None:
    """Kills: hours that are lost when a run is cut off, and what another set or strength did."""
    chunks = [chunk[:40] for chunk in prose.chunks_of(mini, TEXT, 1500)]

    def read(target: Target, strength: float) -> tuple[list[Row], int]:
        kept = UnfinishedFile(tmp_path / "results.prose", {})
        (way, *_) = ways_of(mini.head_sets.get(target))
        return list(prose.harm(mini, chunks, [way], [strength], kept=kept)), kept.n_found

    first, again = read("context", 2.0), read("context", 2.0)
    assert (first[1], again) == (0, (first[0], len(chunks)))
    assert read("context", 1.0)[1] == read("parametric", 2.0)[1] == 0


def test_chunks_are_the_text_and_each_begins_as_a_text_does(mini: juice.SteeredModel) -> None:
    whole, bare = mini.tokenize(TEXT), mini.tokenize(TEXT, add_special_tokens=False)
    begin = whole[: len(whole) - len(bare)]
    chunks = prose.chunks_of(mini, TEXT, 1500)
    assert {len(chunk) for chunk in chunks} == {prose.CHUNK}
    assert len(chunks) == math.ceil(1500 / (prose.CHUNK - len(begin)))
    assert all(chunk[: len(begin)] == begin for chunk in chunks)
    joined = tuple(token for chunk in chunks for token in chunk[len(begin) :])
    assert joined == bare[: len(joined)]
    with pytest.raises(UsageError, match="expected at least"):
        prose.chunks_of(mini, "It was late.")


def test_a_chat_answer_is_held_where_a_word_begins_with_it() -> None:
    assert chat.holds("It is the Parisian way.", ["paris"])
    assert not chat.holds("The comparison is odd.", ["paris"])
    assert chat.holds("It costs (100) coins.", ["Rome", "100"])
    assert not chat.holds("It costs 5100 coins.", ["100"])


def test_all_splits_of_a_folder_are_read_and_a_fact_once(tmp_path: Path) -> None:
    one, two, other = EXAMPLES[:3]
    again = one.model_copy(update={"subject": one.subject.lower()})
    for split, examples in (
        ("unfiltered_test", [one, two]),
        ("filtered_validation", [again, other]),
    ):
        (tmp_path / f"facts.{split}.jsonl").write_text("".join(map(to_json_line, examples)))
    found = facts.read_facts([str(tmp_path)])
    assert {e.subject.casefold() for e in found} == {
        e.subject.casefold() for e in (one, two, other)
    }
    assert len(found) == 3


@pytest.mark.parametrize("held_out", [False, True])
def test_a_subject_that_a_set_was_to_leave_alone_is_left_out(
    mini: juice.SteeredModel, *, held_out: bool
) -> None:
    one = open_prompts(is_chat=False, held_out=held_out)[0]
    protected = FACTS[0].model_copy(update={"relation": one.relation, "subject": one.subject})
    sets = [mini.head_sets.get("context")]
    assert facts.others_than(sets, [protected, *FACTS]) == FACTS
    by_hand = [sets[0].model_copy(update={"identification": None})]
    assert facts.others_than(by_hand, [protected, *FACTS]) == [protected, *FACTS]


def test_a_statement_opens_the_reply_in_a_chat() -> None:
    example = EXAMPLES[0]
    assert facts.in_chat(example).opening == example.prompts["clean"]
    asked = example.model_copy(update={"prompts": {"clean": "What is it?"}})
    assert facts.in_chat(asked) == asked


def test_a_model_without_head_sets_is_refused(mini: juice.SteeredModel, tmp_path: Path) -> None:
    library = type(mini.head_sets)(tmp_path, mini.description.identity)
    with pytest.raises(HeadSetNotFoundError, match="find them with `juice identify`"):
        measure.sets_of(mini.with_head_sets(library))


def test_a_gate_needs_the_form_in_which_it_was_measured(mini: juice.SteeredModel) -> None:
    (way, *_) = ways_of(mini.head_sets.get("parametric"))
    assert Answers(mini).has_gate(way, [])
    assert not Answers(mini.with_chat_template()).has_gate(way, [])


def test_parts_that_are_measured_apart_are_joined(result: dict[str, Any]) -> None:
    """Kills: rows twice, rows of a set that has changed, rows of another model."""
    rows = result["rows"]
    of_facts, of_chat = (("parametric", "context", "prose"), ("chat",))
    parts = [
        measure.headed(
            {**result, "rows": [row for row in rows if (row["part"] in of_chat) == is_chat]},
            {"command": f"chat: {is_chat}"},
            of_chat if is_chat else of_facts,
        )
        for is_chat in (False, True)
    ]
    whole = measure.joined(parts[0], parts[1])
    commands = {part: header["command"] for part, header in whole["parts"].items()}
    assert commands == {**dict.fromkeys(of_facts, "chat: False"), "chat": "chat: True"}
    assert whole["parts"]["prose"]["head_sets"] == result["head_sets"]
    assert sorted(map(str, whole["rows"])) == sorted(map(str, rows))
    assert measure.joined(whole, parts[1])["rows"] == whole["rows"]
    changed = deepcopy(parts[1])
    changed["head_sets"]["context"]["seal"] = "another"
    kept = measure.joined(whole, changed)["rows"]
    assert {row["part"] for row in kept} == {"parametric", "chat"}
    other = {**parts[1], "model": {"id": "other"}}
    assert measure.joined(whole, other)["rows"] == other["rows"]
    fewer = {**parts[1], "facts": {"n": 1, "n_excluded": 0}}
    assert measure.joined(whole, fewer)["rows"] == fewer["rows"]


def test_the_table_has_a_line_for_each_row(result: dict[str, Any]) -> None:
    lines = measure.table(result["rows"]).splitlines()
    assert len(lines) == len(ROWS)
    assert all(row["measure"] in line for row, line in zip(result["rows"], lines, strict=True))
