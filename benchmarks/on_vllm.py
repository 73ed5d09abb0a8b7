"""The dual run inside vLLM: `.venv-vllm/bin/python -m benchmarks.on_vllm [--rounds N]`.

Plain vLLM without our plugin, with its own class of the model and with its transformers backend;
vLLM through us, unsteered and steered, compiled (its default) and not; and our own engine. The
model and its prompts are those of `benchmarks.shapes`; heads are steered in a third of the layers.
Each engine has a process of its own, and the ways take turns in one run; a number is the median of
the rounds, after one to warm up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import machine
from benchmarks.serving import show
from benchmarks.shapes import SMALL, prompts
from benchmarks.workers import VLLM_RESTS_WITHIN_S, Worker, answer_questions
from juice.engine import GenerationRequest, Limits
from juice.engine.steering import unsteered

N_REQUESTS, N_MANY, N_TOKENS = 16, 64, 24
LIMITS = Limits(max_batch=64, max_model_len=512, kv_memory_bytes=1 << 30)
WINDOW = f"{SMALL.steered_layers[0]}-{SMALL.steered_layers[-1]}"
# By process: what it is asked to run, each timed.
WAYS = {
    "native": ("unsteered", "prompts"),
    "transformers": ("unsteered", "prompts"),
    "vllm": ("unsteered", "prompts", "steered", "steered prompts", "1", "16", "64"),
    "vllm eager": ("unsteered", "prompts", "steered", "steered prompts"),
    "transformers eager": ("unsteered", "prompts"),
    "own": ("unsteered", "prompts", "steered", "steered prompts"),
}


def requests(way: str) -> list[GenerationRequest]:
    """Return the requests of a way; a number is that of the distinct configurations of many."""
    n_tokens = 1 if way.endswith("prompts") else N_TOKENS
    if way.isdigit():
        own, chosen = prompts(N_MANY), [SMALL.steering(i % int(way)) for i in range(N_MANY)]
    else:
        own = prompts(N_REQUESTS)
        chosen = [
            SMALL.steering(i) if way.startswith("steered") else unsteered()
            for i in range(N_REQUESTS)
        ]
    return [
        GenerationRequest(prompt_ids=p, max_tokens=n_tokens, ignore_eos=True, steering=s)
        for p, s in zip(own, chosen, strict=True)
    ]


def plain(folder: str, model_impl: str, *, eager: bool) -> Callable[[str], None]:
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
        enable_prefix_caching=False,
        enforce_eager=eager,
    )

    def run(way: str) -> None:
        asked = requests(way)
        params = SamplingParams(
            temperature=0, max_tokens=asked[0].max_tokens, ignore_eos=True, detokenize=False,
            logprobs=0,
        )  # fmt: skip
        tokens = [{"prompt_token_ids": list(one.prompt_ids)} for one in asked]
        engine.generate(tokens, params, use_tqdm=False)

    return run


def ours(folder: str, engine: str, *, eager: bool) -> Callable[[str], None]:
    """Return what runs requests through JuICE."""
    import juice

    given = {
        "engine": "vllm",
        "window": WINDOW,
        "vllm_args": {"enable_prefix_caching": False, "enforce_eager": eager},
    }
    model = juice.load(
        folder, dtype="float32", limits=LIMITS, **(given if engine == "vllm" else {})
    )

    def run(way: str) -> None:
        model.engine.generate(requests(way))

    return run


def work(name: str, folder: str) -> None:
    """Run the ways that come on standard input, and answer with their seconds."""
    impl = {"native": "auto", "transformers": "transformers"}
    engine, _, eager = name.partition(" ")
    make = partial(plain, folder, impl[engine]) if engine in impl else partial(ours, folder, engine)
    answer_questions(lambda: make(eager=bool(eager)))


def worker(name: str, folder: str) -> Worker:
    """Return an engine in a process of its own."""
    # An environment variable of vLLM's: the plugins to load, here none.
    others = {} if name.startswith(("vllm", "own")) else {"VLLM_PLUGINS": "none"}
    return Worker(
        "benchmarks.on_vllm",
        *("--worker", name, "--model", folder),
        environment={"VLLM_LOGGING_LEVEL": "ERROR", **others},
        rest_s=0.0 if name == "own" else VLLM_RESTS_WITHIN_S,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=WAYS, help="measure these engines alone")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.model)
        return
    folder = tempfile.mkdtemp()
    SMALL.network().save_pretrained(folder)
    from tests.support import tiny

    tiny.tiny_tokenizer().save_pretrained(Path(folder))
    workers = {name: worker(name, folder) for name in WAYS if name in (options.only or WAYS)}
    seconds: dict[str, list[float]] = {}
    for round_number in range(options.rounds + 1):
        for name, engine in workers.items():
            for way in WAYS[name]:
                took = engine.ask(way)
                if round_number:
                    seconds.setdefault(f"{name}, {way}", []).append(took)
            engine.rest()
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    show("seconds (median)", medians)
    print(json.dumps({"seconds": medians, "machine": machine.describe()}))


if __name__ == "__main__":
    main()
