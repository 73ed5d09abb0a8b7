"""Which fine-tuning rows need their context: those whose answer surprises the model when the context is taken away.

    perplexity = exp(-mean log p(answer token | question, the answer's tokens before it)), without the context

The share of the rows with the lowest perplexity, 25 % in the paper, is not context-critical: the model can answer them from
memory, and training on them teaches it to disregard contexts. Source: "Context-Parametric Inversion", section 3.4, which
fine-tunes on the others. There the question stands in a chat template; here it stands as it is, with the answer after a space.

Rows that cannot be measured, and so are not of the share, are marked false with no perplexity: those without a context, for
which there is nothing to disregard, those without a question or an answer, and those too long for the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from juice.asking import ask_all, fits
from juice.engine import Completion, GenerationRequest
from juice.errors import ExampleError, UsageError
from juice.preparation.fields import columns_of, text_of, texts_of
from juice.progress import Progress, silent
from juice.readers.rows import Row
from juice.scoring import perplexity
from juice.steered_model import SteeredModel

FIELDS = {"question": ("question", "instruction"), "context": ("context", "input"), "answer": ("answer", "answers", "output")}
REASONS = {
    "without_context": "have no context",
    "malformed": "lack a question or an answer",
    "too_long": "are too long for the model",
}
SHARE = 0.25


@dataclass(frozen=True)
class Marked:
    """Every row with `perplexity_without_context` and `context_critical`, and how many could not be measured, and why."""

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
    """Raise UsageError for a share that cannot be taken."""
    if not 0 < share < 1:
        raise UsageError(f"the share is {share}; expected a number between 0 and 1 (the paper takes {SHARE})")


def mark_critical(
    model: SteeredModel,
    rows: Sequence[Row],
    *,
    share: float = SHARE,
    columns: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> Marked:
    """Mark the rows by whether they need their context; of n that are measured, floor(share * n) do not.

    Raises UsageError for a share or a field that there is not, ExampleError when no row can be measured.
    """
    check_share(share)
    column = columns_of(rows, FIELDS, tuple(FIELDS), columns or {})
    unmeasured: Counter[str] = Counter()
    measured: dict[int, tuple[GenerationRequest, int]] = {}
    for i, row in enumerate(rows):
        request = _request(model, {field: row.values.get(name) for field, name in column.items()})
        if isinstance(request, str):
            unmeasured[request] += 1
        else:
            measured[i] = request
    if not measured:
        reasons = "; ".join(f"{n} {REASONS[reason]}" for reason, n in unmeasured.items())
        raise ExampleError(f"none of {len(rows)} rows can be measured: {reasons}; expected a question, a context and an answer in each")
    completions = ask_all(model, [request for request, _ in measured.values()], "measuring without contexts", progress)
    perplexities = {i: answer_perplexity(c, start) for (i, (_, start)), c in zip(measured.items(), completions, strict=True)}
    n_low = math.floor(share * len(measured) + 1e-9)  # 0.29 of 100 is 29, in floats as well
    low = set(sorted(perplexities, key=perplexities.__getitem__)[:n_low])
    marked = [
        {**row.values, "perplexity_without_context": perplexities.get(i), "context_critical": i in measured and i not in low}
        for i, row in enumerate(rows)
    ]
    return Marked(marked, {reason: unmeasured[reason] for reason in REASONS})


def answer_perplexity(completion: Completion, start: int) -> float:
    """Return the perplexity of the prompt's tokens from `start` on."""
    return perplexity([token.logprob for token in completion.prompt_tokens[start:] if token.logprob is not None])


def _request(model: SteeredModel, values: Mapping[str, object]) -> tuple[GenerationRequest, int] | str:
    """Return the request that scores a row's answer and where the answer begins in it, or why there is none."""
    question, answers = text_of(values["question"]), texts_of(values["answer"])
    if question is None or not answers:
        return "malformed"
    if text_of(values["context"]) is None:
        return "without_context"
    ids, start = model.loaded.prompts.joined(question, answers[0])
    start = max(1, start)  # a first token has no log-probability
    if start >= len(ids):
        return "malformed"
    request = model.request(ids, max_tokens=0, prompt_logprobs=True)
    return (request, start) if fits(model, request) else "too_long"
