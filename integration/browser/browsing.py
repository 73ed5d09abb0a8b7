"""A headless Chromium, from npm's registry; `make test` installs it into integration/browser."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

FOLDER = Path(__file__).parent
WHERE = "import('@sparticuz/chromium').then(own => own.default.executablePath()).then(console.log)"
TIMEOUT_MS = 60_000  # for what a page waits for on a busy machine
OpenPage = Callable[..., AbstractContextManager[Page]]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the browser for the block; it is unpacked at first use, for which Node.js is needed."""
    found = subprocess.run(
        ["node", "-e", WHERE], cwd=FOLDER, capture_output=True, text=True, check=True
    )
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=found.stdout.strip(), args=["--no-sandbox"]
        )
        yield running
        running.close()
