"""From logits to the next token, a request at a time.

Temperature 0 takes the likeliest token. Otherwise the probabilities of logits / temperature are sorted, cut to the top k
and to the smallest set that holds top_p of the mass, and one uniform number from the request's own CPU generator picks
from what is left: the same seed gives the same tokens whatever else runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from juice.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request chooses tokens; `top_k` 0 and `top_p` 1 cut nothing, `seed` None draws a fresh one."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        bounds = (("temperature", 0.0, 2.0), ("top_p", 0.0, 1.0), ("top_k", 0, 1_000_000))
        for name, low, high in bounds:
            value = getattr(self, name)
            if not math.isfinite(value) or not low <= value <= high:
                raise RequestError(f"{name} is {value}; expected a number from {low:g} to {high:g}", param=name)
        if self.top_p == 0:
            raise RequestError("top_p is 0; expected a number above 0, or temperature 0 for the likeliest token", param="top_p")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise RequestError(f"seed is {self.seed}; expected a 64-bit integer", param="seed")

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


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """Return the next token; logits: float32 [vocabulary]."""
    if generator is None:
        return int(logits.argmax())
    probabilities, tokens = (logits.cpu().double() / sampling.temperature).softmax(-1).sort(descending=True, stable=True)
    if sampling.top_k:
        probabilities = probabilities[: sampling.top_k]
    cumulative = probabilities.cumsum(0)
    # A token stays while the mass before it is below top_p: the smallest set that reaches it.
    n_kept = int((cumulative - probabilities < sampling.top_p * cumulative[-1]).sum())
    cumulative = cumulative[:n_kept]
    drawn = torch.rand(1, generator=generator, dtype=torch.float64) * cumulative[-1]
    return int(tokens[min(int(torch.searchsorted(cumulative, drawn, right=True)), n_kept - 1)])
