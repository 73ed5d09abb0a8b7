"""From logits to the next token, a request at a time.

In this order: a bias for single tokens; penalties for what was said before; the division by temperature; the cuts to the
likeliest top_k, to the smallest set that holds top_p of the mass, and to what has at least min_p of the likeliest one's
probability. One uniform number from the request's own CPU generator picks from what is left: the same seed gives the same
tokens whatever else runs. Temperature 0 takes the likeliest token.

    repetition   logit / penalty if logit > 0 else logit * penalty    tokens of the prompt and of the answer
    presence     logit - penalty                                      tokens of the answer
    frequency    logit - penalty * times said                         tokens of the answer
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from juice.errors import RequestError

MAX_BIASES = 1024
# Sorting a large vocabulary is slow; the mass almost always lies in so many candidates.
N_CANDIDATES = 1024
BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("top_k", 0, 1_000_000),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request chooses tokens; `top_k` 0, `top_p` 1 and `min_p` 0 cut nothing, `seed` None draws a fresh one.

    `logit_bias` is added to the logits of single tokens, by id.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in BOUNDS:
            value = getattr(self, name)
            if not math.isfinite(value) or not low <= value <= high:
                raise RequestError(f"{name} is {value}; expected a number from {low:g} to {high:g}", param=name)
        if self.top_p == 0:
            raise RequestError("top_p is 0; expected a number above 0, or temperature 0 for the likeliest token", param="top_p")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise RequestError(f"seed is {self.seed}; expected a 64-bit integer", param="seed")
        if len(self.logit_bias) > MAX_BIASES:
            raise RequestError(f"logit_bias names {len(self.logit_bias)} tokens; expected at most {MAX_BIASES}", param="logit_bias")
        for token, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise RequestError(f"logit_bias of token {token} is {bias}; expected a number from -100 to 100", param="logit_bias")

    @property
    def changes_logits(self) -> bool:
        """Tell whether a bias or a penalty comes before the choice."""
        penalised = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        return penalised or bool(self.logit_bias)

    def new_generator(self) -> torch.Generator | None:
        """Return the request's own generator; None where nothing is drawn."""
        if self.temperature == 0:
            return None
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def adjusted(
    logits: torch.Tensor, sampling: Sampling, prompt_ids: Sequence[int], token_ids: Sequence[int], banned: Collection[int] = ()
) -> torch.Tensor:
    """Return the logits float32 [vocabulary] after bias and penalties; `banned` tokens get none at all."""
    if not banned and not sampling.changes_logits:
        return logits
    logits = logits.clone()
    if sampling.logit_bias:
        biased = torch.tensor(list(sampling.logit_bias), device=logits.device)
        logits[biased] += torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    if sampling.repetition_penalty != 1:
        seen = torch.tensor([*prompt_ids, *token_ids], device=logits.device)
        said = logits[seen]  # a token that comes twice gets the same value twice
        logits[seen] = torch.where(said > 0, said / sampling.repetition_penalty, said * sampling.repetition_penalty)
    if token_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        said_times = Counter(token_ids)
        answered, times = (torch.tensor(list(v), device=logits.device) for v in (said_times, said_times.values()))
        logits[answered] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if banned:
        logits[list(banned)] = -torch.inf
    return logits


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """Return the next token; logits: float32 [vocabulary], after bias and penalties."""
    if generator is None:
        return int(logits.argmax())
    logits = logits.cpu().double()
    # The largest becomes 0: a tiny temperature then gives minus infinity at worst.
    probabilities, tokens = _candidates(((logits - logits.max()) / sampling.temperature).softmax(-1), sampling)
    cumulative = probabilities.cumsum(0)
    drawn = torch.rand(1, generator=generator, dtype=torch.float64) * cumulative[-1]
    return int(tokens[min(int(torch.searchsorted(cumulative, drawn, right=True)), len(tokens) - 1)])


def _candidates(probabilities: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities and ids of the tokens that the cuts leave."""
    if not sampling.top_k and sampling.top_p == 1 and not sampling.min_p:
        return probabilities, torch.arange(len(probabilities))
    n = min(sampling.top_k or N_CANDIDATES, len(probabilities))
    likeliest, tokens = probabilities.topk(n)
    # More of them where the mass is spread, unless k says how many.
    while not sampling.top_k and n < len(probabilities) and _is_short(likeliest, sampling):
        n = min(8 * n, len(probabilities))
        likeliest, tokens = probabilities.topk(n)
    total = likeliest.sum() if sampling.top_k else probabilities.sum()
    before = likeliest.cumsum(0) - likeliest
    # A token stays while the mass before it is below top_p: the smallest set that reaches it.
    kept = before < sampling.top_p * total
    kept &= likeliest >= sampling.min_p * likeliest[0]
    kept[0] = True
    return likeliest[kept], tokens[kept]


def _is_short(likeliest: torch.Tensor, sampling: Sampling) -> bool:
    """Tell whether the cuts may leave more tokens than these candidates."""
    return bool(likeliest.sum() < sampling.top_p and likeliest[-1] >= sampling.min_p * likeliest[0])
