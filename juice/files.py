"""Files that come with the package, and text files written in one step.

Readers of such a text file see the old one or the new one; an interrupted write leaves nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from juice.errors import OutputError

# The bundled model: weights, tokenizer, examples.
MINI = Path(__file__).parent / "models" / "mini"
# How every page looks: the playground and the reports.
LOOK = Path(__file__).with_name("look.css")


def check_writable(path: Path, *, overwrite: bool) -> None:
    """Raise OutputError, before any work is done, if the file cannot be written."""
    try:
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is not a file; choose another --out")
        if path.exists() and not overwrite:
            raise OutputError(f"{path} exists; choose another --out, or overwrite it with --force")
        parent = path.resolve().parent
        while not parent.exists():
            parent = parent.parent
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another --out") from error


def write_lines(path: Path, lines: Iterable[str], *, overwrite: bool) -> None:
    """Write lines, which carry their line ends, to a new file and rename it into place.

    Makes the folder. Raises OutputError.
    """
    check_writable(path, overwrite=overwrite)
    path, temporary = path.resolve(), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
        temporary = None
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another --out") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
