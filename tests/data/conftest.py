"""The bundled model."""

from __future__ import annotations

import pytest

import juice
from juice.steered_model import SteeredModel


@pytest.fixture(scope="module")
def mini() -> SteeredModel:
    return juice.load("mini")
