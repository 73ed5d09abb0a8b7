"""What mkdocs does not know: the order of pages, files outside docs/, pages of code and results.

The reference of HTTP and the tables of options are made from the code when the site is built. The
pages are written to be read on GitHub, too. So the navigation is the list of docs/index.md, a
link from a page to a file outside docs/, or to a folder, becomes one to GitHub, and links to
headings of one name are numbered as the site numbers them (`text_1`, not `text-1`).

Beside the report of every evaluation in docs/results stands its page with the single answers, which
is made of its results.json.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

import reference  # beside this file
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

from juice.evaluation.report.parts import page as report_page
from juice.evaluation.report.sections import sections

REPOSITORY = "https://github.com/juice-steering/juice"
ROOT = Path(__file__).parents[1]
slug_of = slugify(case="lower")
LINK = re.compile(r"\[([^\[\]]+)\]\(([^)\s]+)\)")
DECISIONS = "decisions/"
HTTP_PAGE = "reference/http-api.md"
OPTIONS = re.compile(r"<!-- options of (.+?) -->")
REPORT = re.compile(r"results/[^/]+/report\.md")
PAGE = "report.html"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation from the headings and links of the index."""
    index = Path(config.docs_dir, "index.md").read_text(encoding="utf-8")
    _, *sections = re.split(r"(?m)^## ", index)
    config.nav = [{"Home": "index.md"}, *(_section(text) for text in sections)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of every route and field, and that of every evaluation."""
    files.append(File.generated(config, HTTP_PAGE, content=reference.http_page()))
    for report in Path(config.docs_dir).glob("results/*/report.md"):
        results = json.loads(report.with_name("results.json").read_text(encoding="utf-8"))
        content = report_page(sections(results))
        files.append(
            File.generated(config, f"results/{report.parent.name}/{PAGE}", content=content)
        )
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put in the tables of options, and turn links into those of the site."""
    if OPTIONS.search(markdown):
        tables = reference.option_tables()
        markdown = OPTIONS.sub(lambda found: tables[found[1]], markdown)
    if REPORT.fullmatch(page.file.src_uri):
        title, _, rest = markdown.partition("\n")
        markdown = f"{title}\n\n[This report as one page, with the pictures in it]({PAGE})\n{rest}"
    folder = posixpath.dirname(page.file.src_uri)
    slugs = {slug_of(title, "-") for title in re.findall(r"(?m)^#+ (.+)$", markdown)}

    def numbered(link: re.Match[str]) -> str:
        return link[0] if link[1] in slugs else re.sub(r"-(\d+)\)$", r"_\1)", link[0])

    markdown = re.sub(r"\]\(#([\w-]+)\)", numbered, markdown)
    return re.sub(
        r"\]\((?!\w+:|#)([^)\s]+)\)", lambda link: f"]({_place(link[1], folder)})", markdown
    )


def _section(text: str) -> dict[str, Any]:
    title, _, body = text.partition("\n")
    entries: list[dict[str, Any]] = []
    decisions: list[dict[str, str]] = []
    for label, target in LINK.findall(body):
        name = " ".join(label.replace("`", "").split())
        entry = {name[0].upper() + name[1:]: _place(target, "")}
        (decisions if target.startswith(DECISIONS) else entries).append(entry)
    return {title.strip(): [*entries, *([{"Decisions": decisions}] if decisions else [])]}


def _place(target: str, folder: str) -> str:
    """Return where a link of a page in `folder` leads: itself, or a file of the repository."""
    path = posixpath.normpath(posixpath.join("docs", folder, target))
    if (ROOT / path).is_dir():
        return f"{REPOSITORY}/tree/main/{path}"
    return target if path.startswith("docs/") else f"{REPOSITORY}/blob/main/{path}"
