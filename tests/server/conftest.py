"""Running servers: tests that give `served` the same options share one.

They run until the last test of the process, so a test leaves a shared server as it was, and reads
of its metrics and its log only what it adds. A test that stops or breaks a server starts its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import openai
import pytest

from tests.support.serving import KEYS, Server, serving

Serve = Callable[..., Server]


@pytest.fixture(scope="session")
def served() -> Iterator[Serve]:
    """Return the running server of some options."""
    running: dict[tuple[str, ...], Server] = {}
    with ExitStack() as stack:

        def server_of(*options: str) -> Server:
            if options not in running:
                running[options] = stack.enter_context(serving(*options))
            return running[options]

        yield server_of


@pytest.fixture(scope="session")
def url(served: Serve) -> str:
    """Return the address of a server with its defaults."""
    return served().url


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as made:
        yield made


@pytest.fixture(scope="session")
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server that needs a key: one from its environment, or one from a file."""
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
