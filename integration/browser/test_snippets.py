"""The lines to copy do what the playground has just done: they are run, and compared with it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from typing import Any

from playwright.sync_api import Page, expect

from integration.browser.browsing import OpenPage
from integration.browser.steps import answer, run, set_options, token
from tests.support.nearly import nearly

WAYS = ("parametric", "none", "context")


def by_curl(page: Page) -> str:
    """Run the lines for a shell."""
    return output(["bash", "-c", page.locator("#curl").text_content()])


def by_python(page: Page) -> str:
    """Run the lines for Python."""
    return output([sys.executable, "-c", page.locator("#python").text_content()])


def output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def streamed(text: str) -> dict[str, str]:
    """Return the answers of a stream of /compare."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    parts: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return {
        way: "".join(part["text"] for part in parts if part.get("target") == way).strip()
        for way in WAYS
    }


def test_a_comparison_can_be_made_again(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        page.locator("#code summary").click()
        expect(page.locator("#curl")).to_be_hidden()
        set_options(page, gate="auto", seed="3", temperature="1.5", max_tokens="6")
        page.fill("#context", 'It\'s said: the "author" of the book Oliver Twist is Nikolai Gogol.')
        run(page)
        # An answer that is cut off at its length ends with a sign for that.
        found = {way: answer(page, way).removesuffix(" …") for way in WAYS}
        assert streamed(by_curl(page)) == found
        expect(page.locator("#python_what")).to_have_text("the answer toward the context")
        assert by_python(page).strip() == found["context"]


def test_a_chat_can_be_asked_again(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        page.locator("#code summary").click()
        set_options(page)
        page.locator("#chat").check()
        expect(page.locator("#asked_how")).to_have_text("(the user's message)")
        page.fill("#context", "The capital of Peru is Cairo.")
        page.fill("#prompt", "What is the capital of Peru?")
        run(page)
        assert streamed(by_curl(page)) == {way: answer(page, way) for way in WAYS}
        assert by_python(page).strip() == answer(page, "context") == "Cairo."


def test_curves_and_an_explanation_can_be_made_again(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        page.locator("#code summary").click()
        run(page)
        page.locator("#tab-dial").click()
        expect(page.locator("#curves svg")).to_be_visible()
        swept = json.loads(by_curl(page))
        assert f"at strength {swept['flip']:.2f}" in page.locator("#flip").inner_text()
        assert nearly(swept) == ast.literal_eval(by_python(page))
        page.locator("#tab-compare").click()
        token(page, "context", 1).click()
        expect(page.locator("#effects tbody tr")).to_have_count(6)
        explained = json.loads(by_curl(page))
        heads = [f"layer {head['layer']}, head {head['head']}" for head in explained["heads"]]
        assert page.locator("#effects tbody th").all_inner_texts() == heads
        again = ast.literal_eval(by_python(page))
        assert [nearly(head["effect"]) for head in explained["heads"]] == [
            head["effect"] for head in again["heads"]
        ]
