"""How models are named where others see the name: in the folders of head sets and on the hub."""

from __future__ import annotations

from pathlib import Path


def slug(model_id: str) -> str:
    """Return the folder name of a model's head sets: its public id with `/` as `--`."""
    return public_id(model_id).replace("/", "--")


def public_id(model_id: str) -> str:
    """Return a model's id as others know it: for a path, its last part."""
    is_path = model_id.startswith((".", "/", "~")) or Path(model_id).is_dir()
    return Path(model_id).resolve().name if is_path else model_id
