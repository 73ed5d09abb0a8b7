"""Where examples come from: every format and source, and the errors for what cannot be read."""

from __future__ import annotations

import csv
import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

from juice.data.example import question_prompt, to_json_line
from juice.data.readers.formats import without_tags
from juice.data.readers.sources import read_examples, read_rows
from juice.errors import ExampleError
from tests.data import NQSWAP

OURS = {
    "subject": "Peru",
    "parametric_answer": ["Lima"],
    "context_answer": "Oslo",
    "prompts": {"clean": "The capital of Peru is"},
}
PARACONFLICT = {
    "Subject": "Chad",
    "Answer": "Arabic",
    "Answer_ns": ["French", "Arabic"],
    "Distracted Token": "Welsh",
    "Clean Prompt": "In Chad they speak",
    "Substitution Conflict": "In Chad they speak Welsh. In Chad they speak",
    "Coherent Conflict": "Welsh is heard all over Chad. In Chad they speak",
}
MEMOTRAP = {
    "prompt": 'Write a line that ends in "sand": The river runs to the',
    "classes": "[' sea.', ' sand.']",
    "answer_index": "1",
}

CONFIQA = {
    "question": "In which city did the founder of Acme study?",
    "orig_context": "Acme was founded by Ann Lee, who studied in Graz.",
    "orig_answer": "Graz",
    "orig_alias": ["Gratz", ""],
    "cf_context": "Acme was founded by Bo Kim, who studied in Turku.",
    "cf_answer": "Turku",
    "cf_alias": [],
    "orig_path_labeled": [["Acme", "founded by", "Ann Lee"], ["Ann Lee", "educated in", "Graz"]],
}
FAITHEVAL = {
    "id": "1",
    "question": "What do plants take in to make food?",
    "context": "In the valley, plants take in moonlight to make food.",
    "choices": {"label": ["A", "B", "C"], "text": ["sunlight", "moonlight", "soil"]},
    "answerKey": "B",
}

UNANSWERABLE = {
    "qid": "a1",
    "question": "Who built the mill?",
    "context": "The mill stands on a hill.",
    "answers": ["unknown", "no answer"],
}
INCONSISTENT = {
    "qid": "b1",
    "question": "What colour is the door?",
    "context": "Document: The door is red.\nDocument: The door is blue.",
    "answers": ["red", "blue"],
}
MQUAKE = {
    "case_id": 1,
    "requested_rewrite": [
        {
            "prompt": "The mayor of {} is",
            "subject": "Oldtown",
            "target_new": {"str": "Bo Kim", "id": "Q2"},
            "target_true": {"str": "Ann Lee", "id": "Q1"},
        },
        {
            "prompt": "{} was born in",
            "subject": "Bo Kim",
            "target_new": {"str": "Turku", "id": "Q4"},
            "target_true": {"str": "Oulu", "id": "Q3"},
        },
    ],
    "questions": ["Where was the mayor of Oldtown born?", "In which city was he born?"],
    "answer": "Graz",
    "answer_alias": ["Gratz"],
    "new_answer": "Turku",
    "new_answer_alias": [],
}
CUB = [
    {
        "id": i,
        "subject": "Ada",
        "template": "<subject-w-space>speaks",
        "template_w_context": context,
        "target_true": "Dutch",
        "target_new": new,
        "context_type": kind,
    }
    for i, (kind, new, context) in enumerate(
        [
            ("gold", "Dutch", "Fact: <subject> speaks <target>."),
            ("edited", "Welsh", "Fact: <subject> speaks <target>.\n<subject-w-space>speaks"),
            ("irrelevant", None, "Fact: the river is long."),
        ]
    )
]
DRUID = [
    {
        "claim": "The lake has dried up.",
        "claimant": "A NEIGHBOUR",
        "evidence": evidence,
        "context_type": kind,
        "target_true": "False",
        "target_new": new,
    }
    for kind, new, evidence in [
        ("edited", "True", "There is no water left."),
        ("gold", "False", "People still swim in it."),
    ]
]


def tristate(benchmark: str, fact: str, passage: str, gold: str, **more: str) -> list[dict]:
    """Return the two rows of a case, with its passage and without."""
    row = {
        "input_index": 0,
        "benchmark": benchmark,
        "gold_answers": [gold],
        "fact_id": fact,
        **more,
    }
    asked = f"Question: Who is {fact}? ?\nAnswer:"
    return [
        {**row, "assigned_process": 0, "context_string": f"{passage} \nAs told: {asked}"},
        {**row, "assigned_process": 1, "context_string": f"Say: {asked}"},
    ]


