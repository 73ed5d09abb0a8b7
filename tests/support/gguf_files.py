"""GGUF files of tiny models, written by rules of our own: llama.cpp's names and permutations.

Nothing here uses what reads them, and the models that are written are the oracle for what is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFEndian, GGUFWriter, TokenType, quantize
from transformers import PreTrainedModel

from tests.support.tiny import tiny_tokenizer

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
}  # fmt: skip
# What a layer has after its attention is one norm before the MLP, or Gemma's two.
AFTER = {"post_attention_layernorm": "ffn_norm"}
AFTER_IN_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ELSEWHERE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def name_of(parameter: str, *, gemma: bool) -> str:
    """Return llama.cpp's name of a parameter."""
    module, kind = parameter.rsplit(".", 1)
    if module in ELSEWHERE:
        return f"{ELSEWHERE[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{(LAYER_NAMES | (AFTER_IN_GEMMA if gemma else AFTER))[inner]}.{kind}"


def paired(weight: np.ndarray[Any, Any], n_heads: int) -> np.ndarray[Any, Any]:
    """Return rows as llama.cpp rotates them: neighbours, where transformers has halves."""
    heads = weight.reshape(n_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(np.swapaxes(heads, 1, 2).reshape(weight.shape))


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    *,
    quantization: GGMLQuantizationType | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    change: Callable[[GGUFWriter], object] = lambda _: None,
    without: frozenset[str] = frozenset(),
    endianness: GGUFEndian = GGUFEndian.LITTLE,
) -> Path:
    """Write a model and the tiny tokenizer to a file.

    Args:
        path: The file.
        model: The model, in float32.
        architecture: llama.cpp's name for it.
        quantization: That of the matrices; None for float32.
        tensors: More tensors, as they are.
        change: Adds or replaces fields.
        without: Names of tensors to leave out.
        endianness: The order of a number's bytes.
    """
    config = model.config
    writer = GGUFWriter(path, architecture, endianess=endianness)
    writer.add_name("Tiny Model 1.0")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None) is not None:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    _add_tokenizer(writer)
    change(writer)
    gemma = architecture.startswith("gemma")
    stored = dict(model.state_dict())
    if config.tie_word_embeddings:
        stored.pop("lm_head.weight", None)
    for parameter, value in stored.items():
        weight = value.numpy().astype(np.float32)
        if gemma and parameter.endswith("norm.weight"):
            weight = weight + 1
        if architecture == "llama" and "q_proj" in parameter:
            weight = paired(weight, config.num_attention_heads)
        if architecture == "llama" and "k_proj" in parameter:
            weight = paired(weight, config.num_key_value_heads)
        name = name_of(parameter, gemma=gemma)
        if name in without:
            continue
        if quantization is not None and weight.ndim > 1:
            writer.add_tensor(name, quantize(weight, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, weight)
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter) -> None:
    tokenizer = tiny_tokenizer()
    known = {i: token for token, i in tokenizer.get_vocab().items()}
    tokens = [known.get(i, f"[unused{i}]") for i in range(300)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL, *[TokenType.NORMAL] * (len(tokens) - 1)])
    writer.add_token_merges([f"Ġ {letter}" for letter in ascii_uppercase])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
