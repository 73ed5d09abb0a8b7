"""The layout, the hooks and the fingerprint of a model, and loading it from a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import juice
from juice.engine import GenerationRequest
from juice.errors import ModelNotFoundError, UnsupportedModelError, UsageError
from juice.loading.pretrained import load_model, prepare
from juice.model.layout import resolve
from juice.model.steering import SteeringPlan, add_scaled
from juice.options import LoadOptions
from tests.support import oracle, tiny
from tests.support.architectures import build


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_the_resolver_finds_the_projections_and_their_heads(shape: str) -> None:
    network = tiny.tiny_model(shape)
    layout = resolve(network)
    assert [layer.projection for layer in layout.layers] == oracle.projections(network)
    assert {(layer.n_heads, layer.d_head) for layer in layout.layers} == {
        (tiny.N_HEADS, 12 if shape == "gemma2" else 8)
    }


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_the_partition_of_z_into_heads_is_the_attention_functions_own(shape: str) -> None:
    """A sum over heads proves nothing; the attention function's [rows, pos, head, d_head] does."""
    network = tiny.tiny_model(shape)
    layout = resolve(network)
    seen = []
    function = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def spy(*args, **kwargs):
        kwargs.pop("softcap", None)
        output = function(*args, **kwargs)
        seen.append(output[0])
        return output

    ALL_ATTENTION_FUNCTIONS.register("spy", spy)
    network.config._attn_implementation = "spy"
    z = []
    for layer in layout.layers:
        layer.projection.register_forward_pre_hook(lambda _m, args: z.append(args[0]))
    network(torch.arange(1, 12)[None], attention_mask=torch.zeros(1, 1, 11, 11))
    for layer, own, ours in zip(layout.layers, seen, z, strict=True):
        assert own.shape == (1, 11, layer.n_heads, layer.d_head)
        assert torch.equal(ours.view(own.shape), own)


def test_hooks_without_a_plan_leave_the_model_bit_identical() -> None:
    network = tiny.tiny_model("llama")
    ids = torch.arange(1, 20)[None]
    before = network(ids).logits
    prepare(network, tiny.tiny_tokenizer())
    assert torch.equal(network(ids).logits, before)


def test_each_row_gets_its_own_source_and_coefficients() -> None:
    z = torch.randn(3, 5, 8)
    coefficient = torch.tensor([[2.0, 0.0], [0.0, -1.0], [0.0, 0.0]])
    result = add_scaled(z, torch.tensor([1, 1, 0]), coefficient, n_heads=2)
    expected = z.clone()
    expected[0, :, :4] += 2 * z[1, :, :4]
    expected[1, :, 4:] -= z[1, :, 4:]
    torch.testing.assert_close(result, expected)


def test_a_projection_that_bypasses_its_hook_is_an_error_not_silence() -> None:
    network = tiny.tiny_model("gpt2")
    loaded = prepare(network, tiny.tiny_tokenizer())
    attention = network.transformer.h[1].attn

    class Bypass(torch.nn.Module):
        def forward(self, z):
            return skipped.forward(z)

    skipped, attention.c_proj = attention.c_proj, Bypass()
    plan = SteeringPlan({1: torch.tensor([0])}, {1: torch.ones(1, tiny.N_HEADS)})
    with (
        pytest.raises(RuntimeError, match="did not reach layers"),
        loaded.steering_hooks.apply(plan),
    ):
        network(torch.tensor([[1, 2, 3]]))
    with loaded.steering_hooks.apply(
        SteeringPlan({2: torch.tensor([0])}, {2: torch.ones(1, tiny.N_HEADS)})
    ):
        network(torch.tensor([[1, 2, 3]]))


def test_a_model_object_is_hooked_once() -> None:
    network = tiny.tiny_model("gpt2")
    juice.load(network, tokenizer=tiny.tiny_tokenizer())
    with pytest.raises(UnsupportedModelError, match="already"):
        juice.load(network, tokenizer=tiny.tiny_tokenizer())


def saved(
    folder: Path, shape: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **options
) -> Path:
    return tiny.save(folder, tiny.tiny_model(shape, seed).to(dtype), **options)


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_a_folder_loads_and_generates_as_the_model_that_was_saved(
    tmp_path: Path, shape: str
) -> None:
    network = tiny.tiny_model(shape)
    model = juice.load(saved(tmp_path, shape), device="cpu")
    completion = model.generate("abc", max_tokens=5, ignore_eos=True)[0]
    assert (
        list(completion.token_ids)
        == oracle.generate(network, list(model.tokenize("abc")), {}, 5)[0]
    )
    assert model.loaded.model.dtype == torch.float32
    assert model.loaded.identity.fingerprint


@pytest.mark.parametrize(
    "name", ["GPT-2", "GPT-NeoX", "Gemma 3 (multimodal)", "Mixtral", "DeepSeek-V3"]
)
def test_the_fingerprint_is_that_of_the_modules_whatever_a_checkpoint_calls_its_tensors(
    name: str, tmp_path: Path
) -> None:
    network = build(name)
    tiny.save(tmp_path, network)
    if name == "GPT-2":  # as in the original repository
        weights = load_file(tmp_path / "model.safetensors")
        save_file(
            {k.removeprefix("transformer."): v for k, v in weights.items()},
            tmp_path / "model.safetensors",
            {"format": "pt"},
        )
    stored = load_model(tmp_path).identity.fingerprint
    assert stored == prepare(network, tiny.tiny_tokenizer()).identity.fingerprint is not None


