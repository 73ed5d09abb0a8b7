"""What a GPU host has to show: `make gpu`.

First exactness: every architecture of the tests, tiny and random, and the bundled model are loaded
in float32, bfloat16 and float16 on the device, and diagnosed as `juice doctor` does it. Where vLLM
is installed, some are started inside it in every way (`benchmarks.gpu_vllm`). Then speed:
`benchmarks.peers` with the shapes of a Llama of 1B and, where the memory is enough, of 8B. Both go
into a file of `docs/results/gpu` with the name of the machine, which is written anew with each
result: what ends the command early loses what it was at, and nothing else.

It needs PyTorch, transformers and the few small packages that `make gpu` brings. What is not
there, such as vLLM, is listed as not measured.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import torch

import juice
from benchmarks import gpu_vllm, peers, rig
from benchmarks.peers import WAYS
from benchmarks.rig import ROWS, SHAPES, Setting
from benchmarks.ways import Worker, answer_questions
from juice.checks.doctor import diagnose
from juice.errors import JuiceError
from tests.support.architectures import ARCHITECTURES
from tests.support.tiny import tiny_tokenizer

RESULTS = Path("docs/results/gpu")
DTYPES = ("float32", "bfloat16", "float16")
# A tiny model takes seconds; the first one also has the device to start.
DIAGNOSIS_LIMIT_S = 240.0
# A way, and the one that it is compared with.
LEAST_AT_ONCE = 2


def exactness(
    device: str, dtypes: Iterable[str], names: Iterable[str], n_at_once: int = 1
) -> Iterator[dict[str, Any]]:
    """Yield whether each model is steered exactly in each dtype, and its largest differences.

    Whatever a device does is a result here: it may end the process of the model, not this one.
    With n_at_once processes they come in the order in which they are done.
    Raises RuntimeError where a process does not start.
    """
    pairs = [(name, dtype) for name in names for dtype in dtypes]
    shares = [share for i in range(n_at_once) if (share := pairs[i::n_at_once])]
    threads = {"OMP_NUM_THREADS": str(max(1, int(rig.cores()) // n_at_once))}
    done: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    stopped = Event()

    def check(share: Sequence[tuple[str, str]]) -> None:
        try:
            for found in diagnoses(device, share, threads if len(shares) > 1 else {}):
                done.put(found)
                if stopped.is_set():
                    break
        finally:
            done.put(None)

    with ThreadPoolExecutor(n_at_once) as pool:
        checks = [pool.submit(check, share) for share in shares]
        try:
            for _ in checks:
                yield from iter(done.get, None)
        finally:
            stopped.set()
    for each in checks:
        each.result()


def diagnoses(
    device: str, pairs: Iterable[tuple[str, str]], environment: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the diagnoses of models in dtypes, made by one process as long as that lives.

    Raises RuntimeError where that process does not start.
    """
    process = None
    try:
        for name, dtype in pairs:
            process = process or Worker(
                "benchmarks.gpu",
                *("--worker", "--device", device),
                environment={"HF_HUB_OFFLINE": "1", **environment},
                limit_s=DIAGNOSIS_LIMIT_S,
            )
            try:
                found = process.ask(f"{dtype} {name}")
            except RuntimeError as error:
                found = {"exact": False, "reason": str(error), "differences": {}}
                process.close()  # the device may not serve it any more
                process = None
            yield {"model": name, "dtype": dtype, **found}
    finally:
        if process is not None:
            process.close()


def diagnosed(device: str, dtype: str, name: str) -> dict[str, Any]:
    """Diagnose one model, or report why it was refused.

    Raises whatever else a device makes it raise.
    """
    try:
        if name == "mini":
            model = juice.load("mini", device=device, dtype=dtype)
        else:
            built = next(one for one in ARCHITECTURES if one.name == name).build()
            made = built.to(device, getattr(torch, dtype))
            model = juice.load(made, tokenizer=tiny_tokenizer())
        with warnings.catch_warnings(), model:
            warnings.simplefilter("ignore")  # of what a random model has not got
            diagnosis = diagnose(model.engine, model.head_sets)
    except JuiceError as error:
        if device != "cpu":
            torch.cuda.synchronize()  # raises where the device was the cause, and is lost
        return {"exact": False, "reason": str(error), "differences": {}}
    differences = {
        check.name: {"difference": check.difference, "bound": check.bound, "unit": check.unit}
        for check in diagnosis.checks
    }
    return {"exact": diagnosis.exact, "reason": diagnosis.reason, "differences": differences}


