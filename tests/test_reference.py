"""Reference pages that are written from the code: `pytest tests/test_reference.py --write-docs`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import http_page
from tests.support.command_tables import tables

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
TABLE = re.compile(r"(?ms)^(<!-- options of (.+?) -->\n).*?^(<!-- end -->)$")


def test_the_tables_of_options_are_those_of_the_help(request: pytest.FixtureRequest) -> None:
    page, own = REFERENCE / "command-line.md", tables()
    text = page.read_text()
    fresh = TABLE.sub(lambda found: f"{found[1]}{own[found[2]]}\n{found[3]}", text)
    if request.config.getoption("--write-docs"):
        page.write_text(fresh)
    assert fresh == page.read_text(), "options changed: run this file with --write-docs"
    settings = {"juice serve"}  # the flags of a server have a page of their own
    assert {found[2] for found in TABLE.finditer(text)} == set(own) - settings


def test_the_page_of_fields_is_that_of_the_schema(request: pytest.FixtureRequest) -> None:
    page = REFERENCE / "http-api.md"
    if request.config.getoption("--write-docs"):
        page.write_text(http_page.page())
    assert http_page.page() == page.read_text(), "routes changed: run this file with --write-docs"