def test_the_fingerprint_depends_on_the_weights_not_on_place_dtype_or_files(tmp_path: Path) -> None:
    first = load_model(saved(tmp_path / "a", dtype=torch.float16)).identity
    same = load_model(
        saved(tmp_path / "b", dtype=torch.float16, max_shard_size="20kB"),
        LoadOptions(dtype="bfloat16"),
    ).identity
    other = load_model(saved(tmp_path / "c", seed=1, dtype=torch.float16)).identity
    in_memory = prepare(tiny.tiny_model("llama").half().float(), tiny.tiny_tokenizer()).identity
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    assert first.fingerprint == same.fingerprint == in_memory.fingerprint
    assert first.fingerprint != other.fingerprint
    assert (
        prepare(tiny.tiny_model("llama").half(), tiny.tiny_tokenizer()).identity.fingerprint is None
    )


@pytest.mark.parametrize(
    "name", ["h.3.attn.c_proj", "h.0.attn.c_attn", "h.2.mlp.c_fc", "h.1.mlp.c_proj", "wte"]
)
def test_one_changed_weight_changes_the_fingerprint(name: str) -> None:
    before = prepare(tiny.tiny_model("gpt2"), tiny.tiny_tokenizer()).identity.fingerprint
    changed = tiny.tiny_model("gpt2")
    with torch.no_grad():
        changed.transformer.get_submodule(name).weight[0, 0] += 1e-3
    assert prepare(changed, tiny.tiny_tokenizer()).identity.fingerprint != before


def test_a_checkpoint_without_the_base_prefix_has_the_same_fingerprint(tmp_path: Path) -> None:
    """The gpt2 on the hub stores `h.0...`, a saved one `transformer.h.0...`."""
    with_prefix = load_model(saved(tmp_path / "a", "gpt2")).identity.fingerprint
    tiny.tiny_model("gpt2").transformer.save_pretrained(tmp_path / "b")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    tiny.tiny_tokenizer().save_pretrained(tmp_path / "b")
    assert load_model(tmp_path / "b").identity.fingerprint == with_prefix


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    saved(tmp_path)
    torch.save(tiny.tiny_model("llama").state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        load_model(tmp_path)


def test_what_cannot_be_loaded_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="cannot load the model"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        load_model(tmp_path)
    saved(tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelNotFoundError, match="cannot be loaded"):
        load_model(tmp_path / "cut")
    with pytest.raises(UsageError, match="dtype"):
        load_model("mini", LoadOptions(dtype="float12"))
    with pytest.raises(UsageError, match="device"):
        load_model("mini", LoadOptions(device="quantum"))


def test_weights_that_are_missing_are_an_error_not_random_numbers(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["transformer.h.2.mlp.c_fc.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotFoundError, match=r"lack 1 tensors .*h\.2\.mlp\.c_fc"):
        load_model(tmp_path)


@pytest.mark.parametrize("config", ["[]", '{"model_type": "gpt2", "n_embd": "abc"}'])
def test_a_nonsensical_configuration_is_one_clear_error(tmp_path: Path, config: str) -> None:
    saved(tmp_path, "gpt2")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelNotFoundError, match="cannot be loaded"):
        load_model(tmp_path)


def test_a_sliding_window_that_the_models_code_ignores_is_not_applied() -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    network = LlamaForCausalLM(
        LlamaConfig(vocab_size=tiny.VOCAB_SIZE, sliding_window=4, **sizes)
    ).eval()
    ids = list(range(1, 30))
    expected = oracle.generate(network, ids, {}, 5)[0]
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    request = GenerationRequest(prompt_ids=tuple(ids), max_tokens=5, ignore_eos=True)
    assert list(model.engine.generate([request])[0].token_ids) == expected


class Mixing(torch.nn.Module):
    """A layer's MLP that lets the rows of a batch see each other."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x.mean(0, keepdim=True)


class Bypassing(torch.nn.Linear):
    """A projection whose hooks never run."""

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return self.forward(z)


def test_a_model_that_disagrees_with_the_engine_is_refused_at_load() -> None:
    mixing = tiny.tiny_model("llama")
    mixing.model.layers[1].mlp = Mixing(mixing.model.layers[1].mlp)
    with pytest.raises(UnsupportedModelError, match="not steered exactly"):
        juice.load(mixing, tokenizer=tiny.tiny_tokenizer())
    bypassing = tiny.tiny_model("llama")
    bypassing.model.layers[0].self_attn.o_proj = Bypassing(32, 32, bias=False)
    with pytest.raises(UnsupportedModelError, match="bypassed"):
        juice.load(bypassing, tokenizer=tiny.tiny_tokenizer())


def test_an_overflow_ends_its_generation_and_leaves_the_next_one_unchanged() -> None:
    """What is not finite in a slot would reach the next request there.

    Masked keys are multiplied by zero, which does not hide it.
    """
    network = tiny.tiny_model("llama")
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    before = model.generate(["abc", "x" * 30], max_tokens=6, ignore_eos=True)
    weight = network.model.layers[0].mlp.down_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.inf)
    with pytest.raises(juice.JuiceError, match="not finite"):
        model.generate(["y" * 40] * 3, max_tokens=3)
    with torch.no_grad():
        weight.copy_(kept)
    after = model.generate(["abc", "x" * 30], max_tokens=6, ignore_eos=True)
    assert [c.token_ids for c in after] == [c.token_ids for c in before]
