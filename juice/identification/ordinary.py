"""Ordinary text, and the harm that steering does to it, where there is nothing to steer.

    divergence   KL(unsteered || steered) of the next token in nats, the mean over all positions
    perplexity   steered, divided by unsteered

at all positions and without a gate (docs/method.md, "Harm"). The text is ours: prose, dialogue,
code, and lists (`text/`). Of every kind some pieces are held out: harm is measured on these, and
coefficients are learned on the others, which also tell beforehand what a small change will do
(`responses`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from juice.engine.steer import Steering
from juice.errors import JuiceError
from juice.head_set.schema import Harm
from juice.identification.attribution import (
    FP16_SCALE,
    DualRun,
    backward,
    differentiable,
    micro_batches,
)
from juice.identification.first_tokens import may_keep, method_of, table_of
from juice.model.definition import most_places
from juice.model.loaded import LoadedModel
from juice.progress import Progress
from juice.steered_model import SteeredModel

TEXT = Path(__file__).parent / "text"
KINDS = ("prose", "dialogue", "code", "lists")
BETWEEN = "\n----\n"
N_TOKENS = 512  # of a piece: where more has been read, text diverges more
N_LEAST = 16
N_PLACES = 128  # of a piece, where its logits at all places would cost as much as its layers
HELD_OUT_EVERY = 5
# The pieces that tell what a change will do, and the tokens of each.
N_RESPONSES, N_RESPONSE_TOKENS = 128, 32
MOST_TIMES = 3.0  # the median length of a response: longer ones are few, and would decide alone
MOST_AT_A_TIME = 4_000_000  # logits, in what is computed of them: 16 MB
MOST_NATS = 50.0  # a token, also where activations overflow


class Pieces(NamedTuple):
    """The tokens of pieces of ordinary text, of all kinds in turn."""

    learned_from: list[tuple[int, ...]]
    held_out: list[tuple[int, ...]]


def ordinary_pieces(model: SteeredModel, n_tokens: int = N_TOKENS) -> Pieces:
    """Return the pieces as a model reads them, whatever form its prompts take.

    Passages of a kind follow each other in a piece. Each piece begins with the special tokens with
    which the tokenizer begins a text, if with any.
    """
    plain, limit = model.with_chat_template(None), model.description.max_positions or n_tokens
    length, special = min(n_tokens, limit), plain.prompts.encode("")
    found = Pieces([], [])
    for kind in KINDS:
        passages = (TEXT / f"{kind}.txt").read_text(encoding="utf-8").strip().split(BETWEEN)
        learned_from = [one for i, one in enumerate(passages) if i % HELD_OUT_EVERY]
        for kept, some in zip(found, (learned_from, passages[::HELD_OUT_EVERY]), strict=True):
            ids = plain.tokenize("\n\n".join(some))
            start = special if ids[: len(special)] == special else ()
            step = max(1, length - len(start))
            pieces = (start + ids[at : at + step] for at in range(len(start), len(ids), step))
            kept += [piece for piece in pieces if len(piece) >= min(N_LEAST, limit)]
    return found


Places = Callable[[Sequence[int]], Sequence[int]]


def every_place(piece: Sequence[int]) -> Sequence[int]:
    """Return all positions of a piece."""
    return range(len(piece))


def its_end(piece: Sequence[int]) -> Sequence[int]:
    """Return the last position of a piece."""
    return (len(piece) - 1,)


def some_places(piece: Sequence[int], rng: Random | None = None) -> Sequence[int]:
    """Return N_PLACES of a long piece's positions, or all of a shorter one's."""
    every = range(len(piece))
    return every if len(piece) <= N_PLACES else (rng or Random(0)).sample(every, N_PLACES)


class OrdinaryText:
    """Pieces of ordinary text that are read under ways of steering.

    Args:
        loaded: The model.
        pieces: The tokens of each piece.
        places: Gives the positions of a piece at which it is read: of prompts their ends, where
            nothing that follows surprises.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pieces: Sequence[tuple[int, ...]],
        places: Places = every_place,
    ) -> None:
        self._loaded = loaded
        self._readings = [_Reading(loaded, some, places) for some in _batches(loaded, pieces)]
        is_small = sum(reading.n_places for reading in self._readings) <= most_places(loaded)
        self._keeps = is_small and may_keep(loaded, sum(map(len, pieces)))

    def harm(
        self, steerings: Sequence[Steering], progress: Progress, description: str
    ) -> list[Harm]:
        """Return the harm of each way of steering."""
        totals = torch.zeros(len(steerings), 2, dtype=torch.float64)  # divergence, surprise

        def add(i: int, reading: _Reading, clean: torch.Tensor, steered: torch.Tensor) -> None:
            targets, follows = reading.next_tokens
            of_targets = [logp.gather(1, targets[:, None]) for logp in (clean, steered)]
            surprise = (of_targets[0] - of_targets[1])[:, 0][follows]
            totals[i, 0] += float(divergence(clean, steered).sum())
            totals[i, 1] += float(surprise.sum())

        self._read(steerings, add, progress, description)
        n_read = sum(reading.n_places for reading in self._readings)
        n_followed = sum(int(reading.next_tokens[1].sum()) for reading in self._readings)
        means = totals / torch.tensor([max(1, n_read), max(1, n_followed)])
        means = means.nan_to_num(nan=MOST_NATS).clamp(max=MOST_NATS)
        return [
            Harm(divergence=max(0.0, nats), perplexity=math.exp(surprise))
            for nats, surprise in means.tolist()
        ]

    def kept(
        self, steerings: Sequence[Steering], progress: Progress, description: str
    ) -> list[list[float]]:
        """Return 1 for each place whose likeliest token stays under a way of steering, else 0."""
        found: list[list[float]] = [[] for _ in steerings]

        def add(i: int, _: _Reading, clean: torch.Tensor, steered: torch.Tensor) -> None:
            found[i] += (clean.argmax(-1) == steered.argmax(-1)).float().tolist()

        self._read(steerings, add, progress, description)
        return found

    def _read(
        self, steerings: Sequence[Steering], add: _Add, progress: Progress, description: str
    ) -> None:
        """Read every piece under each way of steering, and add what is read."""
        device = self._loaded.device
        ways = [(table_of(self._loaded, one).to(device), method_of(one)) for one in steerings]
        is_added = any(method == "juice" and table.any() for table, method in ways)
        with torch.inference_mode(), progress(description, len(self._readings)) as advance:
            for reading in self._readings:
                with self._loaded.turn:
                    clean = reading.clean(is_added)
                    for i, (table, method) in enumerate(ways):
                        with reading.run.steered(table, method):
                            steered = reading.run.logits().log_softmax(-1)
                        add(i, reading, clean, steered)
                    if not self._keeps:
                        reading.forget()
                advance(1)


