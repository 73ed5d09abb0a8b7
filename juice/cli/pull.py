"""`juice pull`: download a head set from the hub into the folder of head sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from juice.cli import console, options


def run(
    repo_id: Annotated[
        str, typer.Argument(help="A hub repository, or a folder, that holds a head set.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of head sets; the set goes to `OUT/<model>/<name>`.")
    ] = Path("head_sets"),
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
    from juice.head_set import HeadSet
    from juice.head_set.naming import slug

    options.quiet_libraries()
    head_set = HeadSet.from_pretrained(
        repo_id, revision=revision, subfolder=subfolder, force_download=force
    )
    folder = out / slug(head_set.model.id) / head_set.name
    head_set.save(folder, overwrite=force)
    if json:
        console.answer_json(
            {
                "path": str(folder),
                **head_set.model_dump(mode="json", include={"name", "target", "model"}),
            }
        )
    else:
        console.answer(str(folder))
