"""For tests of precision and placement: a model wide enough to pack, and the naive two runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from juice.engine.load_options import Limits
from juice.engine.own.thread import BatchingEngine
from juice.model.loaded import LoadedModel
from tests.support import oracle, tiny
from tests.support.mixed import mixed_requests


def wide_model(seed: int = 0) -> PreTrainedModel:
    """Return a float32 llama of width 64, the size of the blocks that bitsandbytes packs."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": tiny.N_HEADS,
        "num_key_value_heads": 2,
    }
    tokens = {
        "vocab_size": tiny.VOCAB_SIZE,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    model = LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=tiny.N_LAYERS, max_position_embeddings=128, **sizes, **tokens)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
    return model.eval()


def worst_difference(
    loaded: LoadedModel,
    *,
    seed: int = 1,
    n: int = 12,
    forward: Callable[..., torch.Tensor] = oracle.steered_logits,
) -> float:
    """Return how far a mixed batch is from the same model's naive two runs on the same tokens.

    In log-probabilities. Three at a time, prompts in chunks: rows join and leave. Every chosen
    token must be the naive runs' likeliest, or as likely within that difference.
    """
    made = mixed_requests(seed=seed)
    engine = BatchingEngine(loaded, Limits(max_batch=3, max_prefill_tokens=40))
    completions = engine.generate([request for request, _, _ in made])
    engine.stop()
    worst = 0.0
    for completion, (request, heads, method) in zip(completions, made, strict=True):
        ids = [*request.prompt_ids, *completion.token_ids[:-1]]
        logprobs = (
            forward(loaded.model, ids, heads, method=method)[len(request.prompt_ids) - 1 :]
            .float()
            .log_softmax(-1)
        )
        chosen = logprobs[torch.arange(len(logprobs)), list(completion.token_ids)]
        worst = max(
            worst,
            float((torch.tensor(completion.watched) - logprobs[0]).abs().max()),
            float((torch.tensor(completion.logprobs) - chosen).abs().max()),
            float((logprobs.max(-1).values - chosen).max()),
        )
    return worst
