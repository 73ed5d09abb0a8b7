"""`make gpu`, on a processor: what it checks, what it writes, and what it says where there is none.

Catches a command that ends with 0 without its results, or where a model is not exact.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
WAYS = ("generate, static batch", "own engine, steered")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.long
def test_exactness_and_speed_are_written(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = run(
        *("--device", "cpu", "--dtypes", "float32", "bfloat16", "--architectures", "GPT-2"),
        *("--rounds", "1", "--rows", "1", "--only", *WAYS, "--out", str(out)),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert {(own["model"], own["dtype"], own["exact"]) for own in result["exactness"]} == {
        (model, dtype, True) for model in ("mini", "GPT-2") for dtype in ("float32", "bfloat16")
    }
    assert all(own["differences"] for own in result["exactness"])
    (speed,) = result["speed"]
    assert set(speed["ways"]) == set(WAYS)
    for way in speed["ways"].values():
        assert way["seconds"]["step 1"] > 0
        assert way["seconds"]["prompts 1"] > 0
    assert "| own engine, steered | " in done.stdout
    assert "4 of 4 exact" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 2
    assert "PyTorch finds no GPU here; --device cpu tries the command without one" in done.stderr
