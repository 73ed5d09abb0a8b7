"""The sampler: the next tokens of all rows, as `juice.engine.sampling_options` orders the steps.

One uniform number from a request's own CPU generator picks each of its tokens. Probabilities become
whole numbers of 2^-40 before they are added up, so the same seed gives the same tokens whatever
else runs. Nothing here waits for a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from juice.engine.sampling_options import SamplingOptions
from juice.engine.structure import Constraint, rule_out

# From logits, float32 [rows, vocabulary], and each row's options to the mass that its cuts leave,
# and the tokens that have it, both int64 [rows, candidates]; None where these are the vocabulary.
Leave = Callable[
    [torch.Tensor, Sequence[SamplingOptions]], tuple[torch.Tensor, torch.Tensor | None]
]
UNIT = 1 << 40
TOKEN_BITS = 22  # with the bits of a float they fill less than 64
LAST_TOKEN = (1 << TOKEN_BITS) - 1
LEAST_EXPONENT = -30.0  # exp(-30) is a tenth of a unit, which rounds to none
# A CPU draws for as many rows at once as have so many logits, since these fit into its cache.
N_CACHED = 1 << 18
# A CPU sorts only the candidates, which it finds by the mass in so many ranges of equal width. A
# GPU sorts all: looking how many there are would wait for it, and sorting is fast.
N_RANGES = 4096


@dataclass(frozen=True, kw_only=True)
class Draw:
    """All that the next token of one row depends on, beside its logits.

    `uniform`, from 0 to 1, picks the token; None takes the likeliest. The repetition penalty is for
    what was `seen` in prompt and answer, the others for `token_ids`, the answer. Tokens that are
    `banned` may not come next, nor those that the constraint rules out.
    """

    sampling: SamplingOptions
    uniform: float | None = None
    seen: Collection[int] = frozenset()
    token_ids: Sequence[int] = ()
    banned: Collection[int] = ()
    constraint: Constraint | None = None


def new_generator(sampling: SamplingOptions) -> torch.Generator | None:
    """Return a request's own random generator; None at temperature 0, where nothing is drawn."""
    if sampling.temperature == 0:
        return None
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
        return generator
    return generator.manual_seed(sampling.seed)