TEXT = datasets.Value("string")
FEATURES = datasets.Features(
    subject=TEXT,
    parametric_answer=datasets.List(TEXT),
    context_answer=TEXT,
    popularity=datasets.Value("float64"),
    prompts={"clean": TEXT, "coherent": TEXT},
)


def write_json(path: Path, *rows: Any) -> Path:
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return path


def write_csv(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    """Stand in for the hub: data sets by name, which the library itself loads from JSON files."""
    sets: dict[str, Any] = {}
    load = datasets.load_dataset

    def load_dataset(name: str) -> Any:
        splits = sets[name] if isinstance(sets[name], dict) else {"test": sets[name]}
        files = {
            split: str(write_json(tmp_path / f"{split}.hub.json", *rows))
            for split, rows in splits.items()
        }
        return load("json", data_files=files, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return sets


def test_a_paraconflict_row_keeps_its_scored_answer_first_and_its_context_apart(
    tmp_path: Path,
) -> None:
    (example,) = read_examples(
        write_json(tmp_path / "official_language.unfiltered_test.json", PARACONFLICT)
    )
    assert example.parametric_answer == ("Arabic", "French")
    assert example.context_answer == ("Welsh",)
    assert example.relation == "official_language"
    assert example.context == "In Chad they speak Welsh."
    assert example.question == "In Chad they speak"
    assert example.prompts["substitution"] == f"{example.context} {example.question}"
    assert example.match == "contains"


def test_a_paraconflict_context_is_left_out_when_the_prompt_does_not_end_with_the_question(
    tmp_path: Path,
) -> None:
    row = {**PARACONFLICT, "Substitution Conflict": "Welsh is the language of Chad, they say"}
    (example,) = read_examples(write_json(tmp_path / "a.json", row))
    assert (example.context, example.question) == (None, None)


def test_rows_without_a_conflict_are_left_out_with_one_warning_for_all_files(
    tmp_path: Path,
) -> None:
    same = {**PARACONFLICT, "Subject": "Mali", "Distracted Token": "french"}
    write_json(tmp_path / "a.json", PARACONFLICT, same)
    write_json(tmp_path / "b.json", same)
    with pytest.warns(
        UserWarning,
        match="2 rows are left out; first: .*row 2: the context answer 'french' of 'Mali'",
    ) as caught:
        assert [e.subject for e in read_examples(tmp_path)] == ["Chad"]
    assert len(caught) == 1


def test_the_context_answer_of_a_memotrap_row_is_the_ending_asked_for(tmp_path: Path) -> None:
    (example,) = read_examples(write_csv(tmp_path / "1-proverb-ending.csv", MEMOTRAP))
    assert example.context_answer == ("sand",)
    assert example.parametric_answer == ("sea",)
    assert example.prompts == {"substitution": MEMOTRAP["prompt"]}
    assert example.context == 'Write a line that ends in "sand":'
    assert example.question == example.subject == "The river runs to the"
    assert (example.relation, example.match) == ("proverb_ending", "begins")


def test_a_memotrap_question_of_several_lines_is_split_after_its_first(tmp_path: Path) -> None:
    row = {
        "prompt": "What was believed before: ships sail\nA. They sink.\nB. They fly.\nAnswer:",
        "classes": '[" A", " B"]',
        "answer_index": "0",
    }
    (example,) = read_examples(write_csv(tmp_path / "4-history-of-science-qa.csv", row))
    assert example.context == "What was believed before: ships sail"
    assert example.question == "A. They sink.\nB. They fly.\nAnswer:"
    assert (example.context_answer, example.parametric_answer) == (("A",), ("B",))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"classes": "__import__('os').getcwd()"}, "classes"),
        ({"classes": "[' one.']"}, "classes"),
        ({"classes": "(" * 5000}, "classes"),
        ({"classes": "[1, 2]"}, "classes"),
        ({"answer_index": "2"}, "answer_index is '2'; expected a number from 0 to 1"),
        ({"answer_index": "-1"}, "answer_index"),
        ({"prompt": " "}, "prompt is"),
    ],
)
def test_a_malformed_memotrap_row_is_named_with_its_field(
    tmp_path: Path, changes: dict, named: str
) -> None:
    with pytest.raises(ExampleError, match=named) as caught:
        read_examples(
            write_csv(tmp_path / "1-proverb-ending.csv", MEMOTRAP, {**MEMOTRAP, **changes})
        )
    assert "1-proverb-ending.csv:3" in str(caught.value)


