"""Head sets whose heads have learned betas of their own."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from juice.data.example import ConflictExample
from juice.head_set import BetaTable, HeadScores, HeadSet
from juice.identification.learning import heads_of, learn
from juice.identification.options import IdentificationOptions
from juice.identification.protection import DEFAULT, Protection
from juice.identification.provenance import provenance
from juice.identification.tuning import N_READ
from juice.identification.unfinished import Unfinished
from juice.methods import Method, Target
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel


def learn_set(
    model: SteeredModel,
    drawn: Sequence[ConflictExample],
    target: Target,
    options: IdentificationOptions,
    *,
    name: str,
    held_out: Sequence[ConflictExample] = (),
    methods: Sequence[Method] = ("juice",),
    protection: Protection = DEFAULT,
    progress: Progress = silent,
    unfinished: Unfinished | None = None,
) -> HeadSet:
    """Learn a head set toward a target.

    Args:
        model: The model.
        drawn: The examples to learn from, which all have the same conflict types.
        target: The target.
        options: How heads are looked for.
        name: The head set's name.
        held_out: Examples to choose the best coefficients on; without any, a quarter of those
            drawn is held out.
        methods: The methods to learn betas for; the first one chooses the heads.
        protection: What steering should leave alone.
        progress: Reports how many steps are done.
        unfinished: Keeps what is learned, and goes on from there.

    Raises:
        NoConsistentHeadError: No head keeps a coefficient.
        UnsupportedModelError: Gradients do not pass through the model.
    """
    own = list(drawn)
    if not held_out:
        own = Random(options.seed).sample(own, len(own))
        n = max(1, len(own) // 4)
        own, held_out = own[n:] or own, own[:n]
    else:
        held_out = Random(options.seed).sample(held_out, min(N_READ, len(held_out)))
    heads, table, found = None, {}, torch.empty(0)
    for method in methods:
        coefficients = learn(
            model,
            target,
            own,
            held_out,
            among=heads,
            method=method,
            penalty=options.penalty,
            protection=protection,
            seed=options.seed,
            progress=progress,
            unfinished=unfinished,
        )
        if heads is None:
            found = coefficients
        heads, table[method] = heads_of(coefficients, heads)
    assert heads is not None, "there is at least one method"
    origin = provenance(model, drawn, target, options, top_k=None)
    # The coefficients are one table for all conflict types.
    tables = found.repeat(len(origin.conflict_types), 1, 1)
    scores = HeadScores(
        target=target,
        conflict_types=origin.conflict_types,
        plus=tables.clamp(min=0),
        minus=(-tables).clamp(min=0),
        kind="learned",
    )
    return HeadSet(
        name=name,
        target=target,
        model=model.description.identity,
        heads=heads,
        beta=BetaTable(**table),
        identification=origin,
        scores=scores,
        scores_sha256=scores.sha256(),
    )
