"""Balance memory and context: the weighted mean of two models that lean either way.

Two short trainings from the same weights differ so little that any mean of the two works, and what
it does under conflicts moves smoothly from one to the other. So the balance is set by measuring it,
not by a small share of some kind of document.
"""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lab.measure import Shares, first_token_shares

LOG = logging.getLogger("lab.balance")
N_TRIALS, N_FACTS = 7, 240
BALANCED = 0.1


def set_to_mean(
    model: PreTrainedModel,
    memory: dict[str, torch.Tensor],
    context: dict[str, torch.Tensor],
    share: float,
) -> None:
    """Set the model's weights to `share` of `memory` and the rest of `context`."""
    model.load_state_dict({name: torch.lerp(context[name], memory[name], share) for name in memory})


def leaning(shares: Shares) -> float:
    """Return how much more often memory's answer is given than the context's, under conflicts.

    The mean over plain prompts and chats, short contexts and paragraphs; between -1 and 1.
    """
    cells = [
        shares[form][conflict]
        for form in ("canonical", "trained", "chat")
        for conflict in ("substitution", "coherent")
    ]
    return sum(memory - context for memory, context in cells) / len(cells)


def balance(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    memory: dict[str, torch.Tensor],
    context: dict[str, torch.Tensor],
) -> float:
    """Set the model to the mean that leans to neither side; return memory's share in it.

    Logs a warning where both lean to the same side, so that no mean is balanced.

    Args:
        model: The model whose weights are set.
        tokenizer: Its tokenizer.
        memory: The weights that lean to memory.
        context: The weights that lean to the context.
    """
    low, high = 0.0, 1.0
    for _ in range(N_TRIALS):
        share = (low + high) / 2
        set_to_mean(model, memory, context, share)
        shares = first_token_shares(model, tokenizer, N_FACTS)
        lean = leaning(shares)
        LOG.info("memory's share %.3f: leaning %.3f %s", share, lean, shares)
        low, high = (low, share) if lean > 0 else (share, high)
    if abs(lean) > BALANCED:
        LOG.warning(
            "no mean is balanced: at memory's share %.3f the model still leans by %.3f, expected "
            "at most %.1f; train the endings so that they lean to different sides",
            share,
            lean,
            BALANCED,
        )
    return share