def test_cells_of_csv_hold_lists_and_objects_as_json_or_as_python_writes_them(
    tmp_path: Path,
) -> None:
    given = {**OURS, "subject": "Perú", "controls": {}, "popularity": 2.5, "n_words": 3}
    bare = {**OURS, "controls": "", "popularity": "", "n_words": ""}
    expected = read_examples([given, OURS])
    for write in (json.dumps, str):
        lists = [
            {k: write(v) if isinstance(v, list | dict) else v for k, v in row.items()}
            for row in (given, bare)
        ]
        assert read_examples(write_csv(tmp_path / "ours.csv", *lists)) == expected
    nulls = {**OURS, "prompts": str({**OURS["prompts"], "coherent": None})}
    (example,) = read_examples(write_csv(tmp_path / "nulls.csv", nulls))
    assert set(example.prompts) == {"clean"}
    swap = {**NQSWAP, "org_answer": "['Rosa', \"Rosa Bell\"]", "sub_answer": '["Hugo"]'}
    (example,) = read_examples(write_csv(tmp_path / "nq.csv", swap))
    assert (example.parametric_answer, example.context_answer) == (("Rosa", "Rosa Bell"), ("Hugo",))


@pytest.mark.parametrize(
    "text",
    ["[INST] Who? [/INST]", "[sic]", "{a}", "[b'a']", "[" * 9000 + "]", r"['\\d' '", r'["\ud800"]'],
)
def test_a_cell_in_brackets_that_is_no_list_stays_text(tmp_path: Path, text: str) -> None:
    file = write_csv(tmp_path / "a.csv", {"a": text})
    assert [row.values for row in read_rows(file)] == [{"a": text}]


@pytest.mark.parametrize(
    "text",
    [
        "['Rosa' 'Rosa Bell']",
        "[\"O'Neill\"\n 'Rosa' ... 'Bell']",
        "array(['Rosa'], dtype=object)",
        "{'label': array(['A'], dtype=object)}",
    ],
)
def test_a_list_as_numpy_writes_it_is_refused(tmp_path: Path, text: str) -> None:
    """Python would read the first as one answer, 'RosaRosa Bell'."""
    with pytest.raises(ExampleError, match=r"a\.csv:3: b is a list as NumPy writes it.*as JSON"):
        read_rows(write_csv(tmp_path / "a.csv", {"a": "x", "b": "y"}, {"a": "x", "b": text}))


def test_an_nqswap_row_has_its_question_after_the_swapped_passage(tmp_path: Path) -> None:
    (example,) = read_examples(
        write_json(tmp_path / "nq.json", {**NQSWAP, "question": "who painted the ceiling ?"})
    )
    assert example.parametric_answer == ("Rosa", "Rosa Bell")
    assert example.context_answer == ("Hugo",)
    assert example.context == "Hugo painted it ."
    assert (
        example.prompts["clean"] == example.question == "Question: who painted the ceiling? Answer:"
    )
    assert (
        example.prompts["substitution"]
        == "Hugo painted it . Question: who painted the ceiling? Answer:"
    )
    assert example.relation == "nq_swap"
    assert example.n_words == 20


def test_a_confiqa_row_has_its_question_after_the_changed_passage(tmp_path: Path) -> None:
    (example,) = read_examples(write_json(tmp_path / "ConFiQA-MR.json", CONFIQA))
    asked = "Question: In which city did the founder of Acme study? Answer:"
    assert example.model_dump(exclude_none=True, exclude_defaults=True) == {
        "subject": "Acme",
        "parametric_answer": ("Graz", "Gratz"),
        "context_answer": ("Turku",),
        "prompts": {"clean": asked, "substitution": f"{CONFIQA['cf_context']} {asked}"},
        "context": CONFIQA["cf_context"],
        "question": asked,
        "relation": "confiqa_mr",
    }
    bare = {k: v for k, v in CONFIQA.items() if k != "orig_path_labeled"}
    (example,) = read_examples(write_json(tmp_path / "b.json", bare))
    assert example.subject == CONFIQA["question"]


