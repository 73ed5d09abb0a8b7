"""Files that are written: whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from juice.errors import OutputError
from juice.files import write_lines


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    def failing() -> Any:
        yield "new\n"
        raise KeyboardInterrupt

    path = tmp_path / "sub" / "out.jsonl"
    write_lines(path, ["old\n"], overwrite=False)
    with pytest.raises(KeyboardInterrupt):
        write_lines(path, failing(), overwrite=True)
    with pytest.raises(OutputError, match="--force"):
        write_lines(path, ["new\n"], overwrite=False)
    assert path.read_text() == "old\n"
    write_lines(path, ["né\n"], overwrite=True)
    assert path.read_bytes() == "né\n".encode()
    assert [file.name for file in path.parent.iterdir()] == ["out.jsonl"]
