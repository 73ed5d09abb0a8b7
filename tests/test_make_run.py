"""`make run`, the first command that anybody tries, serves the bundled model and steers it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from integration.real.models import MODELS
from tests.support.serving import CONFLICT, free_port, within

ROOT = Path(__file__).parents[1]


def commands(*arguments: str) -> list[str]:
    asked = ["make", "--dry-run", "--no-print-directory", *arguments]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_make_run_fetches_a_real_model_before_it_serves_its_file(tmp_path: Path) -> None:
    *_, fetched, served = commands("run", "MODEL=smollm2", f"REAL_CACHE={tmp_path}")
    assert fetched.endswith(f"-m integration.real.models {tmp_path}/models smollm2")
    assert served.endswith(f"juice serve --model {tmp_path}/models/smollm2.gguf --port 8000")


def test_make_run_serves_any_other_model_as_it_is_named() -> None:
    for model in ("mini", "some/model"):
        *before, served = commands("run", f"MODEL={model}")
        assert served.endswith(f"juice serve --model {model} --port 8000")
        assert not any("integration.real" in line for line in before)


def test_make_real_knows_every_real_model(tmp_path: Path) -> None:
    fetched = commands("real", f"REAL_CACHE={tmp_path}")
    (line,) = (one for one in fetched if "integration.real.models" in one)
    assert line.split(f"{tmp_path}/models ")[1].split() == list(MODELS)


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
