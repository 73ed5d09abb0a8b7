"""`juice push`: upload a head set to the hub."""

from __future__ import annotations

from typing import Annotated

import typer

from juice.cli import console, options


def run(
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
    from juice.head_set.lookup import find_head_set

    options.quiet_libraries()
    folder, chosen = find_head_set(head_set, head_sets)
    url = chosen.push_to_hub(repo_id, private=private or None)
    if json:
        console.answer_json({"path": str(folder), "url": url})
    else:
        console.answer(url)
