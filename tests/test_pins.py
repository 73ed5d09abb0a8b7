"""The pins fit the build of vLLM for GPUs, which nothing installs where the tests run.

pip reads from the registry what that build requires, a few hundred lines, not the build.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(
        r"(?m)^([\w.-]+)==(\S+)$", (ROOT / "constraints-vllm.txt").read_text()
    )
}


def test_every_requirement_of_the_gpu_build_is_pinned_to_a_version_it_takes(
    tmp_path: Path,
) -> None:
    report = tmp_path / "report.json"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    done = subprocess.run(
        [*pip, "--no-deps", "--report", str(report), f"vllm=={PINS['vllm']}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if "Temporary failure in name resolution" in done.stderr or "NewConnection" in done.stderr:
        pytest.skip("no package registry can be reached")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(report.read_text())["install"]
    required = [Requirement(own) for own in found["metadata"]["requires_dist"]]
    needed = [own for own in required if own.marker is None or own.marker.evaluate({"extra": ""})]
    assert len(needed) > 50
    for own in needed:
        pin = PINS.get(canonicalize_name(own.name))
        assert pin is not None, f"{own} is not pinned"
        assert own.specifier.contains(pin, prereleases=True), f"{own}, pinned to {pin}"
