"""Contrasts: the logits with the context and those without it become one row.

With c and m the log-probabilities of the next token with the context and without, H their entropies
in nats and s the strength, the row is (1 + w) c - w m, but for a constant:

    cad      w = s
    adacad   w = s J, J their Jensen-Shannon divergence in bits
    cocoa    w = s sigmoid(H(m) - H(c) + R / (1 + R)), the sigmoid within 0.1 and 0.9, R their Rényi
             divergence of order 1/2 in nats
    grd      w = t - 1 where c and m have another likeliest token and m is trusted, else 0; t is
             1 - 0.75 s, at least 0, times the share of c at which both tokens are as likely. m is
             trusted if, at the first such token of the answer, its likeliest has more than half of
             the probability, and H(m) < H(c)

    ckplug   among the ten likeliest tokens of each and all that are a hundredth as likely as the
             first: where H(c) > H(m), a m + (1 - a) (c - m), with a = (1 + s) / 2 toward memory and
             (1 - s) / 2 toward the context; elsewhere c

docs/method.md, "Contrasts", has the sources, and what their authors' code does otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from juice.engine.request import Contrast
from juice.formula import ContrastMethod

LEAST_BLEND, MOST_BLEND = 0.1, 0.9  # of cocoa
REVERSED = 0.75  # of grd: how far beyond the tie, at strength 1
SURE = 0.5  # grd trusts a memory of more probability
N_LIKELY, LEAST_OF_FIRST = 10, 0.01  # ckplug's tokens
BELOW = 100.0  # nats between the tokens that ckplug keeps and the others, which a form may need


class Mixer:
    """The contrast of a request, token by token; it remembers whether grd trusts the memory."""

    def __init__(self, contrast: Contrast) -> None:
        self._contrast = contrast
        self._trusts_memory: bool | None = None

    def mixed(self, with_context: torch.Tensor, alone: torch.Tensor) -> torch.Tensor:
        """Return the row that a token is chosen from; logits, float32 [vocabulary]."""
        rule: dict[ContrastMethod, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
            "cad": self._cad,
            "adacad": self._adacad,
            "cocoa": self._cocoa,
            "ckplug": self._ckplug,
            "grd": self._grd,
        }
        mixed = rule[self._contrast.method](with_context, alone)
        # Tokens that a model rules out have minus infinity in both.
        return torch.where(with_context.isneginf(), with_context, mixed)

    def _cad(
        self, c: torch.Tensor, m: torch.Tensor, share: torch.Tensor | float = 1.0
    ) -> torch.Tensor:
        weight = self._contrast.strength * share
        return (1 + weight) * c - weight * m

    def _adacad(self, c: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        p, q = c.softmax(-1), m.softmax(-1)
        nats = _entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2
        return self._cad(c, m, (nats / math.log(2)).clamp(0, 1))

    def _cocoa(self, c: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        p, q = c.softmax(-1), m.softmax(-1)
        apart = -2 * (p * q).sqrt().sum().log().clamp(max=0)
        blend = torch.sigmoid(_entropy(q) - _entropy(p) + apart / (1 + apart))
        return self._cad(c, m, blend.clamp(LEAST_BLEND, MOST_BLEND))

    def _grd(self, c: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        c, m = c.log_softmax(-1), m.log_softmax(-1)
        told, known = c.argmax(), m.argmax()
        if told == known:
            return c
        if self._trusts_memory is None:
            is_surer = _entropy(m.exp()) < _entropy(c.exp())
            self._trusts_memory = bool((m[known].exp() > SURE) & is_surer)
        if not self._trusts_memory:
            return c
        lead, lag = m[known] - m[told], c[told] - c[known]
        tie = lead / (lead + lag) if lead + lag > 1e-9 else 1.0
        share = max(0.0, 1 - REVERSED * self._contrast.strength) * tie
        return share * c + (1 - share) * m

    def _ckplug(self, c: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        kept = _likely(c) | _likely(m)
        told, known = (row.masked_fill(~kept, -math.inf).log_softmax(-1) for row in (c, m))
        mixed = told
        if _entropy(told.exp()) > _entropy(known.exp()):
            toward = 1 if self._contrast.target == "parametric" else -1
            a = (1 + toward * self._contrast.strength) / 2
            mixed = a * known + (1 - a) * (told - known)
        return torch.where(kept, mixed, mixed[kept].min() - BELOW + c.log_softmax(-1))


def _entropy(p: torch.Tensor) -> torch.Tensor:
    """Return the entropy of a distribution in nats."""
    entropy: torch.Tensor = torch.special.entr(p).sum()
    return entropy


def _likely(logits: torch.Tensor) -> torch.Tensor:
    """Return which tokens ckplug keeps of a row; bool [vocabulary]."""
    best = logits.topk(min(N_LIKELY, len(logits))).values
    return logits >= torch.minimum(best[-1], best[0] + math.log(LEAST_OF_FIRST))
