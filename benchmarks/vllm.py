"""The dual run inside vLLM: `.venv-vllm/bin/python -m benchmarks.vllm [--rounds N] [--by-vllm]`.

First the engines: plain vLLM without our plugin, with its own class of the model and with its
transformers backend; vLLM through us, unsteered and steered, in two runs and in one, compiled (its
default) and not, with a window of a third of the layers, of all of them as sets have that are
learned for two runs, and, for one run, without; and our own engine. With `--by-vllm` what is
compiled is compiled by vLLM's own compiler, as on GPUs, and not by PyTorch's. The model and its
prompts are those of `benchmarks.rig`; heads are steered in a third of the layers. Then JuICE's
server against `vllm serve` with the same model and head set: 16 steered streams at once of
`/v1/completions`. All take turns; seconds are the median of the rounds, after one to warm up. Rates
are paired: each round's against that round's of plain vLLM's transformers backend, their median and
what 95 of 100 draws of rounds give.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx

import juice
from benchmarks import rig
from benchmarks.rig import SMALL, prompts, show
from benchmarks.ways import VLLM_RESTS_WITHIN_S, Worker, answer_questions
from juice.engine.load_options import Limits
from juice.engine.request import Request
from juice.engine.steer import Steering, unsteered
from tests.support import tiny
from tests.support.serving import free_port

N_REQUESTS, N_MANY, N_TOKENS = 16, 64, 24
N_STREAMS, MAX_BATCH, READY_S = 16, 16, 300
PROCESSORS = ("--logits-processors", "juice_server.vllm:RowWriter")
SCHEDULER = ("--scheduler-cls", "juice_server.vllm.scheduler")
MIDDLEWARE = ("--middleware", "juice_server.vllm.Steering")
LIMITS = Limits(max_batch=64, max_model_len=512, kv_memory_bytes=1 << 30, max_prefill_tokens=2048)
# Lets vLLM compile by itself on a CPU; a plugin of vLLM, by this name.
COMPILED = Path(__file__).parents[1] / "tests" / "support" / "compiled" / "compiled_on_cpu"
WINDOW = f"{SMALL.steered_layers[0]}-{SMALL.steered_layers[-1]}"
# By process: what it is asked to run, each timed.
MIXED = ("unsteered", "prompts", "one run", "half steered", "steered", "steered prompts")
WAYS = {
    "native": ("unsteered", "prompts"),
    "transformers": ("unsteered", "prompts"),
    "vllm": (*MIXED, "1", "16", "64"),
    "vllm no window": ("unsteered", "prompts", "one run"),
    "vllm all layers": ("unsteered", "half steered", "steered", "steered prompts"),
    "vllm eager": MIXED,
    "transformers eager": ("unsteered", "prompts"),
    "own": ("unsteered", "prompts", "steered", "steered prompts"),
}
BASES = {
    "vllm": "transformers",
    "vllm no window": "transformers",
    "vllm all layers": "transformers",
    "vllm eager": "transformers eager",
}


def requests(way: str) -> list[Request]:
    """Return the requests of a way; a number is that of the distinct configurations of many."""
    n_tokens = 1 if way.endswith("prompts") else N_TOKENS
    if way.isdigit():
        asked, chosen = prompts(N_MANY), [SMALL.steering(i % int(way)) for i in range(N_MANY)]
    else:
        asked = prompts(N_REQUESTS)
        chosen = [steering(way, i) for i in range(N_REQUESTS)]
    return [
        Request.of(prompt_ids=p, max_tokens=n_tokens, ignore_eos=True, steering=s)
        for p, s in zip(asked, chosen, strict=True)
    ]


def steering(way: str, i: int) -> Steering:
    """Return the steering of a way's request."""
    if way in ("unsteered", "prompts") or (way == "half steered" and i % 2):
        return unsteered()
    return SMALL.steering(i, "june" if way == "one run" else "juice")


