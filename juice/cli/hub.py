"""`juice push` and `juice pull`: head sets to the hub, and from it into the folder of head sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from juice.cli import console, options


def push(
    head_set: options.HeadSetArgument,
    repo_id: Annotated[
        str,
        typer.Argument(help="The hub repository, such as owner/name; created if there is none."),
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private.")
    ] = False,
    head_sets: options.HeadSets = None,
    json: options.Json = False,
) -> None:
    """Upload a head set and a model card in one commit; needs HF_TOKEN or `hf auth login`."""
    from juice.head_set.library import find_head_set

    options.quiet_libraries()
    folder, chosen = find_head_set(head_set, head_sets)
    url = chosen.push_to_hub(repo_id, private=private or None)
    console.answer_either(url, {"path": str(folder), "url": url}, as_json=json)


def pull(
    repo_id: Annotated[
        str, typer.Argument(help="A hub repository, or a folder, that holds a head set.")
    ],
    out: options.OutFolder = Path("head_sets"),
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the repository.")
    ] = None,
    subfolder: Annotated[
        str | None, typer.Option(help="Folder of the set in the repository; else its root.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite what is there, and download again.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Download a head set, verify it and save it where `--head-sets` finds it."""
    from juice.head_set.head_set import HeadSet
    from juice.head_set.schema import slug

    options.quiet_libraries()
    head_set = HeadSet.from_pretrained(
        repo_id, revision=revision, subfolder=subfolder, force_download=force
    )
    folder = out / slug(head_set.model.id) / head_set.name
    head_set.save(folder, overwrite=force)
    saved = head_set.model_dump(mode="json", include={"name", "target", "model"})
    console.answer_either(str(folder), {"path": str(folder), **saved}, as_json=json)
