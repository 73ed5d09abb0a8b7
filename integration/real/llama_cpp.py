"""Our reading of GGUF files against llama.cpp's: tokens, weights and log-probabilities.

It is run once by hand, in the environment of the project, and is given the Python of another one,
which has llama.cpp built for this processor and the package gguf. A C++ compiler and CMake make it:

    python -m venv LLAMA
    CMAKE_ARGS=-DGGML_NATIVE=ON LLAMA/bin/pip install gguf==0.19.0 \\
        --no-binary llama-cpp-python llama-cpp-python==0.3.36
    python -m integration.real.models MODELS
    python -m integration.real.llama_cpp MODELS/smollm2.gguf --python LLAMA/bin/python

Of a file it compares, and prints as JSON:

- the tokens of a text and of texts that are odd, with names of control tokens read as such, and as
  text;
- each tensor as llama.cpp unpacks it;
- log-probabilities in a text, with the weights in float32: a file of them is written, so that both
  engines have the same weights and round nothing on purpose; chunks are longer than Gemma's window;
- the same with the file as it is, whose activations llama.cpp rounds to 8 bits. No bar: that is
  what its arithmetic changes, not how a file is read;
- the tokens that end an answer, without a bar: llama.cpp also counts those that separate files.

`--keep FOLDER` keeps the float32 file. The exit status is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import juice
from benchmarks.rig import machine
from integration.real.odd_texts import ODD_TEXTS
from integration.real.requantise import requantise
from juice.engine.answer import ScoredToken
from juice.gguf import GgufFile

ROOT = Path(__file__).parents[2]
N_CHUNKS, N_IN_CHUNK = 3, 700
MOST_OFF = 0.01
"""The bar of a log-probability's difference, in nats."""
LEAST_AGREEING = 0.999
"""The bar of the share of positions where both think the same token the likeliest."""
MOST_OFF_IN_WEIGHTS = 1e-6
"""The bar of a weight's difference, over the tensor's largest: a rounding or two of float32."""
QUANTILES = (0.5, 0.9, 0.99, 1.0)

Answers = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Ours:
    """What JuICE makes of a file.

    Args:
        tokens: The tokens of each text, in each way of `reference.HOW`.
        ends: The tokens that end an answer.
        chunks: Tokens of ordinary text.
        scored: The tokens of each chunk with their likeliest alternatives.
    """

    tokens: dict[str, list[list[int]]]
    ends: list[int]
    chunks: list[list[int]]
    scored: list[tuple[ScoredToken, ...]]


def ordinary_text() -> str:
    """Return the English that thresholds are measured on, the README, and pages of these docs."""
    pages = [ROOT / "juice/evaluation/data/plain_text.txt", ROOT / "README.md"]
    pages += [ROOT / "docs" / f"{name}.md" for name in ("method", "evaluation", "exactness")]
    return "\n\n".join(page.read_text() for page in pages)


def our_tokens(tokenizer: Any, texts: Sequence[str]) -> dict[str, list[list[int]]]:
    """Return the tokens of texts, in each way of `reference.HOW`."""
    ways: dict[str, dict[str, bool]] = {
        "whole": {},
        "parsed": {"add_special_tokens": False},
        "as text": {"add_special_tokens": False, "split_special_tokens": True},
    }
    return {
        how: [tokenizer(text, **options)["input_ids"] for text in texts]
        for how, options in ways.items()
    }


def ours(path: Path, texts: Sequence[str]) -> Ours:
    """Return the tokens of texts, and the engine's log-probabilities in chunks of the first one."""
    with juice.load(path, dtype="float32", device="cpu") as model:
        tokens = our_tokens(model.description.tokenizer, texts)
        whole, plain = tokens["whole"][0], tokens["parsed"][0]
        begin = whole[: len(whole) - len(plain)]
        chunks = [[*begin, *plain[i * N_IN_CHUNK : (i + 1) * N_IN_CHUNK]] for i in range(N_CHUNKS)]
        answers = [
            model.generate([chunk], max_tokens=0, prompt_logprobs=True, top_logprobs=20)[0]
            for chunk in chunks
        ]
        ends = model.loaded.model.generation_config.eos_token_id
        return Ours(tokens, ends, chunks, [answer.prompt_tokens for answer in answers])


def theirs(python: str, path: Path, asked: dict[str, Any], folder: Path) -> Answers:
    """Return what llama.cpp makes of a file."""
    questions, answers = folder / "asked.json", folder / f"{path.stem}.npz"
    questions.write_text(json.dumps({"threads": torch.get_num_threads(), **asked}))
    done = subprocess.run(
        [python, "-m", "integration.real.reference", path, questions, answers],
        cwd=ROOT,
        capture_output=True,  # llama.cpp tells of each tensor
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"llama.cpp failed on {path.name}:\n{done.stderr[-4000:]}")
    with np.load(answers) as found:
        return dict(found)