def test_a_faitheval_row_takes_its_key_for_the_context_and_the_others_for_memory(
    tmp_path: Path,
) -> None:
    (example,) = read_examples(write_json(tmp_path / "faith.json", FAITHEVAL))
    asked = "Question: What do plants take in to make food? Answer:"
    assert example.model_dump(exclude_none=True, exclude_defaults=True) == {
        "subject": FAITHEVAL["question"],
        "parametric_answer": ("sunlight", "soil"),
        "context_answer": ("moonlight",),
        "prompts": {"clean": asked, "substitution": f"{FAITHEVAL['context']} {asked}"},
        "context": FAITHEVAL["context"],
        "question": asked,
        "relation": "faitheval",
        "scored": "likeliest",
    }


def test_faitheval_without_an_answer_takes_any_answer_for_memory(tmp_path: Path) -> None:
    (example,) = read_examples(write_json(tmp_path / "u.json", UNANSWERABLE))
    asked = "Question: Who built the mill? Answer:"
    assert set(example.prompts) == {"substitution"}
    assert example.prompts["substitution"].startswith(f"{UNANSWERABLE['context']} If the passage")
    assert example.prompts["substitution"].endswith(f"unknown. {asked}")
    assert (example.parametric_answer, example.answer("parametric")) == ((), "")
    assert example.is_right(" That is not said: it is Unknown.", "context")
    assert not example.is_right(" Another miller did.", "context")
    assert example.is_right(" Another miller did.", "parametric")
    assert not example.is_right(" unknown", "parametric")
    assert example.max_tokens == 50
    # What is written is read again, and a row that lacks the answer by mistake is not taken.
    again = tmp_path / "again.jsonl"
    again.write_text(to_json_line(example))
    assert read_examples(again) == [example]
    lacking = {k: v for k, v in OURS.items() if k != "parametric_answer"}
    with pytest.raises(ExampleError, match="parametric_answer is missing"):
        read_examples(write_json(tmp_path / "lacking.json", lacking))


def test_faitheval_with_two_answers_takes_either_for_memory(tmp_path: Path) -> None:
    (example,) = read_examples(write_json(tmp_path / "i.json", INCONSISTENT))
    assert example.parametric_answer == ("red", "blue")
    assert example.is_right(" There are two answers.", "context")
    assert example.is_right(" blue", "parametric")
    assert example.relation == "faitheval_inconsistent"


def test_questions_with_one_right_answer_are_not_taken_for_faitheval(tmp_path: Path) -> None:
    """Those of MRQA, and of many who have documents, have the same columns."""
    row = {"qid": "1", "question": "Who?", "context": "Ann said so.", "answers": ["Ann", "ann"]}
    with pytest.raises(ExampleError, match="`juice examples` makes conflicts"):
        read_examples(write_json(tmp_path / "mrqa.json", row))
    aliases = {**row, "answers": ["Ann", "Anna"], "detected_answers": {"text": ["Ann"]}}
    with pytest.raises(ExampleError, match=r"detected_answers is one of MRQA.*`juice examples`"):
        read_examples(write_json(tmp_path / "mrqa.json", {**aliases, "subset": "SQuAD"}))


def test_faitheval_sets_are_read_from_the_hub(hub: dict) -> None:
    hub["Salesforce/FaithEval-unanswerable-v1.0"] = {"test": [UNANSWERABLE]}
    hub["Salesforce/FaithEval-inconsistent-v1.0"] = {"test": [INCONSISTENT]}
    assert read_examples("faitheval-unanswerable")[0].relation == "faitheval_unanswerable"
    assert read_examples("faitheval-inconsistent")[0].relation == "faitheval_inconsistent"


def test_a_mquake_row_states_its_new_facts(tmp_path: Path) -> None:
    (example,) = read_examples(write_json(tmp_path / "MQuAKE-CF-3k-v2.json", MQUAKE))
    asked = "Question: Where was the mayor of Oldtown born? Answer:"
    told = "The mayor of Oldtown is Bo Kim. Bo Kim was born in Turku."
    assert example.model_dump(exclude_none=True, exclude_defaults=True) == {
        "subject": "Oldtown",
        "parametric_answer": ("Graz", "Gratz"),
        "context_answer": ("Turku",),
        "prompts": {"clean": asked, "substitution": f"{told} {asked}"},
        "context": told,
        "question": asked,
        "relation": "mquake",
    }


