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
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import HARM_STRENGTHS, Harm
from juice.identification.ordinary import OrdinaryText
from juice.identification.outcomes import Z
from juice.identification.task import Unfinished
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

MEASURE = "harm to prose"
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
    kept: Unfinished | None = None,
) -> Iterator[Row]:
    """Yield a row for each way and strength; what is kept of a chunk is not read again."""
    kept = kept or Unfinished()
    for way in ways:
        steerings = [model.resolve(Steer.of(way.steer, strength=s)) for s in strengths]
        method, head_set = steerings[0].report.method, way.steer.head_set
        assert method in ("juice", "june")
        assert isinstance(head_set, HeadSet), "ways_of gives each way its head set"
        by_chunk: list[list[Harm]] = []
        with progress(f"reading prose, {way.name}", len(chunks)) as advance:
            for chunk in chunks:
                key = str((head_set.seal, method, tuple(strengths), chunk))
                if (found := kept.get(key)) is None:
                    text = OrdinaryText(model.loaded, [chunk])
                    found = [one.model_dump() for one in text.harm(steerings, silent, "")]
                    kept.put(key, found)
                by_chunk.append([Harm.model_validate(one) for one in found])
                advance(1)
        for strength, found in zip(strengths, zip(*by_chunk, strict=True), strict=True):
            yield _row(way, strength, found, sum(map(len, chunks)))


def _row(way: Way, strength: float, found: Sequence[Harm], n_tokens: int) -> Row:
    values = [one.divergence for one in found]
    mean = fmean(values)
    half = Z * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {
        "part": way.steer.target,
        "measure": MEASURE,
        "way": way.name,
        "strength": strength,
        "n": len(found),
        "n_tokens": n_tokens,
        "divergence": mean,
        "interval": None if math.isnan(half) else (max(0.0, mean - half), mean + half),
        "perplexity": math.exp(fmean(math.log(one.perplexity) for one in found)),
    }
