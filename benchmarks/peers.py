"""Both engines beside what else there is: `python -m benchmarks.peers [--device cuda --shape 1b]`.

Every way has a process of its own, and they take turns; a number is the median of the rounds, after
one to warm up. Prompts have 192 to 320 tokens, 16 new tokens each, greedy. What steers, steers a
random head in each layer of a third of the depth. Ways that recompute everything for each token run
one request at a time, so n requests take n times as long.

A decode step's time is the total less that of the prompts alone, for each token after the first.
Memory is the peak while everything runs, beyond what the loaded model takes: of the process on a
CPU, of PyTorch's allocator on a GPU (for vLLM not measured, since it takes what it is given).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.shapes import SHAPES, Prompt, Shape, prompts
from benchmarks.workers import Worker, answer_questions
from juice.engine import GenerationRequest, Limits
from juice.engine.steering import unsteered

N_TOKENS, MAX_LEN = 16, 512
ROWS = (1, 4, 16, 64)
VLLM_PYTHON = Path(".venv-vllm/bin/python")

Generate = Callable[[list[Prompt], int], object]


@dataclass(frozen=True)
class Setting:
    """What is measured, and where."""

    shape: Shape
    folder: str
    device: str
    dtype: str

    def load(self) -> Any:
        """Return the model as transformers loads it."""
        from transformers import LlamaForCausalLM

        dtype = getattr(torch, self.dtype)
        return LlamaForCausalLM.from_pretrained(self.folder, dtype=dtype).to(self.device).eval()


def own(setting: Setting, *, steered: bool) -> Generate:
    """Our own engine."""
    return _juice(setting, steered, engine="own", device=setting.device)


def vllm(setting: Setting, *, steered: bool) -> Generate:
    """The dual run inside vLLM."""
    layers = setting.shape.steered_layers
    return _juice(
        setting,
        steered,
        engine="vllm",
        window=f"{layers[0]}-{layers[-1]}",
        vllm_args={"enable_prefix_caching": False},
    )


def _juice(setting: Setting, steered: bool, **options: Any) -> Generate:
    import juice

    limits = Limits(max_batch=ROWS[-1], max_model_len=MAX_LEN, kv_memory_bytes=2 << 30)
    model = juice.load(setting.folder, dtype=setting.dtype, limits=limits, **options)
    return lambda asked, n: model.engine.generate(
        [
            GenerationRequest(
                prompt_ids=prompt,
                max_tokens=n,
                ignore_eos=True,
                steering=setting.shape.steering(i) if steered else unsteered(),
            )
            for i, prompt in enumerate(asked)
        ]
    )


def plain_vllm(setting: Setting) -> Generate:
    """VLLM without us, with its own class of the model."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        setting.folder,
        skip_tokenizer_init=True,
        dtype=setting.dtype,
        max_model_len=MAX_LEN,
        max_num_seqs=ROWS[-1],
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=2 << 30,
        enable_prefix_caching=False,
    )

    def generate(asked: list[Prompt], n: int) -> object:
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        tokens = [{"prompt_token_ids": list(prompt)} for prompt in asked]
        return engine.generate(tokens, params, use_tqdm=False)

    return generate


def static_batch(setting: Setting) -> Generate:
    """Transformers' `generate` on a left-padded batch."""
    model = setting.load()

    def generate(asked: list[Prompt], n: int) -> object:
        width = max(map(len, asked))
        ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in asked]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in asked]
        with torch.inference_mode():
            return model.generate(
                input_ids=torch.tensor(ids, device=setting.device),
                attention_mask=torch.tensor(mask, device=setting.device),
                max_new_tokens=n,
                min_new_tokens=n,
                do_sample=False,
            )

    return generate


