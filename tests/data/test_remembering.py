"""What a model remembers: which answers count, and the examples that are made of them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import juice
from juice.data import memory
from juice.data.example import ConflictExample, prompt_alone, unknown_subjects
from juice.data.memory import (
    examples_of_prompts,
    open_prompts,
    relations,
    remembered_examples,
)
from juice.data.readers.rows import Row
from juice.data.readers.sources import prompts_without_answers
from juice.errors import ExampleError
from juice.progress import Progress, silent

CAPITALS = next(one for one in relations() if one.name == "world_capital")
SUBJECTS = CAPITALS.subjects
# An answer to each subject, whose first letters differ from one to the next.
NAMES = [f"{letter}{'aeiou'[i % 5]}lgar" for i, letter in enumerate("ABCDEFHKLMNPRSTVWZ")]
OTHERS = dict(zip(SUBJECTS[10:], NAMES, strict=False))
CHAT = "ab" * 32
CUT = "Port-au-Pr"  # a reply that is this alone was cut off by the number of tokens


@dataclass(frozen=True)
class Scored:
    logprob: float | None


@dataclass(frozen=True)
class Reply:
    text: str
    tokens: Sequence[Scored]


@dataclass
class Recalling:
    """Answers questions about the subjects that it knows, each in its own words every time.

    Args:
        knows: The reply about a subject, or one for each of the three wordings.
        sure: The probability with which its replies begin, as `knows`; else 0.9.
        chat_template_sha256: The hash of the template that it says it uses.
        asked: What it was asked, so far: the subject, the text and the most tokens.
        times: How often about a subject with so many tokens.
    """

    knows: Mapping[str, str | Sequence[str]]
    sure: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    chat_template_sha256: str | None = None
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    times: Counter[tuple[str, int]] = field(default_factory=Counter)

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        max_tokens: int,
        progress: Progress = silent,  # noqa: ARG002
    ) -> list[Reply]:
        return [self._reply("".join(map(chr, prompt)), max_tokens) for prompt in prompts]

    def _reply(self, text: str, max_tokens: int) -> Reply:
        subject = max((s for s in self.knows if s in text), key=len, default="")
        times = self.times[subject, max_tokens]
        self.times[subject, max_tokens] += 1
        self.asked.append((subject, text, max_tokens))
        if not subject:
            return Reply(" a thing", [Scored(math.log(0.9))])
        replies, sure = self.knows[subject], self.sure.get(subject, (0.9, 0.9, 0.9))[times]
        reply = replies if isinstance(replies, str) else replies[times]
        n_tokens = max_tokens if reply.strip() == CUT else 1
        text = reply[:3] if max_tokens == 1 else reply
        return Reply(text, [Scored(None if sure is None else math.log(sure))] * n_tokens)

    def tokenize(self, prompt: str, *, opening: str = "") -> tuple[int, ...]:
        return tuple(map(ord, f"{prompt}\n{opening}" if opening else prompt))

    def fits(self, prompt: str | Sequence[int], *, max_tokens: int) -> bool:
        return len(prompt) + max_tokens < 4096

    def first_token(self, prompt: str, answer: str, *, opening: str = "") -> int | None:  # noqa: ARG002
        return ord(answer[0])

    def answer_logprobs(
        self, pairs: Sequence[tuple[str, str]], *, progress: Progress = silent
    ) -> list[tuple[float, ...] | None]:
        raise NotImplementedError


def remembered(model: Recalling, **options: object) -> dict[str, ConflictExample]:
    found = remembered_examples(model, **{"relation": "world_capital", **options})
    return {e.subject: e for e in found}


@pytest.mark.parametrize(
    ("replies", "answer"),
    [
        (" Oslo", "Oslo"),
        ((" Oslo. It lies", " Oslo, a city of", "Oslo\nQuestion: Which"), "Oslo"),
        ((" Bahía Azul", " bahia azul", " Bahía Azul"), "Bahía Azul"),
        (" Port of the Kings and of", "Port"),
        ((" Oslo", " Oslo", " Rome"), None),
        ((" Oslo", " Rome", " Oslo"), None),
        ((" the city of Oslo",) * 3, None),
        (" Oslo near the northern sea", None),
        (f" {SUBJECTS[0]} City", None),
        (f" {CUT}", None),
        (f" {CUT}. It", CUT),
        (" ...", None),
        ("", None),
        ("北京。它是首都", "北京"),
    ],
)
def test_what_is_answered_alike_three_times_is_remembered(
    replies: str | tuple[str, ...], answer: str | None
) -> None:
    """Kills: two wordings that are enough, another case or mark that is another answer."""
    found = remembered(Recalling({**OTHERS, SUBJECTS[0]: replies}))
    assert found.keys() >= OTHERS.keys()
    if answer is None:
        assert SUBJECTS[0] not in found
    else:
        assert found[SUBJECTS[0]].parametric_answer == (answer,)


@pytest.mark.parametrize("doubt", [memory.LEAST_CONFIDENCE / 2, None])
@pytest.mark.parametrize("time", range(3))
def test_an_answer_that_is_a_guess_at_any_time_is_not_remembered(
    time: int, doubt: float | None
) -> None:
    sure = [0.9, 0.9, 0.9]
    sure[time] = doubt
    found = remembered(Recalling({**OTHERS, SUBJECTS[0]: " Oslo"}, {SUBJECTS[0]: sure}))
    assert found.keys() == OTHERS.keys()


@pytest.mark.parametrize(
    ("second", "n_begun", "n_answered"), [(" Rome", 2, 0), (" Osaka", 3, 2), ("", 3, 2)]
)
def test_what_was_not_answered_alike_is_not_asked_again(
    second: str, n_begun: int, n_answered: int
) -> None:
    """An answer that begins otherwise is not even read on."""
    model = Recalling({**OTHERS, SUBJECTS[0]: (" Oslo", second, " Oslo")})
    remembered(model)
    begun, answered = (
        Counter(subject for subject, _, n in model.asked if (n == 1) == is_first)
        for is_first in (True, False)
    )
    assert (begun[SUBJECTS[0]], answered[SUBJECTS[0]]) == (n_begun, n_answered)
    assert {(begun[subject], answered[subject]) for subject in OTHERS} == {(3, 3)}


def test_only_a_few_facts_have_the_same_answer() -> None:
    """A model that answers Paris to everything knows little."""
    always = dict.fromkeys(SUBJECTS[:10], " Paris") | dict.fromkeys(SUBJECTS[30:40], " paris!")
    found = remembered(Recalling({**always, **OTHERS}))
    n_alike = sum("paris" in e.parametric_answer[0].lower() for e in found.values())
    assert n_alike == memory.MOST_ALIKE
    assert found.keys() >= OTHERS.keys()


def test_a_false_context_tells_another_answer_that_begins_otherwise_where_one_does() -> None:
    knows = {"Peru": " Lima", "Chad": " Lusaka", "Fiji": " Suva", "Kenya": " Sana", **OTHERS}
    found = remembered(Recalling({s: knows[s] for s in knows if s in SUBJECTS}))
    answers = {e.parametric_answer[0] for e in found.values()}
    assert len(found) > len(OTHERS)
    for e in found.values():
        (told,) = e.context_answer
        assert told in answers
        assert told[0] != e.parametric_answer[0][0]
    two = remembered(Recalling({SUBJECTS[0]: " Lima", SUBJECTS[1]: " Lusaka"}))
    assert [e.context_answer for e in two.values()] == [("Lusaka",), ("Lima",)]
    with pytest.raises(ExampleError, match=r"2 facts, .* another answer of its relation"):
        remembered(Recalling({SUBJECTS[0]: " Lima", SUBJECTS[1]: " Lima"}))


def test_of_two_answers_that_contradict_neither_holds_the_other() -> None:
    """What repeats American football has football in it, too."""
    knows = [" football", " American football", " hockey", " ice hockey"]
    found = remembered(Recalling(dict(zip(SUBJECTS, knows, strict=False))))
    assert len(found) == 4
    for e in found.values():
        assert not e.is_right(f" {e.context_answer[0]}.", "parametric")
        assert not e.is_right(f" {e.parametric_answer[0]}.", "context")
    with pytest.raises(ExampleError):
        remembered(Recalling(dict(zip(SUBJECTS, knows[:2], strict=False))))


def test_an_answer_of_one_or_two_letters_must_be_what_is_said_first() -> None:
    symbols = Recalling(dict(zip(SUBJECTS, (" H", " Cu", " Zn"), strict=False)))
    hydrogen = remembered(symbols)[SUBJECTS[0]]
    assert hydrogen.is_right(" H, the first", "parametric")
    assert not hydrogen.is_right(" Cu, the chemical", "parametric")
    assert not hydrogen.is_right(" not known here", "parametric")


@pytest.mark.parametrize("names", [("北京", "东京"), ("서울", "도쿄")])
def test_a_name_of_two_syllables_is_right_whatever_follows_it(names: tuple[str, str]) -> None:
    """Kills: letters that are counted where a whole name has two of them."""
    found = remembered(Recalling(dict(zip(SUBJECTS, names, strict=False))))[SUBJECTS[0]]
    for behind in ("", "。它是", "是首都", "입니다."):
        assert found.is_right(f"{names[0]}{behind}", "parametric")
        assert not found.is_right(f"{names[0]}{behind}", "context")


@pytest.mark.parametrize("chat", [None, CHAT])
def test_prompts_state_what_is_false_and_end_with_what_was_asked(chat: str | None) -> None:
    """In a chat the statement up to its answer opens the reply."""
    model = Recalling(OTHERS, chat_template_sha256=chat)
    found = remembered(model)
    assert found.keys() == OTHERS.keys()
    asked = {text for _, text, _ in model.asked}
    for subject, e in found.items():
        (right,), (told,) = e.parametric_answer, e.context_answer
        assert (e.relation, right) == ("world_capital", OTHERS[subject])
        assert e.chat_template_sha256 == chat
        statements = [
            s.replace("{s}", subject).replace("{a}", "|").lower() for s in CAPITALS.statements
        ]
        clean, substitution, coherent = (
            e.prompts[kind] for kind in ("clean", "substitution", "coherent")
        )
        lead = e.opening if chat else clean
        assert f"{lead} |.".lower() in statements
        assert "".join(map(chr, model.tokenize(clean, opening=e.opening))) in asked
        questions = [q.replace("{s}", subject) for q in CAPITALS.questions]
        if chat:
            assert clean in questions
        else:
            assert e.opening == ""
        for kind, prompt in (("substitution", substitution), ("coherent", coherent)):
            assert right not in prompt
            false = prompt[: prompt.index(".") + 1]
            assert false.lower().replace(told.lower(), "|") in statements
            alone = prompt_alone(e, kind)
            assert prompt.endswith(alone)
            assert alone == clean or alone in asked
            assert alone != prompt
        assert substitution.endswith(f". {clean}")
        assert coherent.count(told) - 1 in memory.N_SUPPORTS


def test_the_same_seed_finds_the_same_examples_and_another_one_others() -> None:
    first, again, other = (
        remembered_examples(Recalling(OTHERS), relation="world_capital", seed=seed)
        for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other
    assert {e.subject for e in first} == {e.subject for e in other}


def test_asking_ends_when_enough_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "N_ASKED_AT_ONCE", 20)
    model = Recalling(dict.fromkeys(SUBJECTS, "") | OTHERS)
    assert len(remembered(model, n=5)) == 5
    n_subjects = len({subject for subject, *_ in model.asked})
    assert n_subjects % 20 == 0
    assert n_subjects < len(SUBJECTS)


def test_relations_take_turns() -> None:
    """None comes twice before every one came once."""
    model = Recalling({})
    with pytest.raises(ExampleError, match=r"none of \d+ subjects.*--examples"):
        remembered_examples(model)
    first = [text for _, text, _ in model.asked[: len(relations())]]
    for one in relations():
        before, after = one.statements[0].removesuffix(" {a}.").lower().split("{s}")
        asked = [t for t in first if t.lower().startswith(before) and t.endswith(after)]
        assert asked, one.name
    n_read_on = sum(n > 1 for *_, n in model.asked)
    assert n_read_on == sum(len(one.subjects) for one in relations())


def test_prompts_that_leave_open_what_is_said_are_about_sixteen_subjects_of_each_relation() -> None:
    plain, in_chat = (open_prompts(is_chat=is_chat, seed=3) for is_chat in (False, True))
    assert Counter(one.relation for one in plain) == {one.name: 16 for one in relations()}
    assert len({(one.relation, one.subject) for one in plain}) == len(plain)
    assert [(one.relation, one.subject) for one in in_chat] == [
        (one.relation, one.subject) for one in plain
    ]
    for one, asked in zip(plain, in_chat, strict=True):
        assert one.subject.casefold() in one.prompt.casefold()
        assert asked.prompt.endswith("?")
        # A fifth of them are questions alone.
        if asked.opening:
            assert (one.prompt, one.opening) == (asked.opening, "")
        else:
            assert one.prompt == f"Question: {asked.prompt} Answer:"
    assert 0.1 < sum(not one.opening for one in in_chat) / len(in_chat) < 0.3
    assert open_prompts(is_chat=False, seed=3) == plain
    assert open_prompts(is_chat=False, seed=4) != plain


def test_those_held_out_are_about_eight_other_subjects_of_each_relation() -> None:
    """Kills: a prompt that is measured on and learned from."""
    learned, held_out = (open_prompts(is_chat=False, seed=3, held_out=h) for h in (False, True))
    left = {one.name: len(one.subjects) - 16 for one in relations()}
    assert Counter(one.relation for one in held_out) == {k: min(8, n) for k, n in left.items() if n}
    assert sum(n >= 8 for n in left.values()) > 0.8 * len(left)
    subjects, others = ({(o.relation, o.subject) for o in made} for made in (learned, held_out))
    assert len(others) == len(held_out)
    assert not subjects & others


def test_a_relation_that_is_not_there_is_an_error_that_names_those_that_are() -> None:
    with pytest.raises(ExampleError, match=r"no relation is called 'love'; expected .*capital"):
        remembered_examples(Recalling({}), relation="love")


@pytest.mark.parametrize("is_chat", [False, True])
def test_mini_remembers_facts_and_answers_its_examples_right(
    mini: juice.SteeredModel, monkeypatch: pytest.MonkeyPatch, *, is_chat: bool
) -> None:
    monkeypatch.setattr(memory, "N_ASKED_AT_ONCE", 30)
    model = mini.with_chat_template() if is_chat else mini
    found = remembered_examples(model, n=12, relation="world_capital")
    known = {
        e.subject: e.parametric_answer
        for e in juice.read_examples("mini")
        if e.relation == "world_capital"
    }
    assert sum(e.parametric_answer[0] in known.get(e.subject, ()) for e in found) > 8
    for e in found:
        ids = model.tokenize(e.prompts["clean"], opening=e.opening)
        (done,) = model.generate([ids], max_tokens=8)
        assert e.is_right(done.text, "parametric")
        assert bool(e.opening) == is_chat


PROMPTS = [
    {"prompt": "Which town does Ada live in?", "relation": "home", "subject": "Ada"},
    {"prompt": "The town where Bob lives is", "relation": "home", "context": "Bob moved to Oslo."},
    {"prompt": "The number of the bus is", "relation": "bus"},
]
KNOWN = {"Ada": " Lima", "Bob": " Oslo", "bus": " Seven"}


def asked(rows: Sequence[Mapping[str, str]], **options: object) -> list[ConflictExample]:
    model = Recalling(KNOWN, chat_template_sha256=options.pop("chat", None))
    given = [Row(f"row {i}", dict(row)) for i, row in enumerate(rows, 1)]
    return examples_of_prompts(model, given, **options)


@pytest.mark.parametrize("chat", [None, CHAT])
def test_prompts_without_answers_contradict_each_other_within_a_relation(chat: str | None) -> None:
    """Kills: another relation's answer, a passage that is left as it was, answers swapped."""
    ada, bob = sorted(asked(PROMPTS, chat=chat), key=lambda e: e.parametric_answer)
    assert (ada.parametric_answer, ada.context_answer) == (("Lima",), ("Oslo",))
    assert (bob.parametric_answer, bob.context_answer) == (("Oslo",), ("Lima",))
    assert bob.prompts["coherent"].startswith("Bob moved to Lima.")
    assert "Oslo" not in bob.prompts["coherent"]
    assert "Which town does Ada live in?" in ada.prompts["clean"]
    assert "Oslo" in ada.prompts["substitution"]
    assert bool(ada.opening) == bool(bob.opening) == bool(chat)


