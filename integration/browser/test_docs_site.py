"""The site of the pages: strictly built, from the pages as they stand, and read in a browser.

Nothing fails there, nothing is fetched from elsewhere, and search finds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from docs_site.reference import commands
from integration.browser.browsing import OpenPage
from juice_server.app import create
from juice_server.settings import Settings

ROOT = Path(__file__).parents[2]
REPOSITORY = re.compile(
    r'href="https://github\.com/juice-steering/juice/(?:blob|tree)/main/([^"#]+)'
)
# What a browser fetches by itself, other than what a reader clicks on.
FETCHED = re.compile(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="((?:https?:)?//[^"]+)"')


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a warning ends a strict build."""
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", place],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
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


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, str]:
    """Return the pages of the site by their paths."""
    return {str(page.relative_to(site)): page.read_text() for page in site.glob("**/index.html")}


def test_the_site_has_every_page_and_the_one_of_fields(pages: dict[str, str]) -> None:
    docs = ROOT / "docs"
    expected = {
        f"{page.relative_to(docs).with_suffix('')}/index.html" for page in docs.glob("**/*.md")
    }
    made = {"index.html", "reference/http-api/index.html"}
    assert set(pages) == expected - {"index/index.html"} | made


def test_the_page_of_fields_has_every_route_field_and_status(pages: dict[str, str]) -> None:
    page = pages["reference/http-api/index.html"]
    parts = dict(re.findall(r"(?s)<h3[^>]*>([^<]+)<(.*?)(?=<h[23]|</article>)", page))
    document = create(Settings()).openapi()
    n_routes, homes = 0, {}
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            n_routes += 1
            section = parts[f"{method.upper()} {path}"]
            if "requestBody" in route:
                body = route["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                homes[body.rpartition("/")[2]] = section
            for status in route["responses"]:
                assert re.search(rf"Statuses</a>: .*\b{status}\b", section), (method, path)
    assert n_routes > 12
    for name, schema in document["components"]["schemas"].items():
        kind = name.rpartition("__")[2]
        named = [text for title, text in parts.items() if title.split(" ")[0] == kind]
        section = homes.get(name) or "".join(named)
        for field in schema.get("properties", {}):
            assert f"<td><code>{field}</code></td>" in section, (name, field)


def test_the_page_of_commands_has_every_option_in_its_place(pages: dict[str, str]) -> None:
    page = pages["reference/command-line/index.html"]
    assert "options of" not in page, "a table was not put in"
    parts = dict(re.findall(r'(?s)<h[23] id="([\w-]+)">(.*?)(?=<h[23] id=|</article>)', page))
    for name, command in commands().items():
        if name == "serve":
            continue  # the flags of a server have a page of their own
        shared = parts["options-of-every-command-that-loads-a-model"]
        section = parts.get(f"juice-{name}") or parts["juice-pull-and-juice-push"]
        for option in command.params:
            flag = option.opts[0] if option.opts[0].startswith("--") else option.name.upper()
            assert f"<code>{flag}</code>" in section + shared, (name, flag)


def test_the_site_fetches_nothing_from_elsewhere(pages: dict[str, str]) -> None:
    found = {place for text in pages.values() for place in FETCHED.findall(text)}
    assert found == set()


def test_links_out_of_the_docs_lead_to_files_of_the_repository(pages: dict[str, str]) -> None:
    linked = {file for text in pages.values() for file in REPOSITORY.findall(text)}
    assert {"README.md", "CONTRIBUTING.md", "juice/models/mini/README.md"} <= linked
    assert {file for file in linked if not (ROOT / file).exists()} == set()


def test_the_navigation_has_the_order_of_the_index(pages: dict[str, str]) -> None:
    listed = re.findall(r"\]\(((?!\.\.)[^)#]+)\.md\)", (ROOT / "docs/index.md").read_text())
    navigation = pages["index.html"].partition('data-md-component="sidebar"')[2]
    shown = re.findall(r'<a href="(?!https?:|\.)([^"#]+)/" class="md-nav__link', navigation)
    assert shown == listed


def test_a_report_leads_to_its_page_which_is_made_of_its_results(
    site: Path, pages: dict[str, str]
) -> None:
    for name in ("mini", "inversion"):
        assert "report.html" in pages[f"results/{name}/report/index.html"]
    page = (site / "results" / "mini" / "report.html").read_text()
    (report,) = (ROOT / "docs" / "results" / "mini").glob("report.md")
    row = next(line for line in report.read_text().splitlines() if line.startswith("| served |"))
    cells = [cell.strip() for cell in row.strip("| ").split("|")]
    assert "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" in page
    assert page.count("<details") == 120 * (3 + 2)  # a clean prompt is judged toward memory alone
