"""The name of a model's deployment in Ray Serve: as in the folders of head sets, without `/`."""

from __future__ import annotations


def deployment_name(model: str) -> str:
    """Return the name of the deployment that serves a model."""
    return model.replace("/", "--")