def test_prompts_in_chinese_are_joined_without_spaces() -> None:
    """Kills: a question that is completed as a statement, and the space before an answer."""
    prompts = ("中国的首都是", "日本的首都是哪里？", "韩国的首都是")
    rows = [{"prompt": text, "relation": "capital"} for text in prompts]
    model = Recalling({"中国": "北京。", "日本": "东京。", "韩国": "首尔。"})
    found = examples_of_prompts(model, [Row(f"row {i}", row) for i, row in enumerate(rows)])
    china, japan, _ = (next(e for e in found if e.subject == text) for text in prompts)
    told = china.prompts["substitution"]
    assert f"中国的首都是{china.context_answer[0]}." in told
    assert not any("Complete the sentence" in text for text in japan.prompts.values())
    assert unknown_subjects(found, 0) == []


@pytest.mark.parametrize("chat", [None, CHAT])
def test_a_prompt_that_stands_for_its_subject_is_no_name(chat: str | None) -> None:
    """Kills: "The Quakooth of Peru is Oslo", in whichever wording a prompt is asked."""
    begun = [f"The town where {name} lives is" for name in ("Ada", "Bob", "Cyd")]
    rows = [{"prompt": text, "relation": "home"} for text in begun]
    knows = {"Ada": " Lima", "Bob": " Oslo", "Cyd": " Rome"}
    for seed in range(6):
        model = Recalling(knows, chat_template_sha256=chat)
        given = [Row(f"row {i}", dict(row)) for i, row in enumerate(rows)]
        found = examples_of_prompts(model, given, seed=seed)
        assert len(found) == 3
        assert unknown_subjects(found, 0) == []


