"""The ways to generate that `benchmarks.peers` compares.

Each loads a model, and returns a function of prompts and of how many tokens each gets, which
returns when they came. What steers, steers a random head in each layer of a third of the depth.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.setting import MAX_LEN, N_TOKENS, ROWS, Setting
from benchmarks.shapes import Prompt
from benchmarks.steps import Arrivals
from juice.engine import GenerationRequest, Limits
from juice.engine.steering import unsteered

Generate = Callable[[list[Prompt], int], Arrivals]


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
        vllm_args=setting.of_vllm,
    )


def _juice(setting: Setting, steered: bool, **options: Any) -> Generate:
    import juice

    limits = Limits(max_batch=ROWS[-1], max_model_len=MAX_LEN, kv_memory_bytes=setting.n_kv_bytes)
    model = juice.load(setting.folder, dtype=setting.dtype, limits=limits, **options)

    def generate(asked: list[Prompt], n: int) -> Arrivals:
        requests = [
            GenerationRequest(
                prompt_ids=prompt,
                max_tokens=n,
                ignore_eos=True,
                steering=setting.shape.steering(i) if steered else unsteered(),
            )
            for i, prompt in enumerate(asked)
        ]
        return [own.timing.tokens_s for own in model.engine.generate(requests)]

    return generate


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
        kv_cache_memory_bytes=setting.n_kv_bytes,
        **setting.of_vllm,
    )

    def generate(asked: list[Prompt], n: int) -> Arrivals:
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        for i, prompt in enumerate(asked):
            engine.llm_engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, params)
        arrivals: list[list[float]] = [[] for _ in asked]
        while engine.llm_engine.has_unfinished_requests():
            for output in engine.llm_engine.step():
                arrivals[int(output.request_id)].append(time.perf_counter())
        return arrivals

    return generate


def static_batch(setting: Setting) -> Generate:
    """Transformers' `generate` on a left-padded batch."""
    from transformers.generation import BaseStreamer

    model = setting.load()

    class Clock(BaseStreamer):
        """When each token of the batch came; it gets the prompts first."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: object) -> None:  # noqa: ARG002
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def generate(asked: list[Prompt], n: int) -> Arrivals:
        clock = Clock()
        width = max(map(len, asked))
        ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in asked]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in asked]
        with torch.inference_mode():
            model.generate(
                input_ids=torch.tensor(ids, device=setting.device),
                attention_mask=torch.tensor(mask, device=setting.device),
                max_new_tokens=n,
                min_new_tokens=n,
                do_sample=False,
                streamer=clock,
            )
        return [clock.times[1:]] * len(asked)

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

    def generate(asked: list[Prompt], n: int) -> Arrivals:
        arrivals: dict[str, list[float]] = {
            manager.add_request(list(prompt), max_new_tokens=n, streaming=True): []
            for prompt in asked
        }
        left = len(asked)
        while left:
            found = manager.get_result(timeout=60)
            if found is None or found.error:
                raise RuntimeError(f"continuous batching failed: {found and found.error}")
            arrivals[found.request_id].append(time.perf_counter())
            left -= found.is_finished()
        return list(arrivals.values())

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
    def generate(asked: list[Prompt], n: int) -> Arrivals:
        arrivals = []
        for i, prompt in enumerate(asked):
            ids, heads, times = list(prompt), setting.shape.heads(i), []
            for _ in range(n):
                ids.append(int(next_token(ids, heads)))
                times.append(time.perf_counter())
            arrivals.append(times)
        return arrivals

    return generate


@dataclass(frozen=True)
class Way:
    """A way to generate: how it is made, the packages that it needs, how many rows it is given."""

    make: Callable[[Setting], Generate]
    needs: tuple[str, ...] = ()
    rows: tuple[int, ...] = ROWS
    rows_on_cpu: tuple[int, ...] = ROWS
    on_vllm: bool = False

    def takes(self, n_rows: int, device: str) -> bool:
        """Return whether it is measured with this many rows."""
        return n_rows in self.rows and (device != "cpu" or n_rows in self.rows_on_cpu)


WAYS = {
    "own engine, unsteered": Way(lambda s: own(s, steered=False)),
    "own engine, steered": Way(lambda s: own(s, steered=True)),
    "vLLM, plain": Way(plain_vllm, on_vllm=True),
    "vLLM through JuICE, unsteered": Way(lambda s: vllm(s, steered=False), on_vllm=True),
    "vLLM through JuICE, steered": Way(lambda s: vllm(s, steered=True), on_vllm=True),
    "generate, static batch": Way(static_batch),
    # On a CPU a step of 64 rows takes seconds.
    "transformers' continuous batching": Way(paged, rows_on_cpu=ROWS[:3]),
    "two runs, steered": Way(naive, rows=(1,)),
    "nnsight, steered": Way(nnsight, needs=("nnsight",), rows=(1,)),
    "TransformerLens, steered": Way(lens, needs=("transformer_lens",), rows=(1,)),
}
