"""A folder of somebody who may not look everywhere."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534


@pytest.fixture
def not_root() -> Iterator[Path]:
    """Be somebody who may not look into every folder, and return a folder of theirs."""
    is_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:
        if is_root:
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            yield Path(folder)
        finally:
            if is_root:
                os.seteuid(0)