def compare_tokens(
    texts: Sequence[str], tokens: Mapping[str, list[list[int]]], other: Answers
) -> dict[str, Any]:
    """Return how many texts there are and which have other tokens, in each way of reading them.

    Texts with a token that llama.cpp makes a control token against the file's word are counted
    apart: such a file's tokens are here what it says.
    """
    made = other["made control"].tolist()
    is_told = [not any(token in text for token in made) for text in texts]
    report: dict[str, Any] = {
        "texts": sum(is_told), "tokens": sum(len(ids) for ids in tokens["parsed"]),
        "texts with tokens that llama.cpp overrides": len(texts) - sum(is_told),
        "overridden": made,
    }  # fmt: skip
    for how, found in tokens.items():
        report[f"differing, {how}"] = [
            {"text": text[:60], "ours": ids[:60], "llama.cpp": expected[:60]}
            for i, (text, ids) in enumerate(zip(texts, found, strict=True))
            if is_told[i] and ids != (expected := other[f"{how}-{i}"].tolist())
        ]
    return report


def compare_logprobs(mine: Ours, other: Answers) -> dict[str, Any]:
    """Return quantiles of the differences, and the share of positions with the same top token.

    The top token is llama.cpp's. Where it is not among our likeliest, the difference is at least
    the one to the last of these, which is counted.
    """
    of_top, of_next, same = [], [], []
    for i, scored in enumerate(mine.scored):
        top, logprobs = other[f"top-{i}"], other[f"top_logprobs-{i}"]
        for j, token in enumerate(scored[1:]):
            assert token.logprob is not None
            same.append(token.top[0][0] == top[j][0])
            ours_of_top = dict(token.top).get(int(top[j][0]), token.top[-1][1])
            of_top.append(abs(ours_of_top - logprobs[j][0]))
            of_next.append(abs(token.logprob - other[f"next_logprobs-{i}"][j]))
    return {
        "positions": len(same),
        "same top token": float(np.mean(same)),
        "difference, top token": quantiles(of_top),
        "difference, next token of the text": quantiles(of_next),
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the quantiles of values, by their percentage, with three digits that count."""
    return {f"{q:.0%}": float(f"{np.quantile(values, q):.3g}") for q in QUANTILES}


def missed(report: dict[str, Any]) -> list[str]:
    """Return the bars that a report misses, in words."""
    exact = report["float32 weights"]
    reached = {
        "tokens": not any(
            v for name, v in report["tokens"].items() if name.startswith("differing")
        ),
        "weights": report["weights"]["largest difference"] <= MOST_OFF_IN_WEIGHTS,
        "top token": exact["same top token"] >= LEAST_AGREEING,
        "log-probability": exact["difference, top token"]["100%"] <= MOST_OFF,
    }
    return [name for name, is_reached in reached.items() if not is_reached]


def compare(path: Path, python: str, folder: Path) -> dict[str, Any]:
    """Return a file's whole report; `folder` has space for the float32 file."""
    file = GgufFile(path)
    texts = [ordinary_text(), *ODD_TEXTS]
    mine = ours(path, texts)
    gc.collect()
    asked = {"texts": texts, "chunks": mine.chunks}
    as_it_is = theirs(python, path, {**asked, "weights": True}, folder)
    plain = requantise(path, folder / f"{path.stem}-float32.gguf", "F32")
    exact = theirs(python, plain, {**asked, "weights": False}, folder)
    versions = {name: version(name) for name in ("gguf", "tokenizers")}
    return {
        "command": f"python -m integration.real.llama_cpp {path.name} --python LLAMA/bin/python",
        "model": {
            "name": file.name, "sha256": file.sha256, "quantisation": file.quantization,
        },
        "machine": machine() | versions,
        "llama-cpp-python": str(as_it_is["version"]),
        "system of llama.cpp": str(as_it_is["system"]).strip(),
        "tokens": compare_tokens(texts, mine.tokens, as_it_is),
        "tokens that end an answer": {"ours": mine.ends, "llama.cpp": as_it_is["ends"].tolist()},
        "weights": {
            "quantised tensors": len(as_it_is["weights"]),
            "largest difference": float(f"{as_it_is['weights'].max():.3g}"),
        },
        "float32 weights": compare_logprobs(mine, exact),
        "file as it is": compare_logprobs(mine, as_it_is),
    }  # fmt: skip


def main() -> int:
    """Compare a file, print the report, and return 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="A .gguf file.")
    parser.add_argument("--python", required=True, help="The Python that has llama_cpp and gguf.")
    parser.add_argument("--write", type=Path, help="A file for the report.")
    parser.add_argument("--keep", type=Path, help="A folder that keeps what is made on the way.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as gone:
        folder = asked.keep or Path(gone)
        folder.mkdir(parents=True, exist_ok=True)
        report = compare(asked.model, asked.python, folder)
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    if asked.write is not None:
        asked.write.parent.mkdir(parents=True, exist_ok=True)
        asked.write.write_text(text)
    sys.stdout.write(text)
    for bar in (failures := missed(report)):
        sys.stderr.write(f"{asked.model.name} misses the bar of: {bar}\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