def test_the_rows_of_a_cub_fact_are_one_example_with_its_controls(tmp_path: Path) -> None:
    other = [{**row, "subject": "Eve"} for row in CUB]
    first, second = read_examples(write_json(tmp_path / "cub.json", *CUB, *other[1:]))
    assert first.model_dump(exclude_none=True, exclude_defaults=True) == {
        "subject": "Ada",
        "parametric_answer": ("Dutch",),
        "context_answer": ("Welsh",),
        "prompts": {
            "clean": "Ada speaks",
            "substitution": "Fact: Ada speaks Welsh.\nAda speaks",
        },
        "controls": {
            "true": "Fact: Ada speaks Dutch.\nAda speaks",
            "irrelevant": "Fact: the river is long.\nAda speaks",
        },
        "question": "Ada speaks",
        "relation": "cub_counterfact",
    }
    assert second.subject == "Eve"
    assert set(second.controls) == {"irrelevant"}
    (claim,) = read_examples(write_json(tmp_path / "druid.json", *DRUID))
    asked = (
        "Question: Is this claim by A NEIGHBOUR True, False or None: The lake has dried up. Answer:"
    )
    assert claim.prompts["substitution"] == f"Evidence: There is no water left. {asked}"
    assert claim.controls == {"true": f"Evidence: People still swim in it. {asked}"}
    assert (claim.parametric_answer, claim.context_answer) == (("False",), ("True",))


def test_a_cub_fact_without_an_edited_context_is_left_out(tmp_path: Path) -> None:
    lone = {**CUB[0], "subject": "Eve"}
    with pytest.warns(UserWarning, match="there is only the gold context"):
        assert len(read_examples(write_json(tmp_path / "cub.json", *CUB, lone))) == 1


def test_tristate_pairs_its_rows_over_the_files_of_a_folder(tmp_path: Path) -> None:
    """Kills: cases of a correction judged by what memory says, an agreement of another fact."""
    write_json(
        tmp_path / "C_right_P_right.json",
        *tristate("C_right_P_right", "king", "Ann is king.", "Ann"),
        *tristate("C_right_P_right", "cook", "Flo is cook.", "Flo"),
    )
    write_json(
        tmp_path / "C_wrong_P_right.json",
        *tristate("C_wrong_P_right", "king", "Bo is king.", "Ann", wrong_answer="Bo"),
    )
    write_json(
        tmp_path / "C_right_P_wrong.json",
        *tristate("C_right_P_wrong", "smith", "Cy is smith.", "Cy"),
    )
    with pytest.warns(UserWarning, match="1 rows are left out.*agree on .*cook"):
        correction, resistance = sorted(read_examples(tmp_path), key=lambda e: e.relation)
    asked = "Question: Who is king? ?\nAnswer:"
    assert resistance.model_dump(exclude_none=True, exclude_defaults=True) == {
        "subject": "Who is king?",
        "parametric_answer": ("Ann",),
        "context_answer": ("Bo",),
        "prompts": {
            "clean": f"Say: {asked}",
            "substitution": f"Bo is king. \nAs told: {asked}",
        },
        "controls": {"true": f"Ann is king. \nAs told: {asked}"},
        "relation": "resistance",
        "match": "exact",
        "n_words": 32,
    }
    assert (correction.parametric_answer, correction.context_answer) == ((), ("Cy",))
    assert set(correction.prompts) == {"substitution"}
    assert correction.is_right(" the Cy.\nQuestion: Who", "context")
    assert not correction.is_right(" Cy Lee", "context")
    assert correction.is_right(" Cy Lee", "parametric")


