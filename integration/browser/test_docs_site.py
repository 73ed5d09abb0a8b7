"""The site of the pages in a browser: nothing fails, nothing is fetched elsewhere, search finds."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from integration.browser.browsing import OpenPage

ROOT = Path(__file__).parents[2]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(place)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(place))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_can_be_read(url: str, opened: OpenPage, scheme: str) -> None:
    with opened(f"{url}reference/http-api/", color_scheme=scheme) as page:
        assert page.locator("article h1").inner_text().startswith("HTTP, field by field")
        shown = page.locator("article p a").first.evaluate("own => getComputedStyle(own).color")
        assert shown == {"light": "rgb(7, 89, 133)", "dark": "rgb(124, 199, 242)"}[scheme]


def test_search_finds_a_heading(url: str, opened: OpenPage) -> None:
    with opened(url) as page:
        query, found = page.locator("[name=query]"), page.locator(".md-search-result__link").first
        deadline = time.monotonic() + 60
        # What is typed before the page's script listens is lost, and nothing says when it does.
        while not found.is_visible():
            assert time.monotonic() < deadline
            query.fill("")
            query.press_sequentially("detokenize")
            page.wait_for_timeout(1000)
        assert "reference/http-api/" in str(found.get_attribute("href"))


def test_a_narrow_screen_does_not_scroll_sideways(url: str, opened: OpenPage) -> None:
    with opened(f"{url}models/", viewport={"width": 400, "height": 800}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
