"""A checkpoint in gpt2's exact files: configuration, tensor names and shapes, tokenizer.

The weights are random and the merges made up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from string import ascii_lowercase

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

END = "<|endoftext|>"
VOCAB_SIZE = 50257
CONFIG = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
    "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
    "summary_use_proj": True, "vocab_size": VOCAB_SIZE,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
GENERATION_CONFIG = {
    "_from_model_config": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "transformers_version": "4.26.0.dev0",
}
# Larger than the 0.02 of a new model: the heads of a random model must matter.
SCALE = 0.06


def write(folder: Path, words: Iterable[str]) -> Path:
    """Write the checkpoint, half a gigabyte; each word, with the space before it, is one token."""
    for name, content in (
        ("config", CONFIG),
        ("generation_config", GENERATION_CONFIG),
        ("tokenizer_config", {"model_max_length": 1024}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))
    vocabulary, merges = _vocabulary(words)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text(
        "\n".join(["#version: 0.2", *map(" ".join, merges), ""]), encoding="utf-8"
    )
    save_file(_tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _vocabulary(words: Iterable[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the ids of 256 bytes, 50,000 merges and the end of a text, and the merges.

    Each word is built up from its left; pairs of letters fill the rest.
    """
    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    merges = []
    letters = [first + second for first, second in product(ascii_lowercase, repeat=2)]
    chains = [[*f"Ġ{word}"] for word in dict.fromkeys(words)]
    for left, *rest in (*chains, *map(list, letters), *map(list, product(letters, letters))):
        for right in rest:
            if left + right not in tokens and len(merges) < VOCAB_SIZE - 257:
                tokens[left + right] = None
                merges.append((left, right))
            left += right
    return {token: i for i, token in enumerate([*tokens, END])}, merges


def _tensors() -> dict[str, torch.Tensor]:
    """Return random weights under the names of the original.

    They lack the prefix `transformer.` and include each layer's causal mask.
    """
    generator = torch.Generator().manual_seed(0)
    width, n_positions = CONFIG["n_embd"], CONFIG["n_positions"]

    def weights(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(0, SCALE, generator=generator)

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": 1 + weights(width), f"{name}.bias": weights(width)}

    tensors = {
        "wte.weight": weights(VOCAB_SIZE, width),
        "wpe.weight": weights(n_positions, width),
        **norm("ln_f"),
    }
    for layer in range(CONFIG["n_layer"]):
        tensors |= norm(f"h.{layer}.ln_1") | norm(f"h.{layer}.ln_2")
        tensors[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(n_positions, n_positions)).view(
            1, 1, n_positions, n_positions
        )
        for name, n_in, n_out in (
            ("attn.c_attn", 1, 3),
            ("attn.c_proj", 1, 1),
            ("mlp.c_fc", 1, 4),
            ("mlp.c_proj", 4, 1),
        ):
            tensors[f"h.{layer}.{name}.weight"] = weights(n_in * width, n_out * width)
            tensors[f"h.{layer}.{name}.bias"] = weights(n_out * width)
    return tensors
