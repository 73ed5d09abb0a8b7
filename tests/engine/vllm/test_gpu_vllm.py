"""What `make gpu` finds inside vLLM, tried on a processor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_a_start_is_reported_with_how_far_it_is_from_the_two_runs(tmp_path: Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.gpu_vllm", "--out", str(tmp_path / "found.json")),
            *("--runners", "V1", "--hows", "eager", "--architectures", "Llama"),
            *("--dtypes", "float32"),
        ],
        cwd=ROOT,
        check=True,
    )
    (start,) = json.loads((tmp_path / "found.json").read_text())["starts"]
    assert (start["exact"], start["reason"]) == (True, None)
    assert (start["facts"]["runner"], start["facts"]["twin"]) == ("V1", False)
    assert start["largest_differences"].keys() == {"unsteered", "one run", "two runs"}
    assert 0 < max(start["largest_differences"].values()) < 1e-4
