"""The page of the API in a browser."""

from __future__ import annotations

from playwright.sync_api import expect

from integration.browser.browsing import OpenPage


def test_it_shows_the_routes_and_needs_nothing_from_elsewhere(opened: OpenPage, url: str) -> None:
    with opened(f"{url}/docs") as page:
        expect(page.get_by_text("/generate", exact=True).first).to_be_visible()


def test_a_request_can_be_tried_from_the_page(opened: OpenPage, url: str) -> None:
    with opened(f"{url}/docs") as page:
        page.get_by_text("/version", exact=True).click()
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute").click()
        answers = page.locator(".live-responses-table")
        expect(answers.get_by_text('"version"').first).to_be_visible()