def plain(folder: str, model_impl: str, arguments: dict[str, Any]) -> Callable[[str], None]:
    """Return what runs requests on plain vLLM."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        model_impl=model_impl,
        dtype="float32",
        max_model_len=LIMITS.max_model_len,
        max_num_seqs=LIMITS.max_batch,
        max_num_batched_tokens=LIMITS.max_prefill_tokens,
        kv_cache_memory_bytes=LIMITS.kv_memory_bytes,
        **arguments,
    )

    def run(way: str) -> None:
        asked = requests(way)
        params = SamplingParams(
            temperature=0,
            max_tokens=asked[0].options.max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
        )
        tokens = [{"prompt_token_ids": list(one.prompt_ids)} for one in asked]
        engine.generate(tokens, params, use_tqdm=False)

    return run


def ours(
    folder: str, engine: str, arguments: dict[str, Any], *, window: str
) -> Callable[[str], None]:
    """Return what runs requests through JuICE."""
    given = {
        "engine": "vllm",
        "window": window,
        "head_sets": Path(folder).with_name("head_sets"),
        "vllm_args": arguments,
    }
    model = juice.load(
        folder, dtype="float32", limits=LIMITS, **(given if engine == "vllm" else {})
    )

    def run(way: str) -> None:
        model.engine.generate(requests(way))

    return run


def work(name: str, folder: str, *, by_vllm: bool) -> None:
    """Run the ways that come on standard input, and answer with their seconds."""
    impl = {"native": "auto", "transformers": "transformers"}
    engine, _, how = name.partition(" ")
    window = {"no window": "none", "all layers": "all"}.get(how, WINDOW)
    make = (
        partial(plain, folder, impl[engine])
        if engine in impl
        else partial(ours, folder, engine, window=window)
    )
    arguments = {"enable_prefix_caching": False, "enforce_eager": how == "eager"}
    if by_vllm and how != "eager":
        arguments["compilation_config"] = {"mode": 3}
    answer_questions(lambda: make(arguments))


def worker(name: str, folder: str, *, by_vllm: bool) -> Worker:
    """Return an engine in a process of its own."""
    environment = {"VLLM_LOGGING_LEVEL": "ERROR"}
    if not name.startswith(("vllm", "own")):
        # An environment variable of vLLM's: the plugins to load, here none of ours.
        environment["VLLM_PLUGINS"] = COMPILED.name
    if by_vllm:
        folders = (str(COMPILED.parent), os.environ.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    return Worker(
        "benchmarks.vllm",
        *("--worker", name, "--model", folder, *(["--by-vllm"] if by_vllm else [])),
        environment=environment,
        rest_s=0.0 if name == "own" else VLLM_RESTS_WITHIN_S,
    )


def engines(
    folder: Path, names: list[str], n_rounds: int, *, by_vllm: bool
) -> dict[str, list[float]]:
    """Return the seconds of each way of the engines, round by round."""
    workers = {name: worker(name, str(folder), by_vllm=by_vllm) for name in names}
    seconds: dict[str, list[float]] = {}
    for round_number in range(n_rounds + 1):
        for name, engine in workers.items():
            for way in WAYS[name]:
                took = engine.ask(way)
                if round_number:
                    seconds.setdefault(f"{name}, {way}", []).append(took)
            engine.rest()
    for engine in workers.values():
        engine.close()
    return seconds


def paired(seconds: dict[str, list[float]]) -> dict[str, tuple[float, float, float]]:
    """Return each way's rate against its base's, and the bounds of its interval."""
    rates, draw = dict[str, tuple[float, float, float]](), Random(0)
    for way, times in seconds.items():
        name, _, asked = way.partition(", ")
        base = f"{BASES.get(name)}, {'prompts' if asked.endswith('prompts') else 'unsteered'}"
        if base not in seconds or asked.isdigit():
            continue
        each = [one / other for one, other in zip(seconds[base], times, strict=True)]
        medians = sorted(statistics.median(draw.choices(each, k=len(each))) for _ in range(1000))
        rates[way] = (statistics.median(each), medians[25], medians[-26])
    return rates


def prepare(root: Path) -> None:
    """Save the model, and a head set with a head in each steered layer."""
    SMALL.network().save_pretrained(root / "model")
    tiny.tiny_tokenizer().save_pretrained(root / "model")
    with juice.load(root / "model") as model:
        heads = [(layer, 1) for layer in SMALL.steered_layers]
        made = model.make_head_set(name="context", target="context", plus=heads, beta_plus=1)
        made.save(root / "head_sets" / "model" / "context")


@contextmanager
def serving(command: list[str], root: Path, port: int, ready: str) -> Iterator[None]:
    """Run a server for the block, once it is ready."""
    environment = {**os.environ, "JUICE_HEAD_SETS": str(root / "head_sets")}
    log = root / f"{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(  # noqa: S603 -- our own command
            [*command, "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        deadline = time.monotonic() + READY_S
        while not is_ready(f"http://127.0.0.1:{port}/{ready}"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not become ready: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(60)


def is_ready(url: str) -> bool:
    """Return whether a probe is answered with 200."""
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


async def stream_all(client: httpx.AsyncClient, url: str, model: str) -> float:
    """Return the seconds that all streams take together."""

    async def stream(ids: tuple[int, ...]) -> None:
        body = {
            "model": model,
            "prompt": list(ids),
            "max_tokens": N_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "steer": "context",
        }
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
        if lines[-1] != "data: [DONE]":
            raise RuntimeError(f"the stream ended with {lines[-1]}")

    begun = time.perf_counter()
    await asyncio.gather(*(stream(ids) for ids in prompts(N_STREAMS)))
    return time.perf_counter() - begun


async def measure(ports: dict[str, int], n_rounds: int) -> dict[str, float]:
    """Return the median seconds by server."""
    seconds: dict[str, list[float]] = {name: [] for name in ports}
    async with httpx.AsyncClient(timeout=600) as client:
        for round_number in range(n_rounds + 1):
            for name, port in ports.items():
                url = f"http://127.0.0.1:{port}"
                models = (await client.get(f"{url}/v1/models")).json()["data"]
                took = await stream_all(client, url, models[0]["id"])
                await asyncio.sleep(VLLM_RESTS_WITHIN_S)
                if round_number:
                    seconds[name].append(took)
    return {name: statistics.median(times) for name, times in seconds.items()}


def servers(root: Path, n_rounds: int) -> dict[str, float]:
    """Return the median seconds of the streams, by server."""
    ports = {"vllm serve": free_port(), "juice serve": free_port()}
    sizes = {"max-model-len": LIMITS.max_model_len, "dtype": "float32"}
    common = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    plain = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(root / "model"), "--model-impl", "transformers", *common),
        *("--no-enable-prefix-caching", "--max-num-seqs", str(MAX_BATCH)),
        *("--kv-cache-memory-bytes", str(LIMITS.kv_memory_bytes)),
        *(*PROCESSORS, *SCHEDULER, *MIDDLEWARE),
    ]
    ours = [
        *(str(Path(sys.executable).with_name("juice")), "serve", "--engine", "vllm"),
        *("--model", str(root / "model"), *common, "--max-batch", str(MAX_BATCH)),
        *("--kv-memory", str(LIMITS.kv_memory_bytes), "--vllm-arg", "enable_prefix_caching=false"),
    ]
    with (
        serving(plain, root, ports["vllm serve"], "health"),
        serving(ours, root, ports["juice serve"], "readyz"),
    ):
        return asyncio.run(measure(ports, n_rounds))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=[*WAYS, "servers"], help="measure these alone")
    parser.add_argument("--by-vllm", action="store_true", help="compile by vLLM's own compiler")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.model, by_vllm=options.by_vllm)
        return
    chosen = options.only or [*WAYS, "servers"]
    root = Path(tempfile.mkdtemp())
    prepare(root)
    names = [name for name in WAYS if name in chosen]
    seconds = engines(root / "model", names, options.rounds, by_vllm=options.by_vllm)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    rates = paired(seconds)
    if "servers" in chosen:
        medians |= servers(root, options.rounds)
    show("seconds (median)", medians)
    for way, (middle, low, high) in rates.items():
        print(f"{way}: {middle:.2f} [{low:.2f}, {high:.2f}] of the rate of plain vLLM")
    print(json.dumps({"seconds": medians, "rates": rates, "machine": rig.machine()}))


if __name__ == "__main__":
    main()