def too_small(shape: str, device: str, dtype: str) -> str:
    """Return why the device has no room for a shape; empty where it has."""
    if device == "cpu":
        return ""
    setting = Setting(SHAPES[shape], "", device, dtype)
    free, _ = peers.memory(device)
    if peers.n_that_fit(free, setting) >= LEAST_AT_ONCE:
        return ""
    return (
        f"two ways at once take {LEAST_AT_ONCE * peers.n_needed_bytes(setting) / 2**30:.1f} GiB; "
        f"{free / 2**30:.1f} GiB are free"
    )


def file_of(name: str) -> Path:
    """Return the file of the results of a machine."""
    return RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def main() -> None:
    """Check, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="of speed; else bfloat16, float32 on a CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=DTYPES, help="of exactness")
    parser.add_argument(
        "--architectures",
        nargs="*",
        choices=[one.name for one in ARCHITECTURES],
        default=[one.name for one in ARCHITECTURES],
        help="beside mini",
    )
    parser.add_argument(
        "--shapes", nargs="*", choices=SHAPES, help="else 1b and 8b; small on a CPU"
    )
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--only", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--at-once", type=int, help="how many ways; else those with room")
    parser.add_argument("--out", type=Path, help="else a file of docs/results/gpu")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        choices=range(1, 65),
        metavar="N",
        help="that check exactness at once",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = options.device
    if options.worker:
        answer_questions(lambda: lambda question: diagnosed(device, *question.split(" ", 1)))
        return
    if device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here; --device cpu tries the command without one")
    dtype = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    result: dict[str, Any] = {
        "machine": rig.machine(),
        "device": device,
        "exactness": [],
        "inside_vllm": [],
        "speed": [],
        "not_measured": {},
    }
    out = options.out or file_of(str(result["machine"]["gpu"] or result["machine"]["cpu"]))
    out.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        new = out.with_suffix(".new")
        new.write_text(json.dumps(result, indent=1) + "\n")
        new.replace(out)

    failed = []
    try:
        names = ("mini", *options.architectures)
        for one in exactness(device, options.dtypes, names, options.processes):
            how = "exact" if one["exact"] else one["reason"]
            print(f"{one['model']}, {one['dtype']}: {how}", flush=True)
            result["exactness"].append(one)
            write()
    except RuntimeError as error:
        result["not_measured"]["exactness"] = str(error)
        failed.append(f"exactness was not checked: {error}")
    if find_spec("vllm") is None:
        result["not_measured"]["inside vLLM"] = "vLLM is not installed"
    elif options.dtypes:
        for one in gpu_vllm.exactness(gpu_vllm.starts(), options.processes):
            print(f"inside vLLM, {one['start']}: {one['reason'] or 'exact'}", flush=True)
            result["inside_vllm"].append(one)
            write()
    shapes = ("small",) if device == "cpu" else ("1b", "8b")
    for shape in shapes if options.shapes is None else options.shapes:
        if why := too_small(shape, device, dtype):
            result["not_measured"][shape] = why
            print(f"\nThe shape {shape}: not measured ({why}).", flush=True)
            continue
        before = list(result["speed"])

        def keep(found: dict[str, Any], before: list[Any] = before) -> None:
            result["speed"] = [*before, found]
            write()

        try:
            found = peers.measure(
                shape,
                device=device,
                dtype=dtype,
                n_rounds=options.rounds,
                rows=options.rows,
                names=options.only,
                n_at_once=options.at_once,
                keep=keep,
            )
        except Exception as error:  # the other shapes may do
            traceback.print_exc()
            result["not_measured"][shape] = f"{type(error).__name__}: {error}"
            failed.append(f"{shape} failed: {error}")
            continue
        keep(found)
        print(f"\nA Llama of the shape {shape}, {dtype}:\n\n{peers.tables(found)}", flush=True)
    write()
    checked = [*result["exactness"], *result["inside_vllm"]]
    inexact = [one for one in checked if not one["exact"]]
    print(f"\n{len(checked) - len(inexact)} of {len(checked)} exact; {out}")
    failed += [
        f"{one.get('start') or one['model'] + ' in ' + one['dtype']} is not exact"
        for one in inexact
    ]
    if failed:
        sys.exit("; ".join(failed))


if __name__ == "__main__":
    main()
