"""Every mistake in `mistakes` is refused at load, in models as deep and wide as real ones."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from juice.checks.at_load import verify
from juice.engine.own.batch import Mode
from juice.errors import UnsupportedModelError
from juice.loading import prepare
from juice.model.loaded import LoadedModel
from tests.checks.mistakes import MISTAKES
from tests.support import tiny

N_HEADS = {24: 16, 40: 32}
QUICK = {("llama", 24, torch.bfloat16), ("gpt2", 24, torch.float32)}


def network(shape: str, n_layers: int, n_heads: int) -> PreTrainedModel:
    """Return a model with the weights that it is initialised with."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if shape == "gpt2":
        sizes = {"n_embd": 8 * n_heads, "n_layer": n_layers, "n_head": n_heads, "n_positions": 64}
        return GPT2LMHeadModel(GPT2Config(vocab_size=tiny.VOCAB_SIZE, **sizes, **ends)).eval()
    config = LlamaConfig(
        vocab_size=tiny.VOCAB_SIZE,
        hidden_size=8 * n_heads,
        intermediate_size=16 * n_heads,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_heads // 2,
        max_position_embeddings=64,
        **ends,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=() if each in QUICK else pytest.mark.torture)
        for each in product(
            ("gpt2", "llama"), (24, 40), (torch.float32, torch.bfloat16, torch.float16)
        )
    ],
    ids=lambda given: (
        f"{given[0]} {given[1]}x{N_HEADS[given[1]]} {str(given[2]).removeprefix('torch.')}"
    ),
)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    shape, n_layers, dtype = request.param
    return prepare(network(shape, n_layers, N_HEADS[n_layers]).to(dtype), tiny.tiny_tokenizer())


def test_without_a_mistake_engine_and_model_agree_by_far(loaded: LoadedModel) -> None:
    found = verify(loaded, Mode())
    assert found.share < found.bound / 2


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused(
    mistake: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    MISTAKES[mistake](monkeypatch)
    # It does not just crash, but for rows that the engine looks for in vain.
    with pytest.raises(UnsupportedModelError, match=r"steered exactly|IndexError"):
        verify(loaded, Mode())
