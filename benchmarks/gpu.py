"""What a GPU host has to show: `make gpu`.

First exactness: every architecture of the tests, tiny and random, and the bundled model are loaded
in float32, bfloat16 and float16 on the device, and diagnosed as `juice doctor` does it. Then speed:
`benchmarks.peers` with the shapes of a Llama of 1B and, where the memory is enough, of 8B. Both go
into a file of `docs/results/gpu` with the name of the machine.

It needs PyTorch, transformers and the few small packages that `make gpu` installs. What is not
there, such as vLLM, is listed as not measured.
"""

from __future__ import annotations

import argparse
import json
import re
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import juice
from benchmarks import machine, peers
from benchmarks.shapes import SHAPES
from benchmarks.ways import ROWS, WAYS
from juice.errors import JuiceError
from juice.exactness import diagnose
from tests.support.architectures import ARCHITECTURES
from tests.support.tiny import tiny_tokenizer

RESULTS = Path("docs/results/gpu")
DTYPES = ("float32", "bfloat16", "float16")
# The weights, as much again for keys, values and what else runs beside them in other processes.
N_COPIES = 5


def exactness(device: str, dtypes: Iterable[str], names: Iterable[str]) -> list[dict[str, Any]]:
    """Return whether each model is steered exactly in each dtype, and its largest differences."""
    found = []
    for name in ("mini", *names):
        for dtype in dtypes:
            own = {"model": name, "dtype": dtype, **_diagnosed(name, device, dtype)}
            print(f"{name}, {dtype}: {'exact' if own['exact'] else own['reason']}", flush=True)
            found.append(own)
    return found


def _diagnosed(name: str, device: str, dtype: str) -> dict[str, Any]:
    """Diagnose one model; whatever a device does is a result here, and none of it ends the run."""
    try:
        if name == "mini":
            model = juice.load("mini", device=device, dtype=dtype)
        else:
            own = next(own for own in ARCHITECTURES if own.name == name).build()
            made = own.to(device, getattr(torch, dtype))
            model = juice.load(made, tokenizer=tiny_tokenizer())
        with warnings.catch_warnings(), model:
            warnings.simplefilter("ignore")  # of what a random model has not got
            diagnosis = diagnose(model.engine, model.head_sets)
    except JuiceError as error:
        return {"exact": False, "reason": str(error), "differences": {}}
    except Exception as error:
        return {"exact": False, "reason": repr(error), "trace": traceback.format_exc()}
    differences = {
        check.name: {"difference": check.difference, "bound": check.bound, "unit": check.unit}
        for check in diagnosis.checks
    }
    return {"exact": diagnosis.exact, "reason": diagnosis.reason, "differences": differences}


def fitting(device: str) -> list[str]:
    """Return the shapes for which the device has memory, in bfloat16."""
    if device == "cpu":
        return ["small"]
    there = torch.cuda.get_device_properties(device).total_memory
    return [name for name in ("1b", "8b") if SHAPES[name].n_weights * 2 * N_COPIES < there]


def file_of(name: str) -> Path:
    """Return the file of the results of a machine."""
    return RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def main() -> None:
    """Check, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=DTYPES)
    parser.add_argument(
        "--architectures",
        nargs="*",
        choices=[own.name for own in ARCHITECTURES],
        default=[own.name for own in ARCHITECTURES],
        help="beside mini",
    )
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, help="else those that fit")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--only", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, help="else a file of docs/results/gpu")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here; --device cpu tries the command without one")
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    shapes = fitting(options.device) if options.shapes is None else options.shapes
    result: dict[str, Any] = {
        "machine": machine.describe(),
        "device": options.device,
        "exactness": exactness(options.device, options.dtypes, options.architectures),
        "speed": [],
    }
    out = options.out or file_of(str(result["machine"]["gpu"] or result["machine"]["cpu"]))
    out.parent.mkdir(parents=True, exist_ok=True)
    for shape in shapes:
        result["speed"].append(
            peers.measure(
                shape,
                device=options.device,
                dtype=dtype,
                n_rounds=options.rounds,
                rows=options.rows,
                names=options.only,
            )
        )
        print(f"\nA Llama of the shape {shape}, {dtype}:\n\n{peers.tables(result['speed'][-1])}")
        out.write_text(json.dumps(result, indent=1) + "\n")  # whatever comes after it
    out.write_text(json.dumps(result, indent=1) + "\n")
    inexact = [own for own in result["exactness"] if not own["exact"]]
    print(f"\n{len(result['exactness']) - len(inexact)} of {len(result['exactness'])} exact; {out}")
    if inexact:
        raise SystemExit(f"not exact: {', '.join(own['model'] for own in inexact)}")


if __name__ == "__main__":
    main()
