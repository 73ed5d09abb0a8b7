"""The harm of head sets to prose, in chunks of 512 tokens, each with the tokens that begin a text.

    divergence   KL(unsteered || steered) of the next token in nats, the mean over all positions
    perplexity   steered, divided by unsteered

at all positions and without a gate (juice.identification.ordinary). Chunks are read one by one, so
that no more than the logits of one are held; the interval is the normal one of their mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

from integration.real.answers import Row, Way
from juice.engine.steer import Steer
from juice.errors import UsageError
from juice.head_set.schema import HARM_STRENGTHS, Harm
from juice.identification.ordinary import OrdinaryText
from juice.identification.outcomes import Z
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

N_TOKENS = 20_000
CHUNK = 512


def chunks_of(model: SteeredModel, text: str, n_tokens: int = N_TOKENS) -> list[tuple[int, ...]]:
    """Return whole chunks of a text's first tokens, at least so many, or what there is.

    Raises UsageError for a text that fills no chunk.
    """
    plain = model.with_chat_template(None)
    ids = plain.tokenize(text, add_special_tokens=False)
    whole = plain.tokenize(text)
    begin = whole[: whole.index(ids[0])]  # such as a BOS token; some tokenizers have none
    size = min(CHUNK, model.description.max_positions or CHUNK) - len(begin)
    n_chunks = min(math.ceil(n_tokens / size), len(ids) // size)
    if n_chunks < 1:
        raise UsageError(f"the prose has {len(ids)} tokens; expected at least {size}")
    return [(*begin, *ids[i * size : (i + 1) * size]) for i in range(n_chunks)]


def harm(
    model: SteeredModel,
    chunks: Sequence[tuple[int, ...]],
    ways: Sequence[Way],
    strengths: Sequence[float] = HARM_STRENGTHS,
    progress: Progress = silent,
) -> Iterator[Row]:
    """Yield a row for each way and strength."""
    for way in ways:
        steerings = [model.resolve(Steer.of(way.steer, strength=s)) for s in strengths]
        method = steerings[0].report.method
        assert method in ("juice", "june")
        by_chunk: list[list[Harm]] = []
        with progress(f"reading prose, {way.name}", len(chunks)) as advance:
            for chunk in chunks:
                by_chunk.append(
                    OrdinaryText(model.loaded, [chunk], method).harm(steerings, silent, "")
                )
                advance(1)
        for strength, found in zip(strengths, zip(*by_chunk, strict=True), strict=True):
            yield _row(way, strength, found, sum(map(len, chunks)))


def _row(way: Way, strength: float, found: Sequence[Harm], n_tokens: int) -> Row:
    values = [one.divergence for one in found]
    mean = fmean(values)
    half = Z * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {
        "part": way.steer.target,
        "measure": "harm to prose",
        "way": way.name,
        "strength": strength,
        "n": len(found),
        "n_tokens": n_tokens,
        "divergence": mean,
        "interval": None if math.isnan(half) else (max(0.0, mean - half), mean + half),
        "perplexity": math.exp(fmean(math.log(one.perplexity) for one in found)),
    }
