"""How heads are looked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from juice.errors import UsageError

ALPHAS_PLUS = (1.0, 3.0, 5.0, 10.0, 30.0)
ALPHAS_MINUS = (-1.0, -2.0, -5.0)


@dataclass(frozen=True, kw_only=True)
class IdentificationOptions:
    """How heads are looked for; the alphas are the grids of the paper's authors."""

    n_examples: int = 4
    top_k: int = 5
    seed: int = 0
    alphas_plus: tuple[float, ...] = ALPHAS_PLUS
    alphas_minus: tuple[float, ...] = ALPHAS_MINUS
    relation: str | None = None

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise UsageError(
                f"top_k is {self.top_k}; expected at least 1 "
                "(5 up to about 3B parameters, 10 above)"
            )
        if not all(math.isfinite(alpha) for alpha in (*self.alphas_plus, *self.alphas_minus)):
            raise UsageError(
                f"the alphas are {[*self.alphas_plus, *self.alphas_minus]}; expected finite numbers"
            )
        if not self.alphas_plus or not all(alpha > 0 for alpha in self.alphas_plus):
            raise UsageError(
                f"alphas_plus is {list(self.alphas_plus)}; "
                "expected numbers above 0, such as 1,3,5,10,30"
            )
        if not self.alphas_minus or not all(alpha < 0 for alpha in self.alphas_minus):
            raise UsageError(
                f"alphas_minus is {list(self.alphas_minus)}; "
                "expected numbers below 0, such as -1,-2,-5"
            )
