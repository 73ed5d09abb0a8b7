"""Pages of a running server in a headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page

from integration.browser.browsing import TIMEOUT_MS, OpenPage, chromium
from tests.support.serving import serving


# Not for longer: while it runs, the thread has a running event loop, which other tests cannot use.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if shutil.which("node") is None:
        pytest.skip("there is no Node.js here to unpack Chromium with")
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as server:
        yield server.url


@pytest.fixture(scope="module")
def opened(browser: Browser) -> OpenPage:
    """Return what opens a page: at its end nothing failed, and nobody else was asked."""

    @contextmanager
    def opening(url: str, *, fails: bool = False, **options: Any) -> Iterator[Page]:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        page, problems, asked = context.new_page(), list[str](), set[str]()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if line.type == "error" else 0)
        page.on("request", lambda request: asked.add(request.url))
        page.goto(url, wait_until="networkidle")
        yield page
        hosts = {urlsplit(each).netloc for each in asked if each.startswith("http")}
        context.close()
        assert hosts == {urlsplit(url).netloc}
        assert fails or problems == []

    return opening
