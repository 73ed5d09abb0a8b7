"""What holds for every test: threads, random cases, quiet libraries and the option --write-docs."""

from __future__ import annotations

import functools
import gc
import logging
import os
import ssl
from collections.abc import Iterator

import pytest
from hypothesis import settings
from transformers.utils import logging as transformers_logging

# Tiny models are slower on several threads, which wait for each other: here and in the servers that
# tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each client of HTTP makes a context for TLS, of all certificates: forty milliseconds each time.
ssl.create_default_context = functools.cache(ssl.create_default_context)
# The same cases in every run, however slow the machine is.
settings.register_profile("project", derandomize=True, deadline=None)
settings.load_profile("project")


@pytest.fixture(autouse=True, scope="session")
def quiet_transformers() -> Iterator[None]:
    """Keep the libraries' loading bars and advice out of the tests' output."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(logging.ERROR)
    yield
    transformers_logging.enable_progress_bar()


def pytest_collection_finish() -> None:
    """Leave what was imported out of every garbage collection: it is looked at for 0.2 s each."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let tests write the pages that they keep up to date."""
    parser.addoption(
        "--write-docs",
        action="store_true",
        help="write the pages and tables that come from the code, and accept new signatures",
    )
