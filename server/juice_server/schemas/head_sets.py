"""The body that brings a head set: the two files of its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Base64Bytes

from juice import HeadSet
from juice.errors import HeadSetError
from juice.head_set import storage
from juice.head_set.reading import JSON_FILE, MAX_BYTES, SCORES_FILE
from juice.head_set.schema import FORMAT
from juice_server.schemas.shared import Body


class HeadSetFiles(Body):
    """The body of PUT /v1/head_sets/NAME: what is in the folder of a head set."""

    head_set: dict[str, Any]
    """The content of head_set.json, with the hash that seals it."""
    scores: Base64Bytes | None = None
    """The content of scores.safetensors, base64; null where the set has none."""

    def head_set_named(self, name: str) -> HeadSet:
        """Return the head set, verified; raises HeadSetError."""
        files = {JSON_FILE: json.dumps(self.head_set).encode()}
        if self.scores is not None:
            files[SCORES_FILE] = self.scores
        for file, most in MAX_BYTES.items():
            if len(files.get(file, b"")) > most:
                raise HeadSetError(f"{file} has more than {most:,} bytes, the most in a head set")
        if (given := self.head_set.get("format")) != FORMAT:
            raise HeadSetError(
                f"format is {given!r}, expected {FORMAT!r}, which is sealed; load and save an older"
                " set once"
            )
        head_set = storage.from_files(files, Path(), HeadSet)
        if self.scores is not None and head_set.scores is None:
            raise HeadSetError("scores are given, but the set has no scores_sha256; leave them out")
        if head_set.name != name:
            raise HeadSetError(
                f"the set is named {head_set.name!r}, and the path names {name!r}; they must agree"
            )
        return head_set
