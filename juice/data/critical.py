"""Fine-tuning rows that need their context: those with an answer that the model cannot guess.

    perplexity = exp(-mean log p(answer token | question, the answer's tokens before it)), without
    the context

The share of rows with the lowest perplexity, 25 % in the paper, is not context-critical: the model
can answer them from memory, and training on them teaches it to disregard contexts. Source:
"Context-Parametric Inversion", section 3.4, which fine-tunes on the others. There the question goes
through a chat template; here it is plain, with the answer after a space.

Rows that cannot be measured (CRITICAL_REASONS) do not count toward the share and are marked false,
with no perplexity; without a context there is nothing to disregard.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from juice.data.make import AskedModel
from juice.data.readers.rows import Row, columns_of, text_of, texts_of
from juice.errors import ExampleError, UsageError
from juice.progress import Progress, silent

CRITICAL_FIELDS = {
    "question": ("question", "instruction"),
    "context": ("context", "input"),
    "answer": ("answer", "answers", "output"),
}
CRITICAL_REASONS = {
    "without_context": "have no context",
    "malformed": "lack a question or an answer",
    "too_long": "are too long for the model",
}
SHARE = 0.25
LARGEST_LOG = 700.0  # exp of more overflows a float


@dataclass(frozen=True)
class Marked:
    """Every row with `perplexity_without_context` and `context_critical`.

    `unmeasured` counts the rows that could not be measured, by reason.
    """

    rows: list[dict[str, Any]]
    unmeasured: dict[str, int]

    @property
    def critical(self) -> list[dict[str, Any]]:
        """The rows that need their context."""
        return [row for row in self.rows if row["context_critical"]]

    @property
    def threshold(self) -> float | None:
        """The lowest perplexity of a row that needs its context."""
        return min((row["perplexity_without_context"] for row in self.critical), default=None)


def check_share(share: float) -> None:
    """Raise UsageError for a share that is not between 0 and 1."""
    if not 0 < share < 1:
        raise UsageError(
            f"the share is {share}; expected a number between 0 and 1 (the paper takes {SHARE})"
        )


def mark_critical(
    model: AskedModel,
    rows: Sequence[Row],
    *,
    share: float = SHARE,
    columns: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> Marked:
    """Mark the rows by whether they need their context; of n measured, floor(share * n) do not.

    `columns` has the columns of fields whose names differ, by field. Raises UsageError for an
    invalid share or an unknown field, and ExampleError for missing columns or when no row can be
    measured.
    """
    check_share(share)
    column = columns_of(rows, CRITICAL_FIELDS, tuple(CRITICAL_FIELDS), columns or {})
    unmeasured, perplexities = Counter[str](), dict[int, float]()
    pairs: dict[int, tuple[str, str]] = {}
    for i, row in enumerate(rows):
        pair = _pair({field: row.values.get(name) for field, name in column.items()})
        if isinstance(pair, str):
            unmeasured[pair] += 1
        else:
            pairs[i] = pair
    scored = model.answer_logprobs(list(pairs.values()), progress=progress)
    for i, logprobs in zip(pairs, scored, strict=True):
        if logprobs:
            perplexities[i] = perplexity(logprobs)
        else:
            unmeasured["too_long" if logprobs is None else "malformed"] += 1
    if not perplexities:
        reasons = "; ".join(f"{n} {CRITICAL_REASONS[reason]}" for reason, n in unmeasured.items())
        raise ExampleError(
            f"none of {len(rows)} rows can be measured: {reasons}; "
            "expected a question, a context and an answer in each"
        )
    n_low = math.floor(share * len(perplexities) + 1e-9)  # 0.29 of 100 is 29, also in floats
    low = set(sorted(perplexities, key=perplexities.__getitem__)[:n_low])
    marked = [
        {
            **row.values,
            "perplexity_without_context": perplexities.get(i),
            "context_critical": i in perplexities and i not in low,
        }
        for i, row in enumerate(rows)
    ]
    return Marked(marked, {reason: unmeasured[reason] for reason in CRITICAL_REASONS})


def perplexity(logprobs: Sequence[float]) -> float:
    """Return the perplexity of natural log-probabilities; raises ValueError for none."""
    if not logprobs:
        raise ValueError("perplexity of no tokens")
    return math.exp(min(LARGEST_LOG, -sum(logprobs) / len(logprobs)))


def _pair(values: Mapping[str, object]) -> tuple[str, str] | str:
    """Return a row's question and answer, or the reason why it cannot be measured."""
    question, answers = text_of(values["question"]), texts_of(values["answer"])
    if question is None or not answers:
        return "malformed"
    return "without_context" if text_of(values["context"]) is None else (question, answers[0])
