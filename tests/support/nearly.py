"""Answers of a second run."""

from __future__ import annotations

from typing import Any

import pytest


def nearly(value: Any) -> Any:
    """Return what equals the same JSON from a second run, whose sums may be rounded otherwise."""
    if isinstance(value, dict):
        return {key: nearly(each) for key, each in value.items()}
    if isinstance(value, list):
        return [nearly(each) for each in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value