def choose(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return the next token of each row, int64 [rows].

    Logits are float32 [rows, vocabulary], and are not changed.
    """
    logits = adjusted(logits, draws)
    on_cpu = logits.device.type == "cpu"
    # NumPy takes a twentieth of the time of PyTorch's argmax on a CPU.
    chosen = torch.from_numpy(logits.numpy().argmax(-1)) if on_cpu else logits.argmax(-1)
    groups: dict[Leave, list[int]] = {}
    for i, draw in enumerate(draws):
        if draw.uniform is not None:
            groups.setdefault(cuts_of(draw.sampling), []).append(i)
    at_once = max(1, N_CACHED // logits.shape[-1]) if on_cpu else len(draws)
    parts = (
        (leave, group[i : i + at_once])
        for leave, group in groups.items()
        for i in range(0, len(group), at_once)
    )
    for leave, among in parts:
        rows, drawing = on_device(logits, among), [draws[i] for i in among]
        mass, tokens = leave(logits[rows], [draw.sampling for draw in drawing])
        cumulative = mass.cumsum(-1)
        uniform = on_device(logits, [draw.uniform for draw in drawing], _widest(logits))
        target = (uniform * cumulative[:, -1]).long()[:, None]
        picked = torch.searchsorted(cumulative, target, right=True).clamp(max=mass.shape[-1] - 1)
        drawn = picked if tokens is None else tokens.gather(-1, picked)
        chosen = chosen.index_copy(0, rows, drawn[:, 0])
    return chosen


def adjusted(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return the logits after bias, penalties and constraints, float32 [rows, vocabulary]."""
    constraints = {
        i: draw.constraint for i, draw in enumerate(draws) if draw.constraint is not None
    }
    if not constraints and not any(draw.banned or draw.sampling.changes_logits for draw in draws):
        return logits
    logits = logits.clone()
    biased = _Entries(logits)
    repeated, answered, banned = _Entries(logits), _Entries(logits), _Entries(logits)
    for row, draw in enumerate(draws):
        sampling = draw.sampling
        biased.add(row, sampling.logit_bias.keys(), sampling.logit_bias.values())
        if sampling.repetition_penalty != 1:
            repeated.add(row, draw.seen, [sampling.repetition_penalty] * len(draw.seen))
        if sampling.presence_penalty or sampling.frequency_penalty:
            counts = Counter(draw.token_ids)
            penalties = (
                sampling.presence_penalty + sampling.frequency_penalty * n for n in counts.values()
            )
            answered.add(row, counts.keys(), penalties)
        banned.add(row, draw.banned, [-torch.inf] * len(draw.banned))
    biased.change(lambda logit, bias: logit + bias)
    repeated.change(lambda logit, penalty: torch.where(logit > 0, logit / penalty, logit * penalty))
    answered.change(lambda logit, penalty: logit - penalty)
    banned.change(lambda _logit, minus_infinity: minus_infinity)
    if constraints:
        rule_out(logits, constraints)
    return logits


def cuts_of(sampling: SamplingOptions) -> Leave:
    """Return the function that leaves the tokens of the cuts that a request wants."""
    if sampling.top_k > 0:
        return first_tokens
    return all_tokens if sampling.top_p == 1 else first_mass


def all_tokens(
    logits: torch.Tensor, options: Sequence[SamplingOptions]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the mass of all tokens that `min_p` leaves, int64 [rows, vocabulary], and None."""
    mass = _mass(logits, logits.amax(-1, keepdim=True), options)
    return _likely_enough(mass, options), None


def first_tokens(
    logits: torch.Tensor, options: Sequence[SamplingOptions]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the mass that all cuts leave to the `top_k` likeliest tokens, and these tokens.

    Both are int64 [rows, candidates], the likeliest first; what is cut off has no mass.
    """
    top_k = [min(sampling.top_k, logits.shape[-1]) for sampling in options]
    mass, tokens = _likeliest(logits, options, max(top_k))
    rank = torch.arange(max(top_k), device=logits.device)
    mass = mass.where(rank < on_device(logits, top_k)[:, None], 0)
    return _cut(mass, mass.sum(-1, keepdim=True), options), tokens


def first_mass(
    logits: torch.Tensor, options: Sequence[SamplingOptions]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the mass that `top_p` and `min_p` leave, and its tokens, as `first_tokens` does."""
    most = logits.amax(-1, keepdim=True)
    mass = _mass(logits, most, options)
    whole, n_candidates = mass.sum(-1, keepdim=True), logits.shape[-1]
    if logits.device.type == "cpu":
        share = on_device(logits, [[sampling.top_p] for sampling in options], torch.float64)
        ranges = _ranges(logits, most, options)
        in_ranges = torch.zeros(len(logits), N_RANGES, dtype=torch.int64)
        cumulative = in_ranges.scatter_add_(-1, ranges, mass).cumsum(-1)
        last = (cumulative < share * whole).sum(-1, keepdim=True)
        n_candidates = int((ranges <= last).sum(-1).max())
    mass, tokens = _likeliest(logits, options, n_candidates)
    return _cut(mass, whole, options), tokens


def _ranges(
    logits: torch.Tensor, most: torch.Tensor, options: Sequence[SamplingOptions]
) -> torch.Tensor:
    """Return the range of logits that each token is in, int64 [rows, vocabulary].

    Ranges count down from the largest logit, `most` as in `_mass`, to where no token has mass. No
    token is likelier than one of an earlier range, however the numbers are rounded.
    """
    temperature = on_device(logits, [[sampling.temperature] for sampling in options], logits.dtype)
    spread = (-LEAST_EXPONENT * temperature).minimum(most - logits.amin(-1, keepdim=True))
    ranges = (most - logits).div_(spread / N_RANGES)
    # Where all logits are equal, 0 / 0 is not a number.
    return ranges.clamp_(max=N_RANGES - 1).nan_to_num_(0).long()


def _keys(logits: torch.Tensor) -> torch.Tensor:
    """Return numbers in the order of the logits, no two of them equal, int64 [rows, vocabulary].

    Of equal logits the first is the largest. The bits of floats are in the floats' order, those of
    negative ones in reverse.
    """
    bits = (logits + 0.0).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long().bitwise_left_shift_(TOKEN_BITS)
    last = LAST_TOKEN - logits.shape[-1]
    return keys.add_(torch.arange(LAST_TOKEN, last, -1, device=logits.device))


def _likeliest(
    logits: torch.Tensor, options: Sequence[SamplingOptions], n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mass of the n likeliest tokens, and the tokens, int64 [rows, n]."""
    keys = _keys(logits)
    if logits.device.type == "cpu":
        # This takes a third of the time of PyTorch's topk on a CPU.
        largest = np.partition(keys.numpy(), -n)[:, -n:]
        largest.sort()
        keys = torch.from_numpy(largest).flip(-1)
    else:
        keys = keys.topk(n).values
    tokens = LAST_TOKEN - (keys & LAST_TOKEN)
    likeliest = logits.gather(-1, tokens)
    return _mass(likeliest, likeliest[:, :1], options), tokens


def _widest(tensor: torch.Tensor) -> torch.dtype:
    """Return the widest floating dtype that a tensor's device has."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _mass(
    logits: torch.Tensor, most: torch.Tensor, options: Sequence[SamplingOptions]
) -> torch.Tensor:
    """Return probabilities in units of 2^-40 of the likeliest one's, int64 [rows, tokens].

    Logits are float32 [rows, tokens]; `most` has the largest of each row, float32 [rows, 1].
    """
    dtype = _widest(logits)
    temperature = on_device(logits, [sampling.temperature for sampling in options], dtype)[:, None]
    # The largest becomes 0, so a tiny temperature gives minus infinity at worst. Powers that are
    # nearly 0 take a CPU many times as long as others.
    exponents = (logits - most.to(dtype)).div_(temperature).clamp_(min=LEAST_EXPONENT)
    return exponents.exp_().mul_(UNIT).round_().long()


def _cut(
    mass: torch.Tensor, whole: torch.Tensor, options: Sequence[SamplingOptions]
) -> torch.Tensor:
    """Cut off all after the share `top_p` of the whole, and what `min_p` cuts off.

    A token stays while the mass before it is below the share. Mass is int64 [rows, candidates], the
    likeliest first, and the whole int64 [rows, 1].
    """
    share = on_device(mass, [sampling.top_p for sampling in options], _widest(mass))[:, None]
    return _likely_enough(mass.where(mass.cumsum(-1) - mass < share * whole, 0), options)


def _likely_enough(mass: torch.Tensor, options: Sequence[SamplingOptions]) -> torch.Tensor:
    """Cut off what is below `min_p` of the likeliest token, whose mass is a whole unit."""
    if not any(sampling.min_p for sampling in options):
        return mass
    least = on_device(mass, [sampling.min_p * UNIT for sampling in options], _widest(mass))[:, None]
    return mass.where(mass >= least, 0)


class _Entries:
    """Single entries of logits [rows, vocabulary], each with a number that changes it."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._rows: list[int] = []
        self._tokens: list[int] = []
        self._numbers: list[float] = []

    def add(self, row: int, tokens: Iterable[int], numbers: Iterable[float]) -> None:
        self._tokens += tokens
        self._rows += [row] * (len(self._tokens) - len(self._rows))
        self._numbers += numbers

    def change(self, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """Change the entries, [entries], by their numbers of the same shape."""
        if not self._rows:
            return
        entries = on_device(self._logits, self._rows), on_device(self._logits, self._tokens)
        numbers = on_device(self._logits, self._numbers, self._logits.dtype)
        self._logits[entries] = change(self._logits[entries], numbers)


def on_device(like: torch.Tensor, numbers: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return numbers, of any shape, as a tensor on the device of another."""
    return torch.tensor(numbers, dtype=dtype).to(like.device, non_blocking=True)
