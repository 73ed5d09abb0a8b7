"""Loading a model from a folder, and what is said of a folder that cannot be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLTokenizer
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

import juice
from juice.engine import structure
from juice.engine.load_options import LoadOptions
from juice.engine.structure import Structure
from juice.errors import ModelNotFoundError, UsageError
from juice.loading import load_model
from tests.support import oracle, tiny
from tests.support.tiny import saved


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


def test_a_program_that_asks_for_no_structure_does_not_pay_for_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []

    def told(tokenizer: str, **options: Any) -> LLTokenizer:
        read.append(tokenizer)
        return LLTokenizer(tokenizer, **options)

    monkeypatch.setattr(structure, "LLTokenizer", told)
    with juice.load("mini") as model:
        model.generate("a", max_tokens=2)
        assert not read
        for texts in (["Cairo"], ["Lima"]):
            model.generate("a", structure=Structure.choice(texts), max_tokens=9)
        assert len(read) == 1


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


def test_answers_end_at_the_tokenizers_end_beside_those_of_the_model() -> None:
    """Kills: a model tuned for chats, whose tokenizer alone names the end of a turn."""
    network = tiny.tiny_model("llama")
    network.generation_config.eos_token_id = [7, 9]
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "A"})
    with juice.load(network, tokenizer=tokenizer) as model:
        ends = model.engine.description.stop_token_ids
    assert ends == {7, 9, tokenizer.convert_tokens_to_ids("A")}


def test_experts_whose_training_balances_them_share_steps_like_others() -> None:
    """Kills: the loss of that, which fails on masks that are given, so the model makes its own."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=tiny.VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
    )
    network = tiny.with_large_weights(MixtralForCausalLM(config))
    with juice.load(network, tokenizer=tiny.tiny_tokenizer()) as model:
        assert not model.engine.details["own_masks"]
