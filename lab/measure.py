"""A model's answers on the conflict examples, by first token: a quick look during training."""

from __future__ import annotations

from random import Random

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lab.examples import conflict_examples


@torch.no_grad()
def first_token_shares(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, n_facts: int, seed: int = 1
) -> dict[str, dict[str, float]]:
    """Return, by conflict type, how often each answer's first token is likeliest, and its mean p.

    The answers are the parametric and the context answer of `n_facts` examples, less those where
    both begin with the same token.
    """
    examples = [
        e
        for e in Random(seed).sample(conflict_examples(), n_facts)
        if _first(tokenizer, e["context_answer"]) != _first(tokenizer, e["parametric_answer"][0])
    ]
    shares = {}
    for conflict_type in examples[0]["prompts"]:
        hits = torch.zeros(len(examples), 4)
        for i, example in enumerate(examples):
            ids = torch.tensor([tokenizer(example["prompts"][conflict_type])["input_ids"]])
            p = model(ids).logits[0, -1].softmax(-1)
            wanted = (
                _first(tokenizer, example["parametric_answer"][0]),
                _first(tokenizer, example["context_answer"]),
            )
            hits[i] = torch.tensor(
                [float(p.argmax() == w) for w in wanted] + [p[w] for w in wanted]
            )
        names = ("parametric", "context", "p_parametric", "p_context")
        shares[conflict_type] = {
            name: round(value, 3) for name, value in zip(names, hits.mean(0).tolist(), strict=True)
        }
    return shares


def _first(tokenizer: PreTrainedTokenizerFast, answer: str) -> int:
    return int(tokenizer(f" {answer}")["input_ids"][0])
