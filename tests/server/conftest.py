"""Running servers: `url` is that of one with its defaults, `server` needs a key.

The one with its defaults serves all files of tests that one process runs, so a test leaves it as it
was, and reads of its metrics only what changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.serving import KEYS, Server, serving


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    with serving() as running:
        yield running.url


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as made:
        yield made


@pytest.fixture(scope="session")
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# clients\n{KEYS[1]}\n", encoding="utf-8")
    with serving(
        "--api-keys-file",
        str(keys),
        "--log-format",
        "json",
        environment={"JUICE_API_KEYS": KEYS[0], "JUICE_CORS_ORIGINS": "https://a.example"},
    ) as running:
        yield running
