"""Many prompts at once, on the playground."""

from __future__ import annotations

import json
import re
from pathlib import Path

from playwright.sync_api import Page, expect

from integration.browser.browsing import OpenPage
from integration.browser.steps import FACT, bodies, set_options


def give(page: Page, name: str, content: str) -> None:
    """Choose a file."""
    file = {"name": name, "mimeType": "text/plain", "buffer": content.encode()}
    page.set_input_files("#file", file)


def cells(page: Page, row: int) -> list[str]:
    """Return the texts of a row of the results."""
    each: list[str] = (
        page.locator("#batch_table tbody tr").nth(row).locator("th, td").all_inner_texts()
    )
    return each


def test_a_file_of_prompts_runs_is_cancelled_and_downloaded(opened: OpenPage, url: str) -> None:
    row = {"prompt": FACT, "context": f"{FACT} Cairo."}
    with opened(url) as page:
        page.locator("#batch summary").click()
        give(page, "few.csv", f'prompt,context\n{FACT},\n{FACT},"As ""we"" know, {FACT} Cairo."\n')
        expect(page.locator("#batch_count")).to_have_text("2 prompts in few.csv")
        page.locator("#batch_run").click()
        expect(page.locator("#batch_table tbody tr")).to_have_count(2)
        first = cells(page, 0)
        assert (first[0], first[-1]) == ("2", "differ"), "disagreements come first"
        assert first[2] == f'As "we" know, {FACT} Cairo.'
        assert "Lima" in first[4]
        assert "Cairo" in first[5]
        with page.expect_download() as download:
            page.locator("#batch_save").click()
        lines = Path(download.value.path()).read_text().splitlines()
        assert [json.loads(line)["row"] for line in lines] == [2, 1]
        give(page, "many.jsonl", "".join(json.dumps(row) + "\n" for _ in range(400)))
        expect(page.locator("#batch_count")).to_contain_text("400 prompts")
        assert page.locator("#batch_table tbody tr").count() == 0, "those of the file before"
        page.locator("#batch_run").click()
        expect(page.locator("#batch_count")).to_contain_text("of 400 done")
        page.locator("#batch_stop").click()
        expect(page.locator("#batch_count")).to_contain_text("cancelled after")
        n = int(re.findall(r"after (\d+)", page.locator("#batch_count").inner_text())[0])
        assert 0 < n < 400


def test_what_is_refused_is_marked_and_counted(opened: OpenPage, url: str) -> None:
    long = "x " * 3000
    rows = [{"prompt": FACT}, {"prompt": long}, {"prompt": FACT, "context": f"{FACT} Cairo."}]
    with opened(url, fails=True) as page:
        page.locator("#batch summary").click()
        give(page, "a.jsonl", "\n".join(map(json.dumps, rows)))
        page.locator("#batch_run").click()
        expect(page.locator("#batch_count")).to_have_text("3 of 3 done, 1 refused")
        assert [cells(page, i)[0] for i in range(3)] == ["3", "2", "1"]
        expect(page.locator("#batch_table .bad")).to_contain_text("refused: ")
        prompt = page.locator("#batch_table tbody tr").nth(1).locator(".clipped").first
        assert prompt.bounding_box()["height"] < 130
        assert prompt.get_attribute("title") == long


def test_files_of_many_kinds_are_read_and_those_that_are_not_are_told(
    opened: OpenPage, url: str
) -> None:
    count, problem = "#batch_count", "#batch_problem"
    with opened(url) as page:
        page.locator("#batch summary").click()
        for name, content in (
            ("a.csv", "\ufeffPrompt;Context\nA;B, c\n"),
            ("b.csv", "\ufeffcontext,prompt\nB,A\n"),
            ("c.tsv", "prompt\tcontext\nA\tB\n"),
            ("d.txt", "[note] The capital of Peru is\n"),
            ("e.json", '[{"prompt": "A"}]'),
        ):
            give(page, name, content)
            expect(page.locator(count)).to_have_text(f"1 prompt in {name}")
            expect(page.locator(problem)).to_be_hidden()
        for name, content, said in (
            ("a.csv", "a,b\n", "the columns are a, b; expected prompt"),
            ("b.jsonl", '{"prompt": "A"}\n{"prompt": 3}\n', "row 2 has no prompt that is text"),
            ("c.jsonl", '{"prompt": "A"}\n{\n', "line 2 is not JSON"),
        ):
            give(page, name, content)
            expect(page.locator(problem)).to_contain_text(said)
            expect(page.locator("#batch_run")).to_be_disabled()
            assert page.locator(count).inner_text() == "", "nothing of the file before"


def test_a_dropped_file_runs_with_the_options(opened: OpenPage, url: str) -> None:
    drop = """text => {
        const data = new DataTransfer();
        data.items.add(new File([text], "dropped.jsonl"));
        const options = { dataTransfer: data, bubbles: true, cancelable: true };
        return document.querySelector("main").dispatchEvent(new DragEvent("drop", options));
    }"""
    with opened(url) as page:
        set_options(page, gate="off", max_tokens="4")
        page.locator("#chat").check()
        row = {"prompt": "What is the capital of Peru?", "context": "It is Cairo."}
        assert page.evaluate(drop, json.dumps(row)) is False, "it is taken"
        expect(page.locator("#batch_count")).to_have_text("1 prompt in dropped.jsonl")
        sent = bodies(page, "/compare")
        page.locator("#batch_run").click()
        expect(page.locator("#batch_table tbody tr")).to_have_count(1)
        (body,) = sent
        assert body["messages"] == [{"role": "user", "content": "What is the capital of Peru?"}]
        assert (body["gate"], body["max_tokens"]) == ("off", 4)
