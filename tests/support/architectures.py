"""Tiny random models of the architectures that people run, from seeded configurations.

All have 4 layers of 4 query heads; sliding windows are 8 tokens, shorter than most sequences in the
tests.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny import N_HEADS, N_LAYERS, VOCAB_SIZE, with_large_weights

WINDOW = 8
ALTERNATING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * (N_LAYERS // 2),
}
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS,
    "max_position_embeddings": 128, **ENDS,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "n_positions": 128, "n_embd": 32,
    "n_layer": N_LAYERS, "n_head": N_HEADS, **ENDS,
}  # fmt: skip
GPT_NEO_SIZES = {
    "vocab_size": VOCAB_SIZE, "max_position_embeddings": 128, "hidden_size": 32,
    "num_layers": N_LAYERS, "num_heads": N_HEADS, **ENDS,
}  # fmt: skip
BLOOM_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "n_layer": N_LAYERS,
    "n_head": N_HEADS,
    **ENDS,
}
MPT_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "n_layers": N_LAYERS,
    "n_heads": N_HEADS,
    "max_seq_len": 128,
    **ENDS,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
SWITCH = 15  # tokens after which Phi-3's longrope uses its long factors
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SWITCH,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 6.0, 8.0],
}  # fmt: skip
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
IMAGE_TOKENS = {"image_token_index": 299, "boi_token_index": 298, "eoi_token_index": 297}
JAMBA = {
    "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1,
    "mamba_d_state": 4, "mamba_dt_rank": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """One row of the coverage: an everyday name, a model type and a configuration.

    `refusal` is part of the error where loading must refuse it, otherwise None.
    """

    name: str
    model_type: str
    config: dict[str, Any]
    refusal: str | None = None

    def build(self, seed: int = 0) -> PreTrainedModel:
        """Return a float32 model with weights large enough for heads to matter."""
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on tiny sizes
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(self.model_type, **self.config)
            )
        return with_large_weights(model)


def row(
    name: str,
    model_type: str,
    sizes: dict[str, Any] = GROUPED,
    *,
    refusal: str | None = None,
    **more: Any,
) -> Architecture:
    """Return a row of the table below: the common sizes and the architecture's own options."""
    return Architecture(name, model_type, {**sizes, **more}, refusal)


ARCHITECTURES = (
    row("GPT-2", "gpt2", GPT2_SIZES),
    row("GPT-BigCode", "gpt_bigcode", GPT2_SIZES, multi_query=True),
    row(
        "GPT-Neo",
        "gpt_neo",
        GPT_NEO_SIZES,
        attention_types=[[["global", "local"], 2]],
        window_size=WINDOW,
    ),
    row("GPT-Neo (global)", "gpt_neo", GPT_NEO_SIZES, attention_types=[[["global"], N_LAYERS]]),
    row("GPT-J", "gptj", GPT2_SIZES, rotary_dim=4),
    row("GPT-NeoX", "gpt_neox", SIZES),
    row("OPT", "opt", SIZES, ffn_dim=64, word_embed_proj_dim=32),
    row("BLOOM", "bloom", BLOOM_SIZES),
    row(
        "Falcon (7B style)",
        "falcon",
        SIZES,
        new_decoder_architecture=False,
        multi_query=True,
        parallel_attn=True,
    ),
    row("Falcon (40B style)", "falcon", SIZES, new_decoder_architecture=True, num_kv_heads=2),
    row(
        "Falcon (RW, ALiBi)",
        "falcon",
        SIZES,
        new_decoder_architecture=False,
        multi_query=False,
        parallel_attn=False,
        alibi=True,
    ),
    row("MPT", "mpt", MPT_SIZES),
    row("Llama", "llama"),
    row("Llama (llama3 rope)", "llama", rope_parameters=LLAMA3_ROPE),
    row(
        "Llama (dynamic rope)",
        "llama",
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    ),
    row("Mistral", "mistral", sliding_window=WINDOW),
    row("Mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2),
    row("Qwen2", "qwen2"),
    row(
        "Qwen2 (sliding window)",
        "qwen2",
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
    ),
    row("Qwen2-MoE", "qwen2_moe", **EXPERTS, shared_expert_intermediate_size=16),
    row("Qwen3", "qwen3", head_dim=12),
    row("Qwen3-MoE", "qwen3_moe", **EXPERTS, head_dim=12),
    row("Gemma", "gemma", head_dim=12),
    row("Gemma 2", "gemma2", head_dim=12, sliding_window=WINDOW),
    row("Gemma 3 (text)", "gemma3_text", head_dim=12, **ALTERNATING),
    row(
        "Gemma 3 (multimodal)",
        "gemma3",
        ENDS,
        text_config={**GROUPED, "head_dim": 12, **ALTERNATING},
        vision_config=VISION,
        **IMAGE_TOKENS,
    ),
    row("Phi", "phi", SIZES),
    row("Phi-3", "phi3", head_dim=12, sliding_window=WINDOW),
    row(
        "Phi-3 (longrope)",
        "phi3",
        rope_parameters=LONGROPE,
        original_max_position_embeddings=SWITCH,
    ),
    row("StableLM", "stablelm"),
    row("StarCoder2", "starcoder2", sliding_window=WINDOW),
    row("OLMo", "olmo"),
    row("OLMo 2", "olmo2"),
    row("Cohere", "cohere"),
    row("Cohere 2", "cohere2", **ALTERNATING),
    row("Granite", "granite"),
    row("GLM-4", "glm4", head_dim=8),
    row("EXAONE 4", "exaone4", **ALTERNATING),
    row("SmolLM3", "smollm3"),
    row(
        "GPT-OSS", "gpt_oss", head_dim=8, **ALTERNATING, num_local_experts=4, num_experts_per_tok=2
    ),
    row("DeepSeek-V2", "deepseek_v2", SIZES, num_key_value_heads=4, **LATENT),
    row("DeepSeek-V3", "deepseek_v3", SIZES, num_key_value_heads=4, **LATENT),
)
REFUSED = (
    row("Jamba", "jamba", refusal="no attention heads", **JAMBA),
    row("Mamba", "mamba", refusal="no attention heads", state_size=4),
    row("RWKV", "rwkv", refusal="no attention heads", attention_hidden_size=32),
    row("BitNet", "bitnet", refusal="normalises across heads"),
    row("DiffLlama", "diffllama", refusal="paired heads"),
    row("BERT", "bert", refusal="not causal"),
)


def build(name: str) -> PreTrainedModel:
    """Return the model of the row with this name."""
    return next(a for a in (*ARCHITECTURES, *REFUSED) if a.name == name).build()
