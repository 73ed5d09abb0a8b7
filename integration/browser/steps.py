"""What people do on the playground, for its tests."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Page, Request, expect

FACT = "The name of the capital city of Peru is"
OLIVER = "The author of the book Oliver Twist is"
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


def start(page: Page) -> None:
    """Press Run."""
    page.locator("#run").click()


def run(page: Page) -> None:
    """Press Run, and wait for the end."""
    start(page)
    expect(page.locator("#legend")).to_contain_text("Choose")


def set_options(page: Page, **values: str) -> None:
    """Unfold the options, and fill them in."""
    if page.locator("#ask details").get_attribute("open") is None:
        page.locator("#ask summary").click()
    for name, value in values.items():
        field = page.locator(f"#{name}")
        if field.evaluate("own => own.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)


def start_slowly(page: Page) -> None:
    """Run an answer that takes seconds, and wait until some of it is there."""
    set_options(page, max_tokens="400", temperature="2", seed="1")
    start(page)
    expect(page.locator("#columns .token").nth(10)).to_be_visible()


def answer(page: Page, target: str) -> str:
    """Return the text of one column."""
    return page.locator(f"#columns .of-{target} .answer").inner_text().strip()


def token(page: Page, target: str, i: int = 0) -> Any:
    """Return a token of a column."""
    return page.locator(f"#columns .of-{target} .token").nth(i)


def asked(page: Page) -> dict[str, str]:
    """Return what the form asks."""
    return {name: page.input_value(f"#{name}") for name in ("prompt", "context")}


def dial_to(page: Page, strength: float) -> None:
    """Move the dial."""
    page.locator("#dial_strength").evaluate(
        "(own, value) => { own.value = value; own.dispatchEvent(new Event('input')); }",
        str(strength),
    )


def bodies(page: Page, route: str) -> list[dict[str, Any]]:
    """Return the list to which the bodies sent to a route from now on are added."""
    found: list[dict[str, Any]] = []

    def take(request: Request) -> None:
        if request.url.endswith(route) and request.post_data:
            found.append(json.loads(request.post_data))

    page.on("request", take)
    return found


def send_more(page: Page, route: str, **fields: Any) -> None:
    """Add fields to what the page sends to a route."""

    def more(given: Any) -> None:
        given.continue_(post_data=json.dumps({**given.request.post_data_json, **fields}))

    page.route(f"**{route}", more)
