"""From a user's own data: conflict examples, and rows for fine-tuning that need their context."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import juice
from juice.data.conflicts import make_conflicts
from juice.data.critical import mark_critical
from juice.data.fields import columns_of, texts_of
from juice.data.judging import contains_answer, normalise
from juice.data.kinds import kind_of
from juice.data.passage import find, replace, sentences_with
from juice.data.readers.rows import Row
from juice.errors import ExampleError, OutputError, UsageError
from juice.files import write_lines
from juice.identification import IdentificationOptions
from juice.identification.drawing import usable_examples
from juice.steered_model import SteeredModel
from tests.support import tiny
from tests.support.commands import invoke

RELATIVE = 1e-4  # fp32 log-probabilities, exponentiated
KNOWN = "What is the capital city of Luxembourg"  # mini begins: The capital city of Luxembourg is


@pytest.fixture(scope="module")
def mini() -> SteeredModel:
    return juice.load("mini")


def rows(*values: dict[str, Any]) -> list[Row]:
    return [Row(f"data:{i}", row) for i, row in enumerate(values, 1)]


def languages(n: int = 40) -> list[dict[str, Any]]:
    """Return rows about official languages, with true passages; mini knows about an eighth."""
    facts = [e for e in juice.read_examples("mini") if e.relation == "official_language"][:n]
    return [
        {
            "question": f"What is the official language of {e.subject}?",
            "context": (
                f"{e.subject} has many towns. Schools there teach in {e.parametric_answer[0]}. It"
                " rains."
            ),
            "answers": list(e.parametric_answer),
            "subject": e.subject,
            "relation": "official_language",
        }
        for e in facts
    ]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("1969", "date"), ("1960s", "date"), ("44 BC", "date"), ("May 5, 1990", "date"),
        ("5 May", "date"), ("July", "date"), ("2001-09-11", "date"),
        ("42", "number"), ("3.5", "number"), ("1,234,567", "number"), ("$40", "number"),
        ("12 %", "number"), ("-3", "number"), ("7 million", "number"), ("10000", "number"),
        ("Lima", "name"), ("the United States of America", "name"), ("Vincent van Gogh", "name"),
        ("Apollo 11", "name"), ('"Ulysses"', "name"),
        ("a red car", "other"), ("photosynthesis", "other"), ("the", "other"), ("ножом", "other"),
        ("42 is the answer", "other"),
    ],
)  # fmt: skip
def test_the_kind_of_an_answer_is_judged_by_its_form(answer: str, kind: str) -> None:
    assert kind_of(answer) == kind


@pytest.mark.parametrize(
    ("passage", "answers", "expected"),
    [
        (
            "Lima is old; lima beans, Limassol, LIMA.",
            ["Lima"],
            "<> is old; <> beans, Limassol, <>.",
        ),
        ("He told us of the US and the USA.", ["US"], "He told us of the <> and the USA."),
        ("New York City, New York and York", ["New York", "New York City"], "<>, <> and York"),
        (
            "It has 5 doors, 5.5 rooms, 1,5 cats, 15 mice and 5.",
            ["5"],
            "It has <> doors, 5.5 rooms, 1,5 cats, 15 mice and <>.",
        ),
        ("It cost $5 (five) in C++.", ["$5", "C++"], "It cost <> (five) in <>."),
        ("Zoë's house, Zoëlla", ["Zoë"], "<>'s house, Zoëlla"),
        ("Peru", ["Lima"], "Peru"),
    ],
)
def test_an_answer_is_replaced_wherever_it_occurs_as_whole_words(
    passage: str, answers: list[str], expected: str
) -> None:
    swapped, placed = replace(passage, find(passage, answers), "<>")
    assert swapped == expected
    assert [start for start, _ in placed] == [
        i for i in range(len(expected)) if expected.startswith("<>", i)
    ]


@pytest.mark.parametrize(
    ("passage", "answer", "expected"),
    [
        ("One. Two Lima. Three.", "Lima", "Two Lima."),
        ("Lima! Is it? No. Lima it is.", "Lima", "Lima! Lima it is."),
        ("Dr. J. Smith saw Lima. He left.", "Lima", "Dr. J. Smith saw Lima."),
        (
            "It is approx. two miles to Lima, e.g. by bus. So.",
            "Lima",
            "It is approx. two miles to Lima, e.g. by bus.",
        ),
        ('He said "Lima." Then he left.', "Lima", 'He said "Lima."'),
        ("They read Help! By Us. Then they slept.", "Help! By Us", "They read Help! By Us."),
        ("no stop at all in Lima", "Lima", "no stop at all in Lima"),
    ],
)
def test_the_sentences_that_hold_an_answer_are_whole(
    passage: str, answer: str, expected: str
) -> None:
    assert sentences_with(passage, find(passage, [answer])) == expected


def test_examples_are_made_of_what_the_model_answers_right_without_the_passage(
    mini: SteeredModel,
) -> None:
    """The oracle asks one question at a time."""
    data = languages()
    made = make_conflicts(mini, rows(*data))
    known = []
    for row in data:
        answer = mini.generate(f"Question: {row['question']} Answer:", max_tokens=15)[0].text
        known += [row] if contains_answer(answer, row["answers"]) else []
    assert 2 <= len(known) < len(data)
    assert [e.subject for e in made.examples] == [row["subject"] for row in known]
    assert made.dropped["not_known"] == len(data) - len(known)
    everybodys = {row["answers"][0] for row in data}
    for example, row in zip(made.examples, known, strict=True):
        (new,) = example.context_answer
        assert new in everybodys
        assert not any(
            normalise(new) in normalise(a) or normalise(a) in normalise(new) for a in row["answers"]
        )
        assert (
            example.context
            == f"{row['subject']} has many towns. Schools there teach in {new}. It rains."
        )
        clean = f"Question: {row['question']} Answer:"
        assert example.question == clean
        assert example.prompts == {
            "clean": clean,
            "substitution": f"Schools there teach in {new}. {clean}",
            "coherent": f"{example.context} {clean}",
        }
        assert set(example.parametric_answer) == set(row["answers"])
        assert contains_answer(
            mini.generate(clean, max_tokens=15)[0].text, [example.answer("parametric")]
        )


def test_examples_that_were_made_can_be_used_to_identify_heads(mini: SteeredModel) -> None:
    made = make_conflicts(mini, rows(*languages(60))).examples
    drawn, rest = usable_examples(mini, made, IdentificationOptions(n_examples=4))
    assert len(drawn) == 4
    assert len(rest) == len(made) - 4


def test_a_seed_fixes_the_answers_that_are_swapped_in_and_they_vary(mini: SteeredModel) -> None:
    data = languages(60)
    swapped = [
        [e.context_answer for e in make_conflicts(mini, rows(*data), seed=seed).examples]
        for seed in (0, 0, 1)
    ]
    assert swapped[0] == swapped[1] != swapped[2]
    assert len(set(swapped[0])) > len(swapped[0]) / 2


def fact(**changes: Any) -> dict[str, Any]:
    return {
        "question": KNOWN,
        "context": "It is Luxembourg. It rains.",
        "answer": "Luxembourg",
        **changes,
    }


# The model does not know this.
OTHER = fact(question="Who knows", context="Nobody knows Vienna.", answer="Vienna")
DROPPED = {
    "malformed": fact(answer=" "),
    "answer_not_in_context": fact(context="It is Luxembourgish."),
    "not_known": fact(answer="Vaduz", context="It is Vaduz."),
    "no_other_answer": fact(kind="duchy"),
    "same_first_token": fact(
        answer="city of Luxembourg", context="The city of Luxembourg.", kind="city"
    ),
    "too_long": fact(context=f"It is Luxembourg {'and so on ' * 300}."),
}


@pytest.mark.parametrize("reason", DROPPED)
def test_every_row_that_is_dropped_is_counted_with_its_reason(
    mini: SteeredModel, reason: str
) -> None:
    city = fact(
        question="Who knows",
        context="Nobody knows the city of stone.",
        answer="city of stone",
        kind="city",
    )
    made = make_conflicts(mini, rows(fact(), DROPPED[reason], OTHER, city))
    assert len(made.examples) == 1
    others = {"not_known": 2}  # OTHER and the city
    expected = {**others, reason: others.get(reason, 0) + 1}
    assert {r: n for r, n in made.dropped.items() if n} == expected


@pytest.mark.parametrize("other", ["Luxembourg City", "luxembourg", "Luxe", "Grand Duchy"])
def test_an_answer_that_is_part_of_an_accepted_one_or_holds_it_is_not_swapped_in(
    mini: SteeredModel, other: str
) -> None:
    question = fact(answer=["Luxembourg", "Grand Duchy of Luxembourg"])
    made = make_conflicts(
        mini,
        rows(
            fact(kind="rare"),
            question,
            {**OTHER, "answer": other},
            {**OTHER, "answer": "Vienna", "kind": "rare"},
        ),
    )
    assert made.dropped["no_other_answer"] == 1


def test_a_question_too_long_to_ask_is_counted_and_not_asked(mini: SteeredModel) -> None:
    made = make_conflicts(mini, rows(fact(), OTHER, fact(question="why " * 600)))
    assert made.dropped["too_long"] == 1


def test_a_passage_of_one_sentence_gives_no_coherent_prompt(mini: SteeredModel) -> None:
    made = make_conflicts(mini, rows(fact(), fact(context="The capital is  Luxembourg."), OTHER))
    assert [set(e.prompts) for e in made.examples] == [
        {"clean", "substitution", "coherent"},
        {"clean", "substitution"},
    ]
    assert made.n_without_coherent == 1


def test_without_a_single_example_the_error_counts_the_reasons(mini: SteeredModel) -> None:
    with pytest.raises(
        ExampleError,
        match=(
            r"no conflict example can be made: 1 lack a question.*; 1 ask what the model does not"
            r" know"
        ),
    ):
        make_conflicts(mini, rows(OTHER, DROPPED["malformed"]))


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ("Lima", ("Lima",)),
        (42, ("42",)),
        (["Lima", " Lima ", "LIMA"], ("Lima", "LIMA")),
        ('["Lima", "Ciudad"]', ("Lima", "Ciudad")),
        ("[sic]", ("[sic]",)),
        ({"text": ["Lima"], "answer_start": [3]}, ("Lima",)),
        ("", ()),
        (None, ()),
        (True, ()),
        ([], ()),
        (["Lima", None], ()),
        ("[" * 100_000, ("[" * 100_000,)),
    ],
)
def test_answers_are_read_however_a_data_set_writes_them(
    value: Any, texts: tuple[str, ...]
) -> None:
    assert texts_of(value) == texts


def test_columns_may_have_other_names_and_a_missing_one_is_reported() -> None:
    fields = {"question": ("question", "instruction"), "context": ("context",)}
    data = rows({"instruction": "q", "passage": "c"})
    assert columns_of(data, fields, ("question", "context"), {"context": "passage"}) == {
        "question": "instruction",
        "context": "passage",
    }
    with pytest.raises(
        ExampleError,
        match=(
            "no column context; the rows have instruction, passage: name yours with --columns"
            " context=NAME"
        ),
    ):
        columns_of(data, fields, ("question", "context"), {})
    with pytest.raises(ExampleError, match="column 'p'; the rows have instruction"):
        columns_of(data, fields, (), {"context": "p"})
    with pytest.raises(UsageError, match="field 'contxt'; expected one of question, context"):
        columns_of(data, fields, (), {"contxt": "passage"})


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


def finetuning(*answers: str) -> list[Row]:
    return rows(
        *(
            {"question": f"Word {i} of them is", "context": "c", "answer": answer}
            for i, answer in enumerate(answers)
        )
    )


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
    odd += [{"question": "q", "context": "c", "answer": "a " * 600}]
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


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    def failing() -> Any:
        yield "new\n"
        raise KeyboardInterrupt

    path = tmp_path / "sub" / "out.jsonl"
    write_lines(path, ["old\n"], overwrite=False)
    with pytest.raises(KeyboardInterrupt):
        write_lines(path, failing(), overwrite=True)
    with pytest.raises(OutputError, match="--force"):
        write_lines(path, ["new\n"], overwrite=False)
    assert path.read_text() == "old\n"
    write_lines(path, ["né\n"], overwrite=True)
    assert path.read_bytes() == "né\n".encode()
    assert [file.name for file in path.parent.iterdir()] == ["out.jsonl"]


def test_the_command_makes_a_file_that_can_be_read_again(tmp_path: Path) -> None:
    data, out = tmp_path / "rag.csv", tmp_path / "out.jsonl"
    with data.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["q", "passage", "answers", "popularity"])
        writer.writeheader()
        for row in languages(60):
            writer.writerow(
                {
                    "q": row["question"],
                    "passage": row["context"],
                    "answers": json.dumps(row["answers"]),
                    "popularity": 7,
                }
            )
    code, stdout, stderr = invoke(
        "examples",
        str(data),
        "--out",
        str(out),
        "--columns",
        "question=q,context=passage",
        "--json",
    )
    assert code == 0, stderr
    report = json.loads(stdout)
    examples = juice.read_examples(out)
    assert report["n_examples"] == len(examples) >= 4
    assert report["n_rows"] == 60 == report["n_examples"] + sum(report["dropped"].values())
    assert (
        f"{report['dropped']['not_known']} dropped: they ask what the model does not know" in stderr
    )
    assert {e.popularity for e in examples} == {7}
    assert {e.relation for e in examples} == {"name"}
    code, stdout, stderr = invoke(
        "examples",
        str(data),
        "--out",
        str(out),
        "--columns",
        "question=q,context=passage",
        "--limit",
        "50",
        "--force",
    )
    assert (code, stdout) == (0, f"{out}\n"), stderr
    assert " from 50 rows" in stderr


def test_the_command_writes_every_row_or_the_critical_ones(tmp_path: Path) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text(
        "".join(
            json.dumps({**row.values, "id": i}) + "\n"
            for i, row in enumerate(finetuning("Lima", "Oslo", "Rome", "Bonn"))
        )
    )
    code, stdout, stderr = invoke("split", str(data), "--out", str(out), "--json")
    assert code == 0, stderr
    marked = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in marked] == [0, 1, 2, 3]
    assert json.loads(stdout)["n_critical"] == sum(row["context_critical"] for row in marked) == 3
    assert invoke("split", str(data), "--out", str(out), "--drop", "--force")[:2] == (0, f"{out}\n")
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        row for row in marked if row["context_critical"]
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("examples @rows --out @rows", "--force"),
        ("split @rows --out @rows", "--force"),
        ("examples @rows --out @", "is not a file"),
        ("examples @rows --out @rows/x", "cannot write"),
        ("examples @rows --out @out --limit 0", "--limit is 0"),
        ("examples @rows --out @out --columns question", "--columns is 'question'"),
        ("examples @rows --out @out --columns question=x", "column 'x'"),
        ("examples @rows --out @out", "no column context"),
        ("examples @nowhere --out @out", "cannot read"),
        ("split @rows --out @out --share 1.5", "share is 1.5"),
        ("split @rows --out @out", "no column context or input"),
    ],
)
def test_a_mistake_is_reported_in_one_line_before_any_work(
    tmp_path: Path, arguments: str, named: str
) -> None:
    (tmp_path / "rows").write_text('{"question": "q", "answer": "a"}')
    code, stdout, stderr = invoke(
        *arguments.replace("@", f"{tmp_path}/").split(), "--model", "./nowhere"
    )
    assert (code, stdout) == (2, "")
    assert named in " ".join(stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
