"""Take the pictures of the playground: `python -m tests.browser.pictures`."""

from __future__ import annotations

from playwright.sync_api import Page

from tests.support.browsing import FOLDER, chromium
from tests.support.serving import serving

IMAGES = FOLDER.parents[1] / "docs" / "images"
SIZE = {"width": 1000, "height": 780}


def take(page: Page, url: str, scheme: str) -> None:
    def save(view: str) -> None:
        page.wait_for_timeout(500)  # colours fade in
        page.screenshot(path=IMAGES / f"playground-{view}-{scheme}.png", full_page=True)

    page.goto(url, wait_until="networkidle")
    page.locator("#run").click()
    page.locator("#legend span").first.wait_for()
    save("compare")
    page.locator("#tab-dial").click()
    page.locator("#curves svg").wait_for()
    save("dial")
    page.locator("#tab-compare").click()
    page.locator(".of-parametric .token").first.click()
    page.locator("#effects table").wait_for()
    save("heads")


def main() -> None:
    with serving() as server, chromium() as browser:
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport=SIZE, color_scheme=scheme)
            take(context.new_page(), server.url, scheme)


if __name__ == "__main__":
    main()
