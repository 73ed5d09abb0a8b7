"""`make run`, the first command that anybody tries, serves the bundled model and steers it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.serving import CONFLICT, free_port, within

ROOT = Path(__file__).parents[1]


def test_make_run_serves_the_bundled_model_steered(tmp_path: Path) -> None:
    if not (ROOT / ".venv" / ".installed").exists():
        pytest.skip("`make setup` has not been run here, and installing takes minutes")
    port = free_port()
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen(
            ["make", "run", f"PORT={port}"],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert running.poll() is None, (tmp_path / "log").read_text()
        try:
            return httpx.get(f"{url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    try:
        within(120, is_ready, "it is ready")
        asked = {"prompt": CONFLICT, "steer": "parametric", "max_tokens": 8}
        answer = httpx.post(f"{url}/generate", json=asked, timeout=60).json()
        assert "Lima" in answer["text"]
        assert answer["steering"]["applied"] is True
        assert "JuICE" in httpx.get(url).text, "the playground"
    finally:
        os.killpg(running.pid, signal.SIGINT)
        running.wait(60)
    assert "Traceback" not in (tmp_path / "log").read_text()
