"""Take the pictures of the playground: `python -m integration.browser.pictures`."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from integration.browser.browsing import FOLDER, chromium
from integration.browser.steps import PHONE, run, token
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


def main() -> None:
    """Take them light, dark and as a phone shows them."""
    with serving() as server, chromium() as browser:
        for name, options in SCHEMES.items():
            take(browser.new_context(**options).new_page(), server.url, name)


if __name__ == "__main__":
    main()
