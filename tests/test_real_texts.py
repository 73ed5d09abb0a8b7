"""What the tests on real models ask and read: chat prompts, and ordinary text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from integration.real import models, text

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "integration" / "real" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
PROMPTS = [json.loads(line) for line in LINES]


def has(passage: str, answers: list[str]) -> bool:
    return any(answer.lower() in passage.lower() for answer in answers)


def test_there_are_forty_prompts_and_no_question_twice() -> None:
    assert len(PROMPTS) == 40
    assert len({prompt["question"] for prompt in PROMPTS}) == 40


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["question"])
def test_a_document_has_its_own_answer_and_not_the_true_one(prompt: dict) -> None:
    assert set(prompt) == {"question", "document", "memory", "context"}
    assert prompt["question"].endswith("?")
    assert 2 <= prompt["document"].count(". ") + 1 <= 4
    assert has(prompt["document"], prompt["context"])
    assert not has(prompt["document"], prompt["memory"])
    assert not has(prompt["question"], prompt["context"] + prompt["memory"])


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["question"])
def test_no_answer_is_part_of_another_or_too_short_to_be_found(prompt: dict) -> None:
    """Such as Au, which is in `because`, and bee, which is in `been`."""
    assert not any(has(answer, prompt["memory"]) for answer in prompt["context"])
    assert not any(has(answer, prompt["context"]) for answer in prompt["memory"])
    for answer in prompt["memory"] + prompt["context"]:
        assert len(answer) >= 4 or any(letter.isdigit() for letter in answer)


def test_a_message_is_its_paragraphs_without_headings_and_notes() -> None:
    told = "[Read by a clerk.]\n\nTo the Congress:\n\nII.\n\nALL TAXES\n\nTaxes fell in 1924.\n"
    assert list(text.message(told)) == ["To the Congress:", "Taxes fell in 1924."]


def test_a_table_of_tales_gives_their_paragraphs() -> None:
    table = 'Title\tContent\nstring\tstring\n\tinclude=True\n\nA\t"It was late.  She slept."\n'
    assert list(text.tales(table)) == ["It was late.", "She slept."]


def test_the_text_is_not_fetched_again_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("It was late.\n")
    monkeypatch.setattr(text, "SHA256", hashlib.sha256(b"It was late.\n").hexdigest())
    monkeypatch.setattr(text, "download", pytest.fail)
    assert text.fetch(tmp_path) == tmp_path / "text.txt"


def test_every_package_that_is_fetched_is_pinned_by_its_hash() -> None:
    for pins in models.HERE.glob("*.txt"):
        lines = [line for line in pins.read_text().splitlines() if not line.startswith("#")]
        assert lines
        assert all("==" in line and " --hash=sha256:" in line for line in lines)
