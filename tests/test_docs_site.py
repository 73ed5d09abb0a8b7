"""The site: strictly built, from the pages as they stand, without anything from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REPOSITORY = re.compile(
    r'href="https://github\.com/juice-steering/juice/(?:blob|tree)/main/([^"#]+)'
)
# What a browser fetches by itself, other than what a reader clicks on.
FETCHED = re.compile(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="((?:https?:)?//[^"]+)"')


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the pages of the site by their paths; a warning ends a strict build."""
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
    return {str(own.relative_to(place)): own.read_text() for own in place.glob("**/index.html")}


def test_the_site_has_every_page(pages: dict[str, str]) -> None:
    docs = ROOT / "docs"
    expected = {str(own.relative_to(docs).with_suffix("")) for own in docs.glob("**/*.md")}
    assert {own.removesuffix("/index.html") for own in pages} == expected - {"index"} | {
        "index.html"
    }


def test_the_site_fetches_nothing_from_elsewhere(pages: dict[str, str]) -> None:
    found = {own for text in pages.values() for own in FETCHED.findall(text)}
    assert found == set()


def test_links_out_of_the_docs_lead_to_files_of_the_repository(pages: dict[str, str]) -> None:
    linked = {own for text in pages.values() for own in REPOSITORY.findall(text)}
    assert {"README.md", "CONTRIBUTING.md", "juice/models/mini/README.md"} <= linked
    assert {own for own in linked if not (ROOT / own).exists()} == set()


def test_the_navigation_has_the_order_of_the_index(pages: dict[str, str]) -> None:
    listed = re.findall(r"\]\(((?!\.\.)[^)#]+)\.md\)", (ROOT / "docs/index.md").read_text())
    navigation = pages["index.html"].partition('data-md-component="sidebar"')[2]
    shown = re.findall(r'<a href="(?!https?:|\.)([^"#]+)/" class="md-nav__link', navigation)
    assert shown == listed