class _Reading:
    """Pieces that are read together, with what the clean run says of them once it has run."""

    def __init__(
        self, loaded: LoadedModel, pieces: Sequence[tuple[int, ...]], places: Places
    ) -> None:
        read_at = [*map(places, pieces)]
        self.n_places = sum(map(len, read_at))
        self.run = DualRun(loaded, pieces, read_at)
        self.next_tokens = _next_tokens(pieces, read_at, loaded.device)
        self._clean: torch.Tensor | None = None

    def clean(self, is_added: bool) -> torch.Tensor:
        """Return the log-probabilities of the clean run, whose z is kept where it is added."""
        if self._clean is None or (is_added and not self.run.is_recorded):
            logits = self.run.record() if is_added else self.run.logits()
            self._clean = logits.log_softmax(-1)
        return self._clean

    def forget(self) -> None:
        self._clean = None
        self.run.forget()


# Adds a way's log-probabilities, unsteered and steered, float32 [places, vocabulary], to a result.
_Add = Callable[[int, _Reading, torch.Tensor, torch.Tensor], None]


def responses(
    model: SteeredModel, progress: Progress, left_open: Sequence[tuple[int, ...]] = ()
) -> torch.Tensor:
    """Return how ordinary text responds to each head, float32 [pieces, n_layers, n_heads].

    A response is the derivative, at zero coefficients, of the log-probability of tokens that the
    model draws at all places of a piece, over the root of their number. The mean of the responses'
    outer products is the Fisher information F of a token: small coefficients c make text diverge by
    about c F c / 2, in one run as in two, whose derivatives at zero are the same.

    Args:
        model: The model.
        progress: Reports how many pieces are read.
        left_open: Prompts that leave open what is said. As many of them as of pieces, at most, are
            pieces as well, at whose ends alone a token is drawn.

    Raises:
        JuiceError: Activations overflow.
    """
    pieces = ordinary_pieces(model, N_RESPONSE_TOKENS).learned_from
    n = min(N_RESPONSES, len(pieces))
    kinds: list[tuple[list[tuple[int, ...]], Places]] = [
        (Random(0).sample(some, min(n, len(some))), places)
        for some, places in ((pieces, every_place), (left_open, its_end))
    ]
    batches = [(b, places) for some, places in kinds for b in _batches(model.loaded, some)]
    loaded, generator = model.loaded, torch.Generator().manual_seed(0)
    scale = FP16_SCALE if loaded.dtype == torch.float16 else 1.0
    found: list[torch.Tensor] = []
    n_pieces = sum(len(some) for some, _ in kinds)
    with differentiable(loaded), progress("reading ordinary text", n_pieces) as advance:
        for batch, places in batches:
            read_at = [*map(places, batch)]
            run = DualRun(loaded, batch, read_at)
            shape = (len(batch), loaded.layout.n_layers, loaded.layout.n_heads)
            rows = torch.zeros(shape, device=loaded.device, requires_grad=True)
            with loaded.turn, run.steered(rows, "june"):
                told = run.logits().log_softmax(-1)
                if told.isnan().any():
                    raise JuiceError(
                        "the model's activations overflow on ordinary text; load it with --dtype "
                        "float32"
                    )
                drawn = torch.multinomial(told.detach().exp().cpu(), 1, generator=generator)
                backward(loaded, told.gather(1, drawn.to(loaded.device)).sum() * scale)
            assert rows.grad is not None
            roots = torch.tensor([*map(len, read_at)]).sqrt()[:, None, None]
            found.append(rows.grad.cpu() / (scale * roots))
            advance(len(batch))
    every = torch.cat(found)
    lengths = every.flatten(1).norm(dim=1).clamp(min=1e-12)[:, None, None]
    shares: torch.Tensor = (MOST_TIMES * lengths.median() / lengths).clamp(max=1.0)
    return every * shares


