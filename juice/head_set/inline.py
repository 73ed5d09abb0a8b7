"""The heads that a request gives itself, in place of a head set, and their name: a hash.

They come as + and - heads with a beta for each sign, or as a coefficient for each head. Both have
the form of a head set's intervention, which makes the coefficients of z. What is given here was
measured by nobody: it has no gate, no target of its own and no harm that is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

from pydantic import ValidationError

from juice.errors import RequestError, first_problem
from juice.head_set.schema import MAX_BETA, Betas, Head, HeadLists, Intervention

PREFIX = "inline:"
N_DIGITS = 12
MAX_HEADS = 16_384  # more than a model has
HEADS_FORM = '{"plus": [[layer, head], ...], "minus": [...]}'
COEFFICIENTS_FORM = "[[layer, head, coefficient], ...]"


class ScaledHead(NamedTuple):
    """A head and its coefficient, -100 to 100."""

    layer: int
    index: int  # type: ignore[assignment]  # as in Head
    coefficient: float


class InlineHeads(Intervention):
    """The heads of a request, by the scales that it gives."""

    betas: Betas

    @cached_property
    def scales(self) -> dict[Head, float]:
        """The coefficient of each head at strength 1."""
        scales: dict[Head, float] = {}
        for sign, heads in self.heads:
            given = getattr(self.betas, sign)
            for i, head in enumerate(heads):
                scale = given[i] if isinstance(given, tuple) else given
                scales[head] = scales.get(head, 0.0) + scale
        return scales

    @cached_property
    def name(self) -> str:
        """The name in reports and logs: the same for the same coefficients."""
        text = json.dumps([[*head, scale] for head, scale in sorted(self.scales.items()) if scale])
        return PREFIX + sha256(text.encode()).hexdigest()[:N_DIGITS]

    @property
    def largest(self) -> float:
        """The largest coefficient, of either sign, at strength 1."""
        return max(map(abs, self.scales.values()))


@lru_cache(maxsize=256)
def inline_heads(
    heads: HeadLists | None,
    coefficients: tuple[ScaledHead, ...] | None,
    beta_plus: float | None,
    beta_minus: float | None,
) -> InlineHeads | None:
    """Return the heads of a request as `heads_of` and `scaled_heads_of` read them, or None."""
    if heads is not None:
        betas = Betas(plus=beta_plus or 0.0, minus=beta_minus or 0.0)
        return InlineHeads(heads=heads, betas=betas)
    if coefficients is None:
        return None
    signed = (
        [one for one in coefficients if one.coefficient >= 0],
        [one for one in coefficients if one.coefficient < 0],
    )
    plus, minus = (tuple(Head(one.layer, one.index) for one in part) for part in signed)
    of_plus, of_minus = (tuple(one.coefficient for one in part) for part in signed)
    return InlineHeads(
        heads=HeadLists(plus=plus, minus=minus), betas=Betas(plus=of_plus, minus=of_minus)
    )


def heads_of(given: Any) -> HeadLists | None:
    """Return the + and - heads that JSON or Python gives; raises RequestError."""
    if given is None or isinstance(given, HeadLists):
        return given
    if not isinstance(given, Mapping) or given.keys() - {"plus", "minus"}:
        raise _wrong("heads", given, HEADS_FORM)
    lists: dict[str, tuple[Head, ...]] = {}
    for sign in ("plus", "minus"):
        entries = _entries(f"heads.{sign}", given.get(sign) or (), HEADS_FORM)
        lists[sign] = tuple(Head(*_place(f"heads.{sign}", e, 2, HEADS_FORM)) for e in entries)
    try:
        return HeadLists(**lists)
    except ValidationError as error:
        raise RequestError(f"heads: {first_problem(error)[1]}", param="steer.heads") from error


def scaled_heads_of(given: Any) -> tuple[ScaledHead, ...] | None:
    """Return the coefficients that JSON or Python gives; raises RequestError."""
    if given is None:
        return None
    made: dict[tuple[int, ...], ScaledHead] = {}
    for entry in _entries("coefficients", given, COEFFICIENTS_FORM):
        place = _place("coefficients", entry, 3, COEFFICIENTS_FORM)
        value = entry[2]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and math.isfinite(value) and abs(value) <= MAX_BETA):
            raise RequestError(
                f"the coefficient of layer {place[0]}, head {place[1]} is {value!r}; expected a "
                f"number from {-MAX_BETA:g} to {MAX_BETA:g}",
                param="steer.coefficients",
            )
        if place in made:
            raise RequestError(
                f"coefficients lists layer {place[0]}, head {place[1]} twice; give each head once",
                param="steer.coefficients",
            )
        made[place] = ScaledHead(place[0], place[1], float(value))
    if not made:
        raise _wrong("coefficients", given, f"{COEFFICIENTS_FORM} with one head or more")
    return tuple(made.values())


def _entries(name: str, given: Any, form: str) -> Sequence[Any]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise _wrong(name, given, form)
    if len(given) > MAX_HEADS:
        raise _wrong(name, f"a list of {len(given)}", f"at most {MAX_HEADS}")
    return given


def _place(name: str, entry: Any, n: int, form: str) -> tuple[int, ...]:
    """Return the layer and the head of an entry of n parts."""
    if isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == n:
        place = tuple(entry[:2])
        if all(isinstance(part, int) and not isinstance(part, bool) for part in place):
            return place
    raise _wrong(name, entry, form)


def _wrong(name: str, got: Any, form: str) -> RequestError:
    shown = repr(got)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
    return RequestError(
        f"{name} has {shown}; expected {form}", param=f"steer.{name.partition('.')[0]}"
    )
