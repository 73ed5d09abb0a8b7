"""A model that answers in whole sentences, from its rows to a head set: `juice` as processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import juice
from tests.support.chat_templates import sha256
from tests.support.commands import invoke
from tests.support.commands import juice as run
from tests.support.sentences import MINI, capitals, save_wordy


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wordy(tmp_path_factory.mktemp("models") / "wordy")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "rag.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in capitals(40)))
    return file


@pytest.fixture(scope="module")
def made(wordy: Path, data: Path) -> Path:
    out = data.parent / "made.jsonl"
    done = run("examples", str(data), "--model", str(wordy), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "asking in a chat; --chat-template none asks plain questions" in done.stderr
    assert "40 conflict examples from 40 rows" in done.stderr
    return out


def test_forty_rows_that_a_chat_model_knows_become_forty_examples(wordy: Path, made: Path) -> None:
    """The oracle is the model's whole replies; the paper's rule knows almost none of them."""
    examples = juice.read_examples(made)
    model = juice.load(wordy).with_chat_template()
    replies = model.generate([e.prompts["clean"] for e in examples], max_tokens=48)
    assert len(examples) == 40
    for example, reply in zip(examples, replies, strict=True):
        answer = example.answer("parametric")
        assert reply.text.strip() == f"{example.opening} {answer}."
        assert example.opening.endswith((" is", " in", " of"))
    assert sum(e.is_right(r.text, "parametric") for e, r in zip(examples, replies, strict=True)) < 4
    assert {e.chat_template_sha256 for e in examples} == {
        sha256((wordy / "chat_template.jinja").read_text())
    }
    clean = model.tokenize(examples[0].prompts["clean"], opening=examples[0].opening)
    assert model.generate([clean], max_tokens=9)[0].text.strip(" .") == answer_of(examples[0])


def answer_of(example: juice.ConflictExample) -> str:
    return example.answer("parametric")


@pytest.mark.long
def test_heads_are_found_through_the_template_that_the_examples_record(
    wordy: Path, made: Path, tmp_path: Path
) -> None:
    """And they steer a chat whose replies begin as the model likes."""
    done = run(
        "identify",
        *("--model", str(wordy), "--target", "context", "--examples", str(made)),
        *("--method", "attribution", "--n-examples", "8", "--top-k", "5"),
        *("--out", str(tmp_path / "sets")),
        *("--max-divergence", "1", "--protect", "none"),
    )
    assert done.returncode == 0, done.stderr
    assert "prompts go through the chat template, as when the examples were made" in done.stderr
    model = juice.load(wordy, head_sets=tmp_path / "sets").with_chat_template()
    (head_set,) = model.head_sets.by_name.values()
    assert head_set.chat_template_sha256 == model.chat_template_sha256
    prompts = [e.prompts["substitution"] for e in juice.read_examples(made)]
    answers = [e.answer("context") for e in juice.read_examples(made)]
    followed = [
        sum(
            answer in reply.text
            for answer, reply in zip(answers, model.generate(prompts, steer=steer), strict=True)
        )
        for steer in ("none", "context")
    ]
    assert followed[0] <= 8
    assert followed[1] >= 32


def test_another_form_than_that_of_the_examples_is_refused_or_warned_of(
    made: Path, tmp_path: Path
) -> None:
    asked = ("identify", "--examples", str(made), "--out", str(tmp_path / "sets"))
    code, _, stderr = invoke(*asked)  # mini has another template
    assert code == 2
    assert "give the file with --chat-template FILE, or --chat-template none" in " ".join(
        stderr.split()
    )
    examples = juice.read_examples(made)
    model = juice.load("mini")
    untuned: dict[str, Any] = {"target": "context", "method": "attribution", "tune": False}
    with pytest.warns(UserWarning, match="prompts go without one"):
        juice.identify(model, examples, chat_template="none", **untuned)
    with pytest.warns(UserWarning, match="but prompts go through"):
        juice.identify(model.with_chat_template(), examples, **untuned)
    with pytest.raises(juice.JuiceError, match="made through the chat template"):
        juice.identify(model, examples, target="context")


def test_the_template_of_the_chat_may_be_left_out_or_given(
    wordy: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    asked = ("examples", str(data), "--model", str(wordy), "--out", str(out), "--json", "--force")
    code, stdout, stderr = invoke(*asked, "--chat-template", "none")
    assert (code, json.loads(stdout)["chat_template_sha256"]) == (0, None), stderr
    assert {e.chat_template_sha256 for e in juice.read_examples(out)} == {None}
    template = MINI / "chat_template.jinja"
    code, stdout, stderr = invoke(
        *(*asked, "--chat-template", str(template)),
        *("--question-template", "Q: {question}\\nA:"),
    )
    assert code == 0, stderr
    assert json.loads(stdout)["chat_template_sha256"] == sha256(template.read_text())
    first = juice.read_examples(out)[0]
    assert first.prompts["clean"] == f"Q: {capitals(1)[0]['question']}\nA:"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--question-template", "Answer:"), "expected a text with {question} once"),
        (("--question-template", "{q} {question}"), "has {q}; expected {question} alone"),
        (("--max-tokens", "0"), "--max-tokens is 0; expected at least 1"),
    ],
)
def test_a_mistake_is_reported_before_the_model_is_loaded(
    data: Path, arguments: tuple[str, ...], named: str
) -> None:
    out = str(data.parent / "none.jsonl")
    code, _, stderr = invoke(
        "examples", str(data), "--out", out, "--model", "./nowhere", *arguments
    )
    assert code == 2
    assert named in " ".join(stderr.split())
