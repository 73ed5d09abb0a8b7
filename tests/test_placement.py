"""Weights on a CPU and on disk, and compiled models: the tokens of the plain model in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import juice
from juice.checks.at_load import checked_engine
from juice.engine.load_options import LoadOptions
from juice.loading import load_model, prepare
from tests.support import oracle, precise, tiny
from tests.support.mixed import TOLERANCE


def everything_on_disk(shape: str) -> dict[str, str]:
    base, layers = ("transformer", "h") if shape == "gpt2" else ("model", "layers")
    outside = ["wte", "wpe", "ln_f"] if shape == "gpt2" else ["embed_tokens", "norm", "rotary_emb"]
    return dict.fromkeys(
        [
            *(f"{base}.{n}" for n in outside),
            *(f"{base}.{layers}.{i}" for i in range(tiny.N_LAYERS)),
            "lm_head",
        ],
        "disk",
    )


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_weights_on_disk_steer_as_the_naive_two_runs(shape: str, tmp_path: Path) -> None:
    pytest.importorskip(
        "accelerate", reason="a device map needs accelerate, which is not installed"
    )
    folder = tiny.save(tmp_path / "model", tiny.tiny_model(shape))
    model = juice.load(
        folder, device_map=everything_on_disk(shape), offload_folder=tmp_path / "offload"
    )
    model.engine.stop()
    assert {parameter.device.type for parameter in model.loaded.model.parameters()} == {"meta"}
    assert model.loaded.device.type == "cpu"
    assert (
        model.loaded.identity.fingerprint
        == load_model(folder, LoadOptions(device="cpu")).identity.fingerprint
    )
    assert precise.worst_difference(model.loaded) < TOLERANCE


def test_a_model_that_the_user_placed_is_steered(tmp_path: Path) -> None:
    pytest.importorskip(
        "accelerate", reason="a device map needs accelerate, which is not installed"
    )
    folder = tiny.save(tmp_path / "model", tiny.tiny_model("llama"))
    places = {**everything_on_disk("llama"), "model.embed_tokens": "cpu", "model.layers.1": "cpu"}
    network = AutoModelForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=tmp_path / "offload"
    )
    assert precise.worst_difference(prepare(network, tiny.tiny_tokenizer())) < TOLERANCE


TRACED: list[torch.fx.GraphModule] = []


def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., object]:
    TRACED.append(graph)
    return graph.forward


def whole(network: PreTrainedModel) -> None:
    network.compile(backend=backend)


def layers(network: PreTrainedModel) -> None:
    for layer in network.model.layers:
        layer.compile(backend=backend)


def forwards(network: PreTrainedModel) -> None:
    network.forward = torch.compile(network.forward, backend=backend)


def uncompiled_naive(
    _network: PreTrainedModel, ids: list[int], heads: oracle.Heads, *, method: str
) -> torch.Tensor:
    return oracle.steered_logits(tiny.tiny_model("llama"), ids, heads, method=method)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("compiled", [whole, layers, forwards])
def test_a_compiled_model_steers_as_the_uncompiled_one(
    compiled: Callable[[PreTrainedModel], None], when: str
) -> None:
    """A graph that was traced before the hooks were added silently ignores them."""
    network = tiny.tiny_model("llama")
    if when == "before":
        compiled(network)
        with torch.no_grad():
            network(torch.tensor([[1, 2, 3]]))
    loaded = prepare(network, tiny.tiny_tokenizer())
    if when == "after":
        compiled(network)
    before = [dict(module.__dict__) for module in loaded.modules]
    TRACED.clear()
    model = juice.SteeredModel(checked_engine(loaded))
    model.engine.stop()
    assert precise.worst_difference(loaded, forward=uncompiled_naive) < TOLERANCE
    assert not TRACED, "something was compiled"
    names = ("_compiled_call_impl", "forward")
    after = [module.__dict__ for module in loaded.modules]
    assert all(a.get(n) is b.get(n) for a, b in zip(after, before, strict=True) for n in names), (
        "the user's compilation is lost"
    )


def test_a_compiled_wrapper_is_unwrapped() -> None:
    network = tiny.tiny_model("llama")
    model = juice.load(torch.compile(network, backend="eager"), tokenizer=tiny.tiny_tokenizer())
    model.engine.stop()
    assert model.loaded.model is network
    assert precise.worst_difference(model.loaded) < TOLERANCE