def paged(setting: Setting) -> Generate:
    """Transformers' continuous batching with paged attention, started once."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    model = setting.load()
    model.set_attn_implementation("sdpa")
    given = GenerationConfig(max_new_tokens=N_TOKENS, do_sample=False, eos_token_id=-1)
    memory = ContinuousBatchingConfig(
        num_blocks=ROWS[-1] * MAX_LEN // 256, max_batch_tokens=2048, allow_block_sharing=False
    )
    manager = model.init_continuous_batching(
        generation_config=given, continuous_batching_config=memory
    )
    manager.start()

    def generate(asked: list[Prompt], n: int) -> object:
        for prompt in asked:
            manager.add_request(list(prompt), max_new_tokens=n)
        left = len(asked)
        while left:
            found = manager.get_result(timeout=60)
            if found is None or found.error:
                raise RuntimeError(f"continuous batching failed: {found and found.error}")
            left -= found.is_finished()
        return None

    return generate


def naive(setting: Setting) -> Generate:
    """The two runs as they are defined, with hooks and without a cache."""
    from tests.support import oracle

    model = setting.load()
    return _one_by_one(
        setting, lambda ids, heads: oracle.steered_logits(model, ids, heads)[-1].argmax()
    )


def nnsight(setting: Setting) -> Generate:
    """Two traces of nnsight for each token, as the method was published."""
    from nnsight import NNsight

    model = NNsight(setting.load())
    d_head = setting.shape.width // setting.shape.n_heads

    def next_token(ids: list[int], heads: dict[tuple[int, int], float]) -> torch.Tensor:
        tokens = torch.tensor([ids], device=setting.device)
        with torch.inference_mode():
            with model.trace(tokens, use_cache=False):
                clean = {}.save()  # type: ignore[attr-defined]  # nnsight adds it
                for layer, _ in heads:
                    clean[layer] = model.model.layers[layer].self_attn.o_proj.input.clone()
            with model.trace(tokens, use_cache=False):
                for (layer, head), beta in heads.items():
                    columns = slice(head * d_head, (head + 1) * d_head)
                    z = model.model.layers[layer].self_attn.o_proj.input
                    z[:, :, columns] += beta * clean[layer][:, :, columns]
                logits = model.lm_head.output.save()
        return logits[0, -1].argmax()

    return _one_by_one(setting, next_token)


def lens(setting: Setting) -> Generate:
    """TransformerLens: one run that records, one with hooks."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    model = setting.load()
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config)

    def next_token(ids: list[int], heads: dict[tuple[int, int], float]) -> torch.Tensor:
        tokens = torch.tensor([ids], device=setting.device)
        names = {layer: f"blocks.{layer}.attn.hook_z" for layer, _ in heads}
        d_head = setting.shape.width // setting.shape.n_heads

        def add(layer: int, head: int, beta: float) -> Callable[..., torch.Tensor]:
            def change(z: torch.Tensor, **_hook: object) -> torch.Tensor:
                flat = z.view(*z.shape[:2], -1)
                columns = slice(head * d_head, (head + 1) * d_head)
                own = clean[names[layer]].view(*z.shape[:2], -1)
                flat[..., columns] += beta * own[..., columns]
                return z

            return change

        with torch.inference_mode():
            _, clean = bridge.run_with_cache(tokens, names_filter=list(names.values()))
            hooks = [
                (names[layer], add(layer, head, beta)) for (layer, head), beta in heads.items()
            ]
            return bridge.run_with_hooks(tokens, fwd_hooks=hooks)[0, -1].argmax()

    return _one_by_one(setting, next_token)


def _one_by_one(
    setting: Setting, next_token: Callable[[list[int], dict[tuple[int, int], float]], torch.Tensor]
) -> Generate:
    def generate(asked: list[Prompt], n: int) -> list[list[int]]:
        answers = []
        for i, prompt in enumerate(asked):
            ids, heads = list(prompt), setting.shape.heads(i)
            for _ in range(n):
                ids.append(int(next_token(ids, heads)))
            answers.append(ids[len(prompt) :])
        return answers

    return generate


@dataclass(frozen=True)
class Way:
    """A way to generate: how it is made, the packages that it needs, how many rows it takes."""

    make: Callable[[Setting], Generate]
    needs: tuple[str, ...] = ()
    rows: tuple[int, ...] = ROWS
    on_vllm: bool = False


WAYS = {
    "own engine, unsteered": Way(lambda s: own(s, steered=False)),
    "own engine, steered": Way(lambda s: own(s, steered=True)),
    "vLLM, plain": Way(plain_vllm, on_vllm=True),
    "vLLM through JuICE, unsteered": Way(lambda s: vllm(s, steered=False), on_vllm=True),
    "vLLM through JuICE, steered": Way(lambda s: vllm(s, steered=True), on_vllm=True),
    "generate, static batch": Way(static_batch),
    "transformers' continuous batching": Way(paged),
    "two runs, steered": Way(naive, rows=(1,)),
    "nnsight, steered": Way(nnsight, needs=("nnsight",), rows=(1,)),
    "TransformerLens, steered": Way(lens, needs=("transformer_lens",), rows=(1,)),
}


def work(name: str, setting: Setting) -> None:
    """In a worker: answer `n_rows n_tokens` with seconds, and `memory` with bytes."""

    def make() -> Callable[[str], float | None]:
        generate, on_gpu = WAYS[name].make(setting), setting.device != "cpu"
        if on_gpu:
            torch.cuda.synchronize()
        before = torch.cuda.max_memory_allocated() if on_gpu else _peak_bytes()

        def reply(question: str) -> float | None:
            if question == "memory":
                return (torch.cuda.max_memory_allocated() if on_gpu else _peak_bytes()) - before
            n_rows, n_tokens = map(int, question.split())
            generate(prompts(n_rows), n_tokens)
            if on_gpu:
                torch.cuda.synchronize()
            return None

        return reply

    answer_questions(make)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def worker(name: str, setting: Setting, shape: str) -> Worker:
    """Return a way in a process of its own."""
    plugins = {"VLLM_PLUGINS": "none"} if name == "vLLM, plain" else {}
    python = None
    if WAYS[name].on_vllm and find_spec("vllm") is None:
        python = str(VLLM_PYTHON)
    return Worker(
        "benchmarks.peers",
        *("--worker", name, "--shape", shape, "--model", setting.folder),
        *("--device", setting.device, "--dtype", setting.dtype),
        environment={"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", **plugins},
        python=python,
    )


