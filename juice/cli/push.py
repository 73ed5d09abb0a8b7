"""`juice push`: a head set from its folder to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from juice.cli import console, options


def run(
    head_set: Annotated[Path, typer.Argument(help="The head set's folder.")],
    repo_id: Annotated[str, typer.Argument(help="The hub repository, such as owner/name; made where there is none.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    json: options.Json = False,
) -> None:
    """Upload a head set and a generated model card in one commit; needs HF_TOKEN or `hf auth login`."""
    from juice.head_set import HeadSet

    options.quiet_libraries()
    url = HeadSet.load(head_set).push_to_hub(repo_id, private=private or None)
    if json:
        console.answer_json({"path": str(head_set), "url": url})
    else:
        console.answer(url)
