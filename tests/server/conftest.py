"""A running server with its defaults: the bundled model and the shipped head sets."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.serving import serving


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving() as running, httpx.Client(base_url=running.url, timeout=60) as made:
        yield made
