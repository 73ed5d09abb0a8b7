"""From logits to the next token, one request at a time, in the order of `juice.options.sampling`.

One uniform number from the request's own CPU generator picks each token, so the same seed gives the
same tokens whatever else runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch

from juice.engine import SamplingOptions

# Sorting a large vocabulary is slow; this many candidates almost always hold the mass.
N_CANDIDATES = 1024


def new_generator(sampling: SamplingOptions) -> torch.Generator | None:
    """Return a request's own random generator; None at temperature 0, where nothing is drawn."""
    if sampling.temperature == 0:
        return None
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return generator


def adjusted(
    logits: torch.Tensor,
    sampling: SamplingOptions,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    banned: Collection[int] = (),
) -> torch.Tensor:
    """Return the logits after bias and penalties, float32 [vocabulary].

    Args:
        logits: float32 [vocabulary]; they are not changed.
        sampling: The bias and the penalties.
        prompt_ids: The tokens of the prompt.
        token_ids: The new tokens so far.
        banned: Tokens that may not come next; their logits become minus infinity.
    """
    if not banned and not sampling.changes_logits:
        return logits
    logits = logits.clone()
    if sampling.logit_bias:
        biased = torch.tensor(list(sampling.logit_bias), device=logits.device)
        logits[biased] += torch.tensor(
            list(sampling.logit_bias.values()), dtype=logits.dtype, device=logits.device
        )
    if sampling.repetition_penalty != 1:
        seen = torch.tensor([*prompt_ids, *token_ids], device=logits.device)
        own = logits[seen]  # a token that occurs twice gets the same value twice
        logits[seen] = torch.where(
            own > 0, own / sampling.repetition_penalty, own * sampling.repetition_penalty
        )
    if token_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(token_ids)
        answered, times = (
            torch.tensor(list(v), device=logits.device) for v in (counts, counts.values())
        )
        logits[answered] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if banned:
        logits[list(banned)] = -torch.inf
    return logits


def choose(
    logits: torch.Tensor, sampling: SamplingOptions, generator: torch.Generator | None
) -> int:
    """Return the next token from logits, float32 [vocabulary], after bias and penalties."""
    if generator is None:
        return int(logits.argmax())
    logits = logits.cpu().double()
    # The largest becomes 0, so a tiny temperature gives minus infinity at worst.
    probabilities, tokens = _candidates(
        ((logits - logits.max()) / sampling.temperature).softmax(-1), sampling
    )
    cumulative = probabilities.cumsum(0)
    drawn = torch.rand(1, generator=generator, dtype=torch.float64) * cumulative[-1]
    return int(tokens[min(int(torch.searchsorted(cumulative, drawn, right=True)), len(tokens) - 1)])


def _candidates(
    probabilities: torch.Tensor, sampling: SamplingOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities and ids of the tokens that the cuts leave."""
    k = max(0, sampling.top_k)
    if not k and sampling.top_p == 1 and not sampling.min_p:
        return probabilities, torch.arange(len(probabilities))
    n = min(k or N_CANDIDATES, len(probabilities))
    likeliest, tokens = probabilities.topk(n)
    # Take more where the mass is spread out, unless k sets the number.
    while not k and n < len(probabilities) and _is_short(likeliest, sampling):
        n = min(8 * n, len(probabilities))
        likeliest, tokens = probabilities.topk(n)
    total = likeliest.sum() if k else probabilities.sum()
    before = likeliest.cumsum(0) - likeliest
    # A token stays while the mass before it is below top_p: the smallest set that reaches it.
    kept = before < sampling.top_p * total
    kept &= likeliest >= sampling.min_p * likeliest[0]
    kept[0] = True
    return likeliest[kept], tokens[kept]


def _is_short(likeliest: torch.Tensor, sampling: SamplingOptions) -> bool:
    """Return whether the cuts may leave more tokens than these candidates."""
    return bool(likeliest.sum() < sampling.top_p and likeliest[-1] >= sampling.min_p * likeliest[0])