@pytest.mark.parametrize(
    ("row", "changes", "named"),
    [
        (UNANSWERABLE, {"answers": [" "]}, "answers is not a list of texts"),
        (UNANSWERABLE, {"question": 3}, "question or context is not text"),
        (MQUAKE, {"requested_rewrite": ["x"]}, "requested_rewrite is not a list of new facts"),
        (MQUAKE, {"requested_rewrite": []}, "requested_rewrite is not a list of new facts"),
        (MQUAKE, {"questions": "Where?"}, "questions is not a list of texts"),
        (MQUAKE, {"requested_rewrite": {"prompt": "{}"}}, "requested_rewrite is not a list"),
        (tristate("C_right_P_wrong", "a", "b", "c")[0], {"fact_id": "d"}, "expected a row of each"),
        (CUB[1], {"target_new": None, "subject": "Eve"}, "context_answer"),
        (CUB[1], {"target_true": 3, "subject": "Eve"}, "parametric_answer"),
        (CONFIQA, {"cf_alias": "Turku"}, "cf_answer or cf_alias is not text or a list of texts"),
        (CONFIQA, {"orig_answer": 3}, "orig_answer or orig_alias"),
        (CONFIQA, {"cf_context": None}, "question or cf_context is not text"),
        (FAITHEVAL, {"answerKey": "D"}, "answerKey is 'D'; expected one of A, B, C"),
        (FAITHEVAL, {"choices": {"label": ["A"], "text": []}}, "choices is not an object"),
        (FAITHEVAL, {"choices": ["sunlight"]}, "choices is not an object"),
        (FAITHEVAL, {"question": " "}, "question or context is not text"),
    ],
)
def test_a_malformed_row_of_either_is_named(
    tmp_path: Path, row: dict, changes: dict, named: str
) -> None:
    with pytest.raises(ExampleError, match=named) as caught:
        read_examples(write_json(tmp_path / "rows.json", row, {**row, **changes}))
    assert "rows.json" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        (CONFIQA, {"cf_answer": "GRAZ"}),
        (FAITHEVAL, {"choices": {"label": ["B"], "text": ["moonlight"]}}),
    ],
)
def test_a_row_of_either_without_a_conflict_is_left_out(
    tmp_path: Path, row: dict, changes: dict
) -> None:
    with pytest.warns(UserWarning, match=r"1 rows are left out.*there is no conflict"):
        left = read_examples(write_json(tmp_path / "rows.json", {**row, **changes}, row))
    assert len(left) == 1


def test_tags_are_dropped_and_comparisons_kept() -> None:
    assert (
        without_tags('<Table><Th_colspan="2"> a </Th> 3 < 4 and 5 > 4</P>') == "a 3 < 4 and 5 > 4"
    )


def test_faitheval_is_read_from_the_hub(hub: dict) -> None:
    hub["Salesforce/FaithEval-counterfactual-v1.0"] = {"test": [FAITHEVAL]}
    assert [e.context_answer for e in read_examples("faitheval")] == [("moonlight",)]


@pytest.mark.parametrize("question", ["who", "who?", "who ??", " who ? "])
def test_a_question_ends_with_one_mark(question: str) -> None:
    assert question_prompt(question) == "Question: who? Answer:"


@pytest.mark.parametrize(
    ("split", "expected"),
    [("test", ["Chad", "Togo"]), ("validation", ["Mali"]), ("identification", ["Benin"])],
)
def test_a_split_picks_the_files_of_a_folder_by_their_names(
    tmp_path: Path, split: Any, expected: list[str]
) -> None:
    names = {"Chad": "book_author.unfiltered_test", "Togo": "world_capital.unfiltered_test"}
    names |= {
        "Mali": "book_author.filtered_validation",
        "Benin": "book_author.head_finding_set_size_4",
    }
    for subject, name in names.items():
        write_json(tmp_path / f"{name}.json", {**PARACONFLICT, "Subject": subject})
    (tmp_path / "README.md").write_text("not data")
    assert [e.subject for e in read_examples(tmp_path, split=split)] == expected


