"""What else a method changes: prompts that need no steering, plain text, longer answers.

clean                accuracy of the parametric answer on clean prompts
true_context         the same where the context tells the truth
unknown_subject      accuracy of the context answer about subjects that do not exist
perplexity           of plain text, with the method's steering on; mean over the domains' treatments
length, repetition   of answers of up to 64 tokens to conflict prompts
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from juice.data.controls import true_contexts, unknown_subjects
from juice.data.critical import perplexity
from juice.data.example import ConflictExample
from juice.evaluation.answers import Answer, ask
from juice.evaluation.methods import Treatment
from juice.evaluation.metrics import mean, repetition
from juice.evaluation.remembered import Remembered
from juice.evaluation.splits import domain_of, limited
from juice.identification.intervals import share_interval
from juice.methods import CONFLICTS, ConflictType, Target
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

    Args:
        model: The model to ask.
        examples: The test examples, of which controls are made.
        treatments: The method's treatment in each domain.
        seed: Seed of invented names.
        progress: Reports how many prompts are answered.
        remembered: Answers that need not be asked for again.
    """
    controls: tuple[
        tuple[str, Sequence[ConflictExample], tuple[ConflictType, ...], Target], ...
    ] = (
        ("clean", examples, ("clean",), "parametric"),
        ("true_context", true_contexts(examples), CONFLICTS, "parametric"),
        ("unknown_subject", unknown_subjects(examples, seed), CONFLICTS, "context"),
    )
    measured = {}
    for name, own, conflict_types, judged_by in controls:
        answers = ask(
            model,
            own,
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
    limit, plain = model.description.max_positions or math.inf, model.with_chat_template(None)
    fitting = [ids for text in texts if 1 < len(ids := plain.tokenize(text)) <= limit]
    if not fitting:
        return None
    by_domain, seen = [], dict[str, float]()
    for treatment in treatments.values():
        steering = treatment.steering(model)
        key = (
            f"{steering.report.method} "
            f"{ {layer: own.tolist() for layer, own in steering.coefficients.items()} }"
            if steering
            else ""
        )
        if key not in seen:
            requests = [model.request(ids, max_tokens=0, prompt_logprobs=True) for ids in fitting]
            requests = [r.with_steering(steering) for r in requests] if steering else requests
            completions = model.engine.generate(requests)
            seen[key] = perplexity(
                [t.logprob for c in completions for t in c.prompt_tokens if t.logprob is not None]
            )
        by_domain.append(seen[key])
    return mean(by_domain)


def continuations(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    treatments: Mapping[str, Treatment],
    seed: int,
    progress: Progress,
) -> dict[str, Any]:
    """Return how long answers to conflict prompts are, how many end, and how much they repeat.

    Answers have up to 64 tokens; the result is {n, mean_tokens, ended, repetition}.

    Args:
        model: The model to ask.
        examples: The test examples, of which up to 60 are used.
        treatments: The method's treatment in each domain.
        seed: Seed of the choice of examples.
        progress: Reports how many prompts are answered.
    """
    requests = []
    for example in limited(examples, N_CONTINUED, seed):
        for conflict_type in CONFLICTS:
            treatment = treatments[domain_of(example)]
            if conflict_type in example.prompts and treatment.applies(example):
                request = treatment.request(model, example, conflict_type, max_tokens=N_NEW_TOKENS)
                requests += [request] if model.engine.fits(request) else []
    completions = model.engine.generate(
        requests, progress=progress, description="continuing answers"
    )
    return {
        "n": len(completions),
        "mean_tokens": mean([float(len(c.token_ids)) for c in completions]),
        "ended": mean([float(c.finish_reason == "stop") for c in completions]),
        "repetition": mean([repetition(c.token_ids) for c in completions]),
    }
