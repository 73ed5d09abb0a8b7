"""What vLLM generates with companions is what the two runs of an independent oracle give.

Llama, Gemma 2, GPT-OSS and GPT-2 are in `test_mixed_load`.

The oracle is transformers' own model, uncached. Requests of all kinds share prefixes and run twice,
with prefix caching, four at a time, prefilled in chunks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm import LLM
from vllm.platforms import current_platform

from juice.engine.request import Request
from juice.engine.vllm.arguments import Coefficients, Layers
from juice.engine.vllm.processes import PROCESSOR, SCHEDULER
from tests.support import oracle, tiny
from tests.support.mixed import mixed_requests
from tests.support.on_vllm import ON_CPU, SMALL, let_vllm_compile, started, wide
from tests.support.running import assert_completes

ARCHITECTURES = (
    "Qwen2",
    # What these two have, other models here have as well.
    pytest.param("Qwen3", marks=pytest.mark.long),
    pytest.param("Mistral", marks=pytest.mark.long),
    "Gemma 3 (text)",
    "Phi-3",
    "OLMo 2",
    "Mixtral",
    "DeepSeek-V3",
)
Mixed = list[tuple[Request, dict[tuple[int, int], float], str]]


def with_shared_prefixes(seed: int, n: int) -> Mixed:
    """Return mixed requests of which every other one begins with the same 40 tokens."""
    prefix = tuple(1 + (7 * i) % 280 for i in range(40))
    return [
        (
            replace(request.with_options(watch=()), prompt_ids=prefix + request.prompt_ids)
            if i % 2
            else request.with_options(watch=()),
            heads,
            method,
        )
        for i, (request, heads, method) in enumerate(mixed_requests(seed, n))
    ]


def assert_served(name: str, folder: Path, mixed: Mixed, **options: object) -> None:
    """Assert that a new model's requests, each run twice, are what the oracle gives."""
    network = wide(name).build()
    network.set_attn_implementation("eager")  # others leave out Gemma 2's soft caps
    tiny.save(folder, network)
    with started(folder, **options) as engine:
        assert engine.details["compiled"] is not options.get("enforce_eager", True)
        assert engine.details["twin"] is (options.get("twin") is True)
        assert engine.status.max_kv_bytes <= (SMALL.kv_memory_bytes or 0)
        twice = [engine.generate([request for request, _, _ in mixed]) for _ in range(2)]
    for i, (request, heads, method) in enumerate(mixed):
        expected = oracle.generate(
            network, list(request.prompt_ids), heads, request.options.max_tokens, method=method
        )
        for completions in twice:
            assert_completes(completions[i], expected, 1e-4, is_watched=False)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_served_requests_equal_the_two_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")  # DeepSeek's latent attention is refused
    assert_served(name, tmp_path, with_shared_prefixes(seed=1, n=16))


@pytest.mark.long
@pytest.mark.parametrize("twin", [True, False], ids=["twin", "no twin"])
@pytest.mark.parametrize("mode", [2, 3], ids=["by PyTorch", "by vLLM"])
def test_compiled_requests_equal_the_two_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, twin: bool
) -> None:
    let_vllm_compile(monkeypatch)
    assert_served(
        "Llama",
        tmp_path,
        with_shared_prefixes(seed=2, n=16),
        enforce_eager=False,
        twin=twin,
        compilation_config={"mode": mode},
    )


@pytest.fixture
def _any_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM run several processes on one memory node of a CPU."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.mark.usefixtures("_any_core")
def test_sharded_requests_equal_the_two_runs(tmp_path: Path) -> None:
    assert_served("Llama", tmp_path, with_shared_prefixes(seed=3, n=16), tp=2)


@pytest.mark.skipif(current_platform.is_cpu(), reason="vLLM's own stages fail on CPUs")
def test_staged_requests_equal_the_two_runs(tmp_path: Path) -> None:
    mixed = [
        (request, heads, method)
        for request, heads, method in with_shared_prefixes(seed=4, n=40)
        if all(layer < 2 for layer, _ in heads)
    ]
    assert len({bool(heads) for _, heads, _ in mixed}) == 2
    assert_served("Llama", tmp_path, mixed, pp=2, window="0-1")


@pytest.mark.long
@pytest.mark.usefixtures("_any_core")
def test_the_definition_runs_through_the_stages_of_a_model(tmp_path: Path) -> None:
    """Stages start on CPUs, too, where vLLM's scheduler then fails: the check's reference runs."""
    network = wide("Llama").build()
    tiny.save(tmp_path, network)
    heads, tokens, read = {(0, 1): 2.0, (3, 2): -1.0}, [*range(1, 20)], [[1, 2, 3]] * 4
    llm = LLM(
        model=str(tmp_path),
        model_impl="transformers",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=32 << 20,
        pipeline_parallel_size=2,
        additional_config=Layers(range(2), range(4)).to_config(),
        scheduler_cls=SCHEDULER,
        logits_processors=[PROCESSOR],
        worker_extension_cls="juice.engine.vllm.worker.WorkerExtension",
        **ON_CPU,
    )
    for of_run in ({}, heads):
        given = Coefficients(tuple((*at, value) for at, value in of_run.items())).to_json()
        first, last = llm.collective_rpc(
            "juice_two_runs", args=(tokens, given if of_run else None, read)
        )
        assert first is None
        expected = oracle.steered_logits(network, tokens, of_run).log_softmax(-1)[-5:-1]
        chosen = expected.gather(1, torch.tensor(read))
        torch.testing.assert_close(torch.tensor(last), chosen, rtol=0, atol=1e-4)