def test_a_folder_without_splits_is_read_whole_in_any_formats(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", PARACONFLICT)
    (tmp_path / "b.jsonl").write_text(json.dumps(OURS))
    write_csv(tmp_path / "c.csv", MEMOTRAP)
    assert [e.subject for e in read_examples(tmp_path, split="validation")] == [
        "Chad",
        "Peru",
        "The river runs to the",
    ]


def test_a_downloaded_data_set_may_have_its_files_in_data(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / ".hidden.json").write_text("not data")
    write_json(tmp_path / "data" / "test.json", {**PARACONFLICT, "Category": "official_language"})
    assert [e.relation for e in read_examples(tmp_path)] == ["official_language"]


def test_the_error_for_a_folder_without_data_names_the_formats(tmp_path: Path) -> None:
    with pytest.raises(ExampleError, match=r"holds no \.jsonl, \.json, \.csv and no parquet files"):
        read_examples(tmp_path)


def test_the_error_for_a_folder_without_the_split_names_its_files(tmp_path: Path) -> None:
    write_json(tmp_path / "a.unfiltered_test.json", PARACONFLICT)
    with pytest.raises(
        ExampleError, match=r"no file of the validation split .*a\.unfiltered_test\.json"
    ):
        read_examples(tmp_path, split="validation")


def test_the_hub_set_of_paraconflict_lists_all_answers_and_names_the_domain(hub: dict) -> None:
    row = {key: value for key, value in PARACONFLICT.items() if key != "Answer_ns"} | {
        "Answer": ["Arabic", "French"]
    }
    hub["gaotang/ParaConfilct"] = [
        {**row, "Category": "Official Language"},
        {**row, "Category": "company_headquarters"},
        {**row, "Category": "world-capital"},
    ]
    every = read_examples("paraconflict")
    assert [e.relation for e in every] == [
        "official_language",
        "company_headquarter",
        "world_capital",
    ]
    assert every[0].parametric_answer == ("Arabic", "French")
    assert [e.relation for e in read_examples("paraconflict:world_capital")] == ["world_capital"]
    with pytest.raises(ExampleError, match="no row of the domain book_author"):
        read_examples("paraconflict:book_author")


def test_the_hub_set_of_nqswap_is_read_from_its_only_split(hub: dict) -> None:
    hub["pminervini/NQ-Swap"] = {"dev": [NQSWAP]}
    assert [e.context_answer for e in read_examples("nq-swap")] == [("Hugo",)]


def test_a_hub_set_of_several_splits_gives_the_one_named_or_the_first_preferred(hub: dict) -> None:
    hub["us/ours"] = {name: [{**OURS, "subject": name}] for name in ("train", "validation", "test")}
    assert [e.subject for e in read_examples("hub:us/ours")] == ["validation"]
    assert [e.subject for e in read_examples("hub:us/ours:train")] == ["train"]
    with pytest.raises(ExampleError, match="no split dev; name one of: train, validation, test"):
        read_examples("hub:us/ours:dev")


def test_the_reader_removes_what_a_table_fills_in_for_missing_fields(tmp_path: Path) -> None:
    rows = [OURS, {**OURS, "subject": "Chad", "prompts": {"coherent": "x"}, "popularity": 2.0}]
    rows = [
        {**row, "parametric_answer": ["Lima"], "popularity": row.get("popularity")} for row in rows
    ]
    datasets.Dataset.from_list(rows, features=FEATURES).save_to_disk(str(tmp_path))
    first, second = read_examples(tmp_path)
    assert set(first.prompts) == {"clean"}
    assert set(second.prompts) == {"coherent"}
    assert (first.popularity, second.popularity) == (None, 2.0)


@pytest.mark.parametrize("how", ["saved", "saved_with_splits", "parquet"])
def test_a_data_set_in_a_folder_is_read_without_a_network(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data, folder = datasets.Dataset.from_list([NQSWAP]), tmp_path / "set"
    if how == "saved":
        data.save_to_disk(str(folder))
    elif how == "saved_with_splits":
        datasets.DatasetDict(train=data, dev=data).save_to_disk(str(folder))
    else:
        (folder / "data").mkdir(parents=True)
        data.to_parquet(str(folder / "data" / "dev-00000.parquet"))
    assert [e.parametric_answer for e in read_examples(folder)] == [("Rosa", "Rosa Bell")]


def test_the_error_without_a_network_explains_how_to_do_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(name: str) -> None:
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        ExampleError, match=r"Couldn't reach .*hf download pminervini/NQ-Swap .*HF_HUB_CACHE"
    ):
        read_examples("nq-swap")


def test_the_error_without_the_package_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ExampleError, match=r"pip install 'juice-steering\[eval\]'"):
        read_examples("hub:us/ours")


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (
            "paraconflict:rivers",
            (
                "athlete_sport, book_author, company_founder, company_headquarter,"
                " official_language, world_capital"
            ),
        ),
        ("paraconflict:", "is not a domain"),
        ("memotrap", "folder"),
        ("hub:", "hub:owner/name"),
        ("./nowhere", "cannot read the examples nowhere"),
    ],
)
def test_the_error_for_a_name_that_is_not_a_source_names_the_sources(
    source: str, named: str
) -> None:
    with pytest.raises(ExampleError, match=named):
        read_examples(source)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.json", b"[]", "is empty"),
        ("a.json", b"", "is empty"),
        ("a.csv", b"", "is empty"),
        ("a.csv", b"prompt,classes\n", "is empty"),
        ("a.json", b'[{"a": 1},\n {"a": }]', r"not JSON .* line 2, column"),
        ("a.json", b'[{"a": 1}, 7]', "row 2: got a int; expected a JSON object"),
        ("a.jsonl", b'\n{"a": 1\n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", b'"text"', "got a str"),
        ("a.jsonl", b'{"a": ' * 100_000, "nested too deeply|not JSON"),
        ("a.json", b"[" * 100_000, "nested too deeply|not JSON"),
        ("a.jsonl", b'{"a": ' + b"9" * 5000 + b"}", "cannot be read"),
        ("a.jsonl", rb'{"subject": "\ud800"}', "surrogates not allowed"),
        ("a.csv", b"a,a\n1,2\n", "named twice"),
        ("a.csv", b'a,b\n1,"x\ny"\n1,2,3\n', r"a\.csv:4: the row has too many cells"),
        ("a.csv", b"a,b\n1\n", r"a\.csv:2: the row has too few cells"),
        ("a.csv", b'a,b\n1,2\n1,"x\n', r"a\.csv:3: not CSV"),
        ("a.csv", b"a,b\n1," + b"x" * 200_000, r"a\.csv:2: not CSV"),
        ("a.csv", b"a,b\n1,2\n3,\xff\n", "line 3 is not UTF-8"),
        ("a.json", "[]".encode("utf-16"), "line 1 is not UTF-8"),
        (
            "a.csv",
            b"question,answer\nq,a\n",
            r"columns question, answer are of no known format.*ParaConflict \(Subject.*MemoTrap"
            r" \(prompt",
        ),
        (
            "a.jsonl",
            b'{"promts": {}, "context_answer": "x"}',
            r"a\.jsonl:1: subject is missing; expected the columns of JuICE: subject, .*; got ",
        ),
        ("a.jsonl", json.dumps({**OURS, "match": "ends"}).encode(), r"a\.jsonl:1: match"),
        ("a.json", json.dumps([PARACONFLICT, OURS]).encode(), "row 2: Subject is missing"),
        (
            "a.json",
            json.dumps([{**PARACONFLICT, "Answer": [{}]}]).encode(),
            "row 1: parametric_answer",
        ),
        (
            "a.json",
            json.dumps([{**PARACONFLICT, "Clean Prompt": 3}]).encode(),
            "row 1: Clean Prompt",
        ),
        ("a.json", json.dumps([{**NQSWAP, "question": [1]}]).encode(), "row 1: question"),
        (
            "a.json",
            json.dumps([{**NQSWAP, "sub_answer": "Rosa"}]).encode(),
            "no example that can be used; first: .*'Rosa'",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_one_clear_error(
    tmp_path: Path, name: str, content: bytes, named: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ExampleError, match=named):
        read_examples(tmp_path / name)


def test_a_file_too_large_to_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("juice.data.readers.rows.MAX_BYTES", 10)
    with pytest.raises(ExampleError, match="more than"):
        read_examples(write_json(tmp_path / "a.json", OURS))


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain.jsonl", tmp_path / "marked.jsonl"
    lines = [
        json.dumps({**OURS, "subject": subject}, ensure_ascii=False) for subject in ("Perú", "Chad")
    ]
    plain.write_bytes("\n".join(lines).encode())
    marked.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert read_examples(marked) == read_examples(plain)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    write_csv(tmp_path / "1-proverb-ending.csv", MEMOTRAP)
    read = read_examples(tmp_path / "1-proverb-ending.csv") + read_examples("mini")[:3]
    (tmp_path / "again.jsonl").write_text("".join(map(to_json_line, read)))
    assert read_examples(tmp_path / "again.jsonl") == read


@pytest.mark.skipif(
    "JUICE_TEST_DATA" not in os.environ,
    reason="JUICE_TEST_DATA names no folder with paraconflict/ and memo_trap/",
)
def test_every_row_of_the_published_files_is_read() -> None:
    folder = Path(os.environ["JUICE_TEST_DATA"])
    for split, part in (
        ("test", "unfiltered_test"),
        ("validation", "filtered_validation"),
        ("identification", "head_finding"),
    ):
        files = sorted((folder / "paraconflict").glob(f"*.{part}*.json"))
        raw = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            examples = read_examples(folder / "paraconflict", split=split)
        assert [e.subject for e in examples] == [
            row["Subject"] for row in raw if row["Distracted Token"] not in row["Answer_ns"]
        ]
        assert all(e.context and e.question for e in examples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trapped = read_examples(folder / "memo_trap")
    counts: Counter[str] = Counter()
    for file in (folder / "memo_trap").glob("*.csv"):
        for row in read_rows(file):
            first, second = row.values["classes"]
            counts[file.stem[2:].replace("-", "_")] += first.lower() != second.lower()
    assert Counter(e.relation for e in trapped) == counts
