"""Take the pictures of the playground: `python -m integration.browser.pictures [MODEL.gguf]`.

With the file of a real model, only the one of a chat with that.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Page, expect

from integration.browser.browsing import FOLDER, chromium
from integration.browser.steps import PHONE, run, set_options, token
from integration.real.chat import chat_prompts
from tests.support.serving import serving

IMAGES = FOLDER.parents[1] / "docs" / "images"
SCHEMES = {
    "light": {"viewport": {"width": 1000, "height": 780}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1000, "height": 780}, "color_scheme": "dark"},
    "phone": PHONE,
}


def take(page: Page, url: str, name: str) -> None:
    """Take one picture of each view."""

    def save(view: str) -> None:
        expect(page.locator("#stop")).to_be_hidden()
        page.wait_for_timeout(500)  # colours fade in
        page.screenshot(path=IMAGES / f"playground-{view}-{name}.png", full_page=True)

    page.goto(url, wait_until="networkidle")
    run(page)
    save("compare")
    page.locator("#tab-dial").click()
    expect(page.locator("#dial_answer")).to_contain_text("Dickens")
    save("dial")
    page.locator("#tab-compare").click()
    token(page, "parametric").click()
    expect(page.locator("#effects table")).to_be_visible()
    save("heads")


def take_chat(page: Page, url: str, name: str) -> None:
    """Take the picture of a chat about a document that says something false."""
    asked = next(one for one in chat_prompts() if "helium" in one.context)
    page.goto(url, wait_until="networkidle")
    set_options(page, max_tokens="24")
    page.locator("#chat").check()
    page.locator("#prompt").fill(asked.question)
    page.locator("#context").fill(asked.document)
    run(page)
    expect(page.locator("#stop")).to_be_hidden()
    page.wait_for_timeout(500)
    page.screenshot(path=IMAGES / f"playground-chat-{name}.png", full_page=True)


def main(files: list[str]) -> None:
    """Take them light, dark and as a phone shows them; or one of each file's model."""
    with chromium() as browser:
        for file in files:
            with serving("--model", file) as server:
                page = browser.new_context(**SCHEMES["light"]).new_page()
                take_chat(page, server.url, Path(file).stem)
        if not files:
            with serving() as server:
                for name, options in SCHEMES.items():
                    take(browser.new_context(**options).new_page(), server.url, name)


if __name__ == "__main__":
    main(sys.argv[1:])
