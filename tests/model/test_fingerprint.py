"""The fingerprint of a model: the same wherever its weights are, another for other weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import juice
from juice.engine.load_options import LoadOptions
from juice.errors import HeadSetMismatchError
from juice.loading import load_model, prepare
from tests.support import tiny
from tests.support.architectures import build
from tests.support.tiny import saved


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


@pytest.mark.parametrize("name", ["q_proj", "v_proj", "o_proj"])
def test_a_merged_adapter_makes_another_model_to_which_the_bases_heads_do_not_fit(
    name: str, tmp_path: Path
) -> None:
    """Kills: heads that are taken on trust since names, sizes and most weights are the same."""
    with juice.load(saved(tmp_path / "base")) as base:
        heads = {"plus": [(0, 1)], "minus": [(1, 3)]}
        made = base.make_head_set(
            name="context", target="context", **heads, beta_plus=2, beta_minus=-1
        )
        made.save(tmp_path / "head_sets" / "tiny" / "context")
    network = tiny.tiny_model("llama")
    with torch.no_grad():  # of rank 1, in one layer, and a thousandth of the weights' size
        weight = network.model.layers[2].self_attn.get_submodule(name).weight
        weight += 1e-4 * torch.outer(torch.randn(len(weight)), torch.randn(weight.shape[1]))
    merged = tiny.save(tmp_path / "merged", network)
    with (
        juice.load(merged, head_sets=tmp_path / "head_sets") as model,
        pytest.raises(HeadSetMismatchError, match="its fingerprint is"),
    ):
        model.generate("x", steer="context", max_tokens=1)
