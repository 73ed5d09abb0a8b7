"""Tiny random models and a tokenizer, in memory or saved to a folder."""

from __future__ import annotations

from pathlib import Path
from string import ascii_uppercase
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 300
END = "<|endoftext|>"
SHAPES = ("gpt2", "llama", "gemma2")
N_LAYERS, N_HEADS = 4, 4


def tiny_model(shape: str, seed: int = 0) -> PreTrainedModel:
    """Return a float32 model with weights large enough for heads to matter.

    gemma2 has a sliding window of 8 in every other layer.
    """
    torch.manual_seed(seed)
    if shape == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB_SIZE,
                n_positions=128,
                n_embd=32,
                n_layer=N_LAYERS,
                n_head=N_HEADS,
                eos_token_id=0,
            )
        )
    else:
        sizes = {
            "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS, "num_key_value_heads": 2,
            "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
        }  # fmt: skip
        if shape == "llama":
            model = LlamaForCausalLM(LlamaConfig(**sizes))
        elif shape == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=12))
        elif shape == "phi3":
            model = Phi3ForCausalLM(Phi3Config(**sizes))
        else:
            model = Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=12, sliding_window=8))
    return with_large_weights(model)


def with_large_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with its weights drawn anew, large enough for heads to matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer.

    Ids 1-256 are bytes, 257-282 a space with a capital letter, and 0 ends a text.
    """
    merges = [("Ġ", letter) for letter in ascii_uppercase]
    tokens = [END, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def save(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **options: Any,
) -> Path:
    """Write a model and a tokenizer (by default the tiny one) to a folder, and return it."""
    model.save_pretrained(folder, **options)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


def saved(
    folder: Path,
    shape: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Path:
    """Write a new tiny model and its tokenizer to a folder, and return it."""
    return save(folder, tiny_model(shape, seed).to(dtype), **options)
