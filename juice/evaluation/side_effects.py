"""The side effects of a method: on prompts that need no steering, plain text, longer answers.

Prompts that need none are clean ones, those whose context tells the truth, those whose context is
about another subject, true or not, and those about subjects that do not exist, where the context is
all there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from juice.data.critical import perplexity
from juice.data.example import (
    ConflictExample,
    irrelevant_contexts,
    true_contexts,
    unknown_subjects,
)
from juice.evaluation.answers import (
    Answer,
    Remembered,
    ask,
    mean,
    repetition,
    request_for,
    signature,
)
from juice.evaluation.methods import Treatment
from juice.evaluation.splits import limited
from juice.formula import CONFLICTS, ConflictType, Target
from juice.identification.outcomes import share_interval
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

N_CONTINUED = 60
N_NEW_TOKENS = 64


def collateral(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    treatments: Mapping[str, Treatment],
    seed: int,
    progress: Progress = silent,
    *,
    remembered: Remembered | None = None,
) -> dict[str, Any]:
    """Return accuracy with its interval and number of prompts, by control and conflict type.

    Controls are made of the examples; `seed` draws invented names.
    """
    truth = true_contexts(examples)
    controls: Sequence[tuple[str, Sequence[ConflictExample], Sequence[ConflictType], Target]] = (
        ("clean", examples, ("clean",), "parametric"),
        ("true_context", truth, CONFLICTS, "parametric"),
        ("irrelevant_context", irrelevant_contexts(examples), CONFLICTS, "parametric"),
        ("irrelevant_truth", irrelevant_contexts(truth), CONFLICTS, "parametric"),
        ("unknown_subject", unknown_subjects(examples, seed), CONFLICTS, "context"),
    )
    measured = {}
    for name, facts, conflict_types, judged_by in controls:
        answers = ask(
            model,
            facts,
            conflict_types,
            treatments,
            judged_by,
            remembered=remembered,
            progress=progress,
            description=f"asking, {name.replace('_', ' ')}",
        )
        measured[name] = {t: _share(rows) for t, rows in answers.items() if any(rows)}
    return measured


def _share(answers: Sequence[Answer | None]) -> dict[str, Any]:
    right = [float(a.is_correct) for a in answers if a is not None]
    return {"n": len(right), "accuracy": mean(right), "interval": share_interval(right)}


def plain_text_perplexity(
    model: SteeredModel, texts: Sequence[str], treatments: Mapping[str, Treatment]
) -> float | None:
    """Return the perplexity of plain text under a method's steering; None where no text fits.

    It is the mean over the domains' treatments.
    """
    plain = model.with_chat_template(None)
    scored = [
        model.request(ids, max_tokens=0, prompt_logprobs=True)
        for text in texts
        if len(ids := plain.tokenize(text)) > 1
    ]
    fitting = [request for request in scored if model.engine.fits(request)]
    if not fitting:
        return None
    seen: dict[str, float] = {}
    by_domain = []
    for treatment in treatments.values():
        steering = model.resolve(treatment.steer)
        if (key := signature(steering)) not in seen:
            requests = [request.with_steering(steering) for request in fitting]
            tokens = [t for c in model.engine.generate(requests) for t in c.prompt_tokens]
            seen[key] = perplexity([t.logprob for t in tokens if t.logprob is not None])
        by_domain.append(seen[key])
    return mean(by_domain)


def continuations(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    treatments: Mapping[str, Treatment],
    seed: int,
    progress: Progress,
) -> dict[str, Any]:
    """Return the length, the share that end, and the repetition of answers to conflict prompts.

    Answers have up to 64 tokens, to the prompts of up to 60 examples, which `seed` chooses. The
    result is {n, mean_tokens, ended, repetition}.
    """
    requests = [
        request
        for e in limited(examples, N_CONTINUED, seed)
        for t in CONFLICTS
        if (request := request_for(model, e, t, treatments, max_tokens=N_NEW_TOKENS)) is not None
    ]
    completions = model.engine.generate(
        requests, progress=progress, description="continuing answers"
    )
    return {
        "n": len(completions),
        "mean_tokens": mean([float(len(c.token_ids)) for c in completions]),
        "ended": mean([float(c.finish_reason == "stop") for c in completions]),
        "repetition": mean([repetition(c.token_ids) for c in completions]),
    }