def test_prompts_with_a_relation_each_lack_an_answer_that_contradicts_them() -> None:
    """Kills: a complaint that the model does not know what it was asked."""
    alone = [{**row, "relation": f"of row {i}"} for i, row in enumerate(PROMPTS)]
    with pytest.raises(ExampleError, match=r"3 facts, .*; give more prompts of each relation"):
        asked(alone)
    with pytest.raises(ExampleError, match="in three wordings about none of 1 subjects"):
        asked([{"prompt": "The name of the dog is"}])


def test_a_row_without_a_prompt_is_named() -> None:
    with pytest.raises(ExampleError, match="row 2 has no prompt; expected a question"):
        asked([PROMPTS[0], {"relation": "home"}])


def test_only_rows_with_prompts_and_no_answers_are_asked_about(tmp_path: Path) -> None:
    """Kills: a file of examples, or the name of a source, that is taken for prompts."""
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    assert [row.values["prompt"] for row in prompts_without_answers(file)] == [
        row["prompt"] for row in PROMPTS
    ]
    assert len(prompts_without_answers(PROMPTS)) == len(PROMPTS)
    assert not prompts_without_answers([{**PROMPTS[0], "answer": "Lima"}])
    assert not prompts_without_answers("mini")
    assert not prompts_without_answers(juice.read_examples("mini")[:2])