def missing(way: Way) -> str:
    """Return why a way cannot be measured here; empty where it can."""
    if way.on_vllm and find_spec("vllm") is None and not VLLM_PYTHON.exists():
        return "vLLM is not installed"
    return ", ".join(f"{own} is not installed" for own in way.needs if find_spec(own) is None)


def measure(
    shape: str, *, device: str, dtype: str, n_rounds: int, rows: Iterable[int], names: Iterable[str]
) -> dict[str, Any]:
    """Return what each way takes, by rows: prompts and totals in seconds, and its memory."""
    from tests.support import tiny

    folder = tempfile.mkdtemp()
    setting = Setting(SHAPES[shape], folder, device, dtype)
    SHAPES[shape].network(device, getattr(torch, dtype)).save_pretrained(folder)
    tiny.tiny_tokenizer().save_pretrained(folder)
    absent = {name: missing(WAYS[name]) for name in names}
    workers, failed = {}, {name: why for name, why in absent.items() if why}
    for name in (name for name, why in absent.items() if not why):
        try:
            workers[name] = worker(name, setting, shape)
        except RuntimeError as error:
            failed[name] = f"it did not start: {error}"
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in workers}
    for n_rows in rows:
        for round_number in range(n_rounds + 1):
            for name, engine in workers.items():
                if n_rows not in WAYS[name].rows:
                    continue
                for n_tokens in (1, N_TOKENS):
                    took = engine.ask(f"{n_rows} {n_tokens}")
                    if round_number:
                        seconds[name].setdefault(f"{n_rows} {n_tokens}", []).append(took)
    found = {
        name: {
            "ready_s": round(engine.ready_s, 2),
            "memory_bytes": int(engine.ask("memory")),
            "seconds": {
                key: round(statistics.median(own), 4) for key, own in seconds[name].items()
            },
        }
        for name, engine in workers.items()
    }
    for engine in workers.values():
        engine.close()
    return {
        "shape": shape,
        "device": device,
        "dtype": dtype,
        "n_tokens": N_TOKENS,
        "window_share": len(SHAPES[shape].steered_layers) / SHAPES[shape].n_layers,
        "ways": found,
        "not_measured": failed,
        "machine": machine.describe(),
    }


def tables(found: dict[str, Any]) -> str:
    """Return the results as Markdown: ratios of rates to `generate`, prompts and tokens apart."""
    ways, base = found["ways"], "generate, static batch"
    rows = sorted({int(key.split()[0]) for own in ways.values() for key in own["seconds"]})
    lines = []
    for title, part in (("prompts", _prompts_s), ("tokens after the first", _tokens_s)):
        lines += [f"| rate against `generate`, {title} | " + " | ".join(map(str, rows)) + " |"]
        lines += ["|---|" + "---|" * len(rows)]
        for name, own in ways.items():
            cells = []
            for n in rows:
                # One request at a time: as fast as for one row, against n of them in a batch.
                mine, theirs = part(own["seconds"], n), part(ways[base]["seconds"], n)
                cells.append("" if mine is None or not theirs else f"{theirs / mine:.2f}")
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["| | ready after (s) | peak memory beyond the model (MiB) |", "|---|---|---|"]
    for name, own in ways.items():
        memory = "not measured" if name.startswith("vLLM") else f"{own['memory_bytes'] >> 20}"
        lines.append(f"| {name} | {own['ready_s']:.1f} | {memory} |")
    lines += [f"\n{name}: not measured ({why})." for name, why in found["not_measured"].items()]
    return "\n".join(lines)


def _prompts_s(seconds: dict[str, float], n: int) -> float | None:
    return seconds.get(f"{n} 1")


def _tokens_s(seconds: dict[str, float], n: int) -> float | None:
    total, of_prompts = seconds.get(f"{n} {N_TOKENS}"), seconds.get(f"{n} 1")
    return None if total is None or of_prompts is None else max(1e-9, total - of_prompts)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--only", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        setting = Setting(SHAPES[options.shape], options.model, options.device, options.dtype)
        work(options.worker, setting)
        return
    found = measure(
        options.shape,
        device=options.device,
        dtype=options.dtype,
        n_rounds=options.rounds,
        rows=options.rows,
        names=options.only,
    )
    print(tables(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
