"""What an identification has computed so far, so that an interrupted one goes on where it stopped.

A result is plain data under a key. In memory it serves the run alone; in a file, which names all
that the results depend on, a later run of the same command finds it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from juice.files import write_lines


class Unfinished:
    """The results of a run, in memory."""

    def __init__(self) -> None:
        self._results: dict[str, Any] = {}
        self.n_found = 0

    def get(self, key: str) -> Any:
        """Return a result; None where there is none."""
        if key in self._results:
            self.n_found += 1
        return self._results.get(key)

    def put(self, key: str, result: Any) -> None:
        """Keep a result."""
        self._results[key] = result


class UnfinishedFile(Unfinished):
    """The results of a run, in a file.

    Args:
        path: The file; another run's is replaced.
        identity: All that the results depend on, as plain data.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        super().__init__()
        self._path, self._identity = path, json.loads(json.dumps(identity))
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["identity"] == self._identity:
                self._results = dict(found["results"])
        except (OSError, ValueError, KeyError, TypeError):  # none, or not one of ours
            pass

    def put(self, key: str, result: Any) -> None:
        """Keep a result and write the file. Raises OutputError."""
        super().put(key, result)
        content = {"identity": self._identity, "results": self._results}
        write_lines(self._path, [json.dumps(content)], overwrite=True)

    def remove(self) -> None:
        """Remove the file: the run is done."""
        self._path.unlink(missing_ok=True)
