"""A model that recites: after its cue come the same words, whatever was said before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import tiny

CUE = ":"


def reciting(folder: Path, pieces: Sequence[str], template: str) -> Path:
    """Save a Llama that says these pieces after a prompt that ends with the cue, and return it.

    Its next token depends on the last one alone, so none may come twice. An ASCII piece is a token,
    any other a token for each of its bytes.
    """
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in pieces if each.isascii()])
    tokenizer.chat_template = template
    ids = [token for each in (CUE, *pieces) for token in tokenizer(each)["input_ids"]]
    assert len(ids) == len(set(ids)), "a token comes twice"
    torch.manual_seed(0)
    size = 8 * -(-len(tokenizer) // 8)
    network = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size, hidden_size=size, intermediate_size=8, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=2048, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    with torch.no_grad():
        # Heads make a difference, as a model that is served must show, but not to what it says.
        network.model.embed_tokens.weight.copy_(torch.eye(size))
        network.lm_head.weight.zero_()
        for token, following in zip(ids, [*ids[1:], 0], strict=True):
            network.lm_head.weight[following, token] = 1.0
    return tiny.save(folder, network.eval(), tokenizer)
