"""The pages agree with the code.

Links resolve; every flag, setting, metric and route is listed. That what they show is what happens
is for test_pages.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from docs_site.reference import commands
from juice_server.app import create
from juice_server.errors import ANSWERS, CLIENT_GONE
from juice_server.settings import Settings
from tests.support.page_blocks import PAGES, ROOT
from tests.support.serving import serving

REFERENCE = ROOT / "docs" / "reference"
# Made when the site is built; integration/browser/test_docs_site.py reads it there.
BUILT = {REFERENCE / "http-api.md"}


def anchors_of(page: Path) -> set[str]:
    titles = re.findall(r"(?m)^#+ (.+)$", page.read_text())
    plain = (re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)
    return set(plain)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        place = (page.parent / file).resolve() if file else page
        if place in BUILT:
            continue
        assert place.exists(), target
        if anchor and place.suffix == ".md":
            assert anchor in anchors_of(place), target


def test_every_page_can_be_found_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {
        (index.parent / target).resolve()
        for target in re.findall(r"\]\(([^)#\s]+)", index.read_text())
    }
    assert {
        page for page in PAGES if page.is_relative_to(ROOT / "docs") and page != index
    } <= linked


def test_every_file_that_a_page_names_is_there() -> None:
    rooms = "juice|server|tests|integration|benchmarks|lab|deploy|docs_site"
    missing = {
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in re.findall(rf"(?<![\w/.-])((?:{rooms})/[\w./-]+\.\w+)", page.read_text())
        if not (ROOT / name).exists() and "FILE" not in name
    }
    assert missing == set()


def test_the_references_name_every_flag_of_the_server_and_no_flag_that_there_is_not() -> None:
    flags = {
        name: {
            flag
            for option in command.params
            for flag in (*option.opts, *option.secondary_opts)
            if flag.startswith("--")
        }
        for name, command in commands().items()
    }
    text, settings = (
        (REFERENCE / f"{name}.md").read_text() for name in ("command-line", "settings")
    )
    assert {flag for flag in flags["serve"] if not re.search(rf"`{flag}[` ]", settings)} == set()
    named = {flag for page in (text, settings) for flag in re.findall(r"`(--[a-z-]+)", page)}
    assert named - {flag for known in flags.values() for flag in known} == set()


def test_the_reference_has_every_setting_with_its_default() -> None:
    text = (REFERENCE / "settings.md").read_text()
    singular = {"api_keys": "--api-key", "vllm_args": "--vllm-arg"}
    for name, field in Settings.model_fields.items():
        flag = singular.get(name, f"--{name.replace('_', '-')}")
        row = next(
            (line for line in text.splitlines() if f"`{flag}`" in line and line.startswith("|")), ""
        )
        assert row, flag
        if (
            isinstance(field.default, int)
            and not isinstance(field.default, bool)
            and field.default < 10_000
        ):
            assert f"{field.default:g}" in row, (flag, row)


def test_the_reference_has_every_metric() -> None:
    text = (REFERENCE / "metrics.md").read_text()
    with serving() as server:
        described = httpx.get(f"{server.url}/metrics").text.splitlines()
    names = {line.split()[2] for line in described if line.startswith("# TYPE")}
    names = {name for name in names if not name.endswith("_created")}
    assert len(names) > 40
    assert not [name for name in sorted(names) if f"`{name}`" not in text]
    listed = set(re.findall(r"`((?:juice_|vllm:)[a-z0-9_]+)`", text))
    assert not listed - names


def test_the_reference_has_every_error_of_the_server() -> None:
    text = "\n".join(file.read_text() for file in (ROOT / "server").rglob("*.py"))
    answered = {code for status, code in ANSWERS.values() if status != CLIENT_GONE}
    answered |= set(re.findall(r'\bcode="([a-z_]+)"', text)) | {"bad_request", "method_not_allowed"}
    page = (REFERENCE / "http.md").read_text().partition("\n## Errors\n")[2]
    rows = re.findall(r"(?m)^\| \d{3} \|([^|]+)\|", page)
    assert answered <= {code for row in rows for code in re.findall(r"`([a-z_]+)`", row)}


def test_the_reference_has_every_route() -> None:
    text = (REFERENCE / "http.md").read_text()
    paths = create(Settings()).openapi()["paths"]
    assert len(paths) > 8
    for path, methods in paths.items():
        for method in methods:
            assert f"{method.upper()} {path.replace('/{name}', '')}" in text, path


def test_the_readme_is_short() -> None:
    seen = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text())
    assert len(seen.split()) < 900