def expected_divergence(responses: torch.Tensor, coefficients: torch.Tensor) -> float:
    """Return how far small coefficients make ordinary text diverge, in nats a token: c F c / 2.

    Args:
        responses: What `responses` returned, [pieces, n_layers, n_heads].
        coefficients: Those of all heads, float32 [n_layers, n_heads].
    """
    return float((responses * coefficients).sum((1, 2)).square().mean() / 2)


class _Divergence(torch.autograd.Function):
    """Vocabularies are large, so a few places are computed at a time, and nothing of them kept."""

    @staticmethod
    def forward(ctx: Any, unsteered: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(unsteered, logits)
        nats = logits.new_empty(len(logits))
        for some in _few(logits):
            clean, steered = unsteered[some], logits[some].log_softmax(-1)
            of_tokens = (clean.exp() * (clean - steered)).where(clean != -torch.inf, 0.0)
            nats[some] = of_tokens.sum(-1)
        return nats

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[None, torch.Tensor]:
        unsteered, logits = ctx.saved_tensors
        by_logit = torch.empty_like(logits)
        for some in _few(logits):
            difference = logits[some].softmax(-1) - unsteered[some].exp()
            torch.mul(difference, slopes[0][some, None], out=by_logit[some])
        return None, by_logit


def divergence(unsteered: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return KL(unsteered || steered) at each place, in nats, float32 [places].

    A token that cannot come counts nothing.

    Args:
        unsteered: Log-probabilities, float32 [places, vocabulary].
        logits: The steered ones, or their log-probabilities, by which it can be differentiated.
    """
    found: torch.Tensor = _Divergence.apply(unsteered, logits)  # type: ignore[no-untyped-call]
    return found


def _few(logits: torch.Tensor) -> Iterator[slice]:
    """Yield the places whose logits are computed at a time."""
    n = max(1, MOST_AT_A_TIME // logits.shape[-1])
    yield from (slice(at, at + n) for at in range(0, len(logits), n))


def _batches(loaded: LoadedModel, pieces: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Return the pieces that are read together, of similar lengths."""
    lengths = [*map(len, pieces)]
    groups = micro_batches(lengths, loaded.rope_switch, most_places(loaded))
    return [[pieces[i] for i in group] for group in groups]


def _next_tokens(
    pieces: Sequence[tuple[int, ...]], read_at: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token that follows each place, and whether one does; int64 and bool [places]."""
    places = [(piece, at) for piece, some in zip(pieces, read_at, strict=True) for at in some]
    targets = [(*piece, 0)[at + 1] for piece, at in places]
    follows = [at + 1 < len(piece) for piece, at in places]
    return torch.tensor(targets, device=device), torch.tensor(follows, device=device)
