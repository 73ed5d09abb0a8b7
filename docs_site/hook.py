"""What mkdocs does not know: the order of the pages, and files of the repository outside docs/.

The pages are written to be read on GitHub, too. So the navigation is the list of docs/index.md, a
link from a page to a file outside docs/, or to a folder, becomes one to GitHub, and links to
headings of one name are numbered as the site numbers them (`text_1`, not `text-1`).
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

REPOSITORY = "https://github.com/juice-steering/juice"
ROOT = Path(__file__).parents[1]
slug_of = slugify(case="lower")
LINK = re.compile(r"\[([^\[\]]+)\]\(([^)\s]+)\)")
DECISIONS = "decisions/"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation from the headings and links of the index."""
    index = Path(config.docs_dir, "index.md").read_text(encoding="utf-8")
    _, *sections = re.split(r"(?m)^## ", index)
    config.nav = [{"Home": "index.md"}, *(_section(text) for text in sections)]
    return config


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links into those of the site."""
    folder = posixpath.dirname(page.file.src_uri)
    slugs = {slug_of(title, "-") for title in re.findall(r"(?m)^#+ (.+)$", markdown)}

    def numbered(own: re.Match[str]) -> str:
        return own[0] if own[1] in slugs else re.sub(r"-(\d+)\)$", r"_\1)", own[0])

    markdown = re.sub(r"\]\(#([\w-]+)\)", numbered, markdown)
    return re.sub(
        r"\]\((?!\w+:|#)([^)\s]+)\)", lambda own: f"]({_place(own[1], folder)})", markdown
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
