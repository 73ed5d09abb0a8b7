"""Every way to split text that is known, against llama.cpp's, on the vocabularies in its sources.

The sources of llama-cpp-python (`pip download --no-deps --no-binary :all: llama-cpp-python`) have
files without weights in `vendor/llama.cpp/models/`: VOCABULARIES. Each is compared as it is, and
Llama 3's is split in all ways besides, by copies of it that say so.

    python -m integration.real.vocabularies VOCABULARIES --python LLAMA/bin/python

`llama_cpp.py` says how to make that Python. The exit status is 1 where a text's tokens differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from integration.real.llama_cpp import compare_tokens, ordinary_text, our_tokens, theirs
from integration.real.odd_texts import ODD_TEXTS
from integration.real.requantise import requantise
from juice.gguf_tokenizer import SPLITS, tokenizer_of

NAMES = ("gpt-2", "llama-bpe", "llama-spm", "qwen2")
BETWEEN = "\n__ggml_vocab_test__\n"


class Fields:
    """The fields of a file without weights, whose architecture may be any."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = GGUFReader(path)

    def field(self, name: str) -> Any:
        """Return a field's value; None without it."""
        found = self._reader.get_field(name)
        return None if found is None else found.contents()


def compare(path: Path, python: str, texts: list[str], folder: Path) -> dict[str, Any]:
    """Return what differs in the tokens of texts."""
    tokens = our_tokens(tokenizer_of(Fields(path)), texts)
    asked = {"texts": texts, "chunks": [], "weights": False}
    return compare_tokens(texts, tokens, theirs(python, path, asked, folder))


def main() -> int:
    """Compare all vocabularies in all ways, print the report, and return 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="llama.cpp's folder of vocabularies.")
    parser.add_argument("--python", required=True, help="The Python that has llama_cpp and gguf.")
    asked = parser.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as kept:
        for name in NAMES:
            path = asked.folder / f"ggml-vocab-{name}.gguf"
            of_llama_cpp = path.with_name(f"{path.name}.inp").read_text().split(BETWEEN)
            texts = [ordinary_text(), *ODD_TEXTS, *of_llama_cpp]
            report[name] = compare(path, asked.python, texts, Path(kept))
            for split in SPLITS if name == "llama-bpe" else ():
                copy = Path(kept) / f"{name} as {split}.gguf"
                requantise(path, copy, "F32", {"tokenizer.ggml.pre": split})
                report[copy.stem] = compare(copy, asked.python, texts, Path(kept))
                copy.unlink()
    sys.stdout.write(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return int(any(v for of_file in report.values() for k, v in of_file.items() if "differ" in k))


if __name__ == "__main__":
    sys.exit(main())
