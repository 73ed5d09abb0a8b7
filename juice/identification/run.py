"""From examples to head sets: draw, score, select; `tuning` takes the best one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from juice.data.example import ConflictExample
from juice.data.readers import Examples, read_examples
from juice.engine import Capability
from juice.errors import JuiceError, NoConsistentHeadError, UsageError
from juice.head_set import HeadScores, HeadSet
from juice.head_set.schema import NAME_PATTERN
from juice.head_set.scores import ScoreKind
from juice.identification.attribution import attribute_heads
from juice.identification.drawing import check_conflicts, usable_examples
from juice.identification.form import in_form_of_examples
from juice.identification.learned_sets import learn_set
from juice.identification.options import ALPHAS_MINUS, ALPHAS_PLUS, IdentificationOptions
from juice.identification.probing import score_heads
from juice.identification.provenance import provenance
from juice.identification.selection import chosen_heads
from juice.identification.unfinished import Unfinished
from juice.methods import ConflictType, Target
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel


def identify(
    model: SteeredModel,
    examples: Examples,
    *,
    target: Target,
    name: str | None = None,
    method: ScoreKind = "attribution",
    n_examples: int | None = None,
    top_k: int = 5,
    seed: int = 0,
    alphas_plus: Sequence[float] = ALPHAS_PLUS,
    alphas_minus: Sequence[float] = ALPHAS_MINUS,
    relation: str | None = None,
    chat_template: str | Path | None = None,
    progress: Progress = silent,
) -> HeadSet:
    """Find the heads that push toward a target (docs/method.md, "Stage 1").

    Args:
        model: The model, on an engine that gives access to its activations.
        examples: Facts that the model knows, each with a wrong answer: examples, rows, a data set
            of `datasets`, or what `juice.read_examples` takes.
        target: `parametric` or `context`.
        name: The head set's name; None: the target.
        method: `attribution`, by gradients; `learned`, with a beta for each head; `probe`, the
            paper's way.
        n_examples: How many of the examples are drawn; None: 16, at most half of what there is, or
            the paper's 4 for probes.
        top_k: Heads of each sign: 5 up to about 3B parameters, 10 above.
        seed: Seed of the draw.
        alphas_plus: Probing scales of the + heads, above 0; the grid of the paper's authors.
        alphas_minus: Probing scales of the - heads, below 0.
        relation: Draw examples of this relation only.
        chat_template: Make every prompt a user's message in a chat, where answers begin the
            assistant's turn: `default` for the tokenizer's own template, a file, or a template's
            text; `none` for plain prompts; None: as the examples were made.
        progress: Reports how much is scored.

    Returns:
        The head set with its scores. Learned heads have betas; the others do not: `juice.tune` sets
        them.

    Raises:
        ExampleError: Too few examples can be used.
        NoConsistentHeadError: No head of either sign helps under every conflict type.
        UsageError: An option is out of range, or there is no such template.
        UnsupportedModelError: Gradients do not pass through the model.
        MissingCapabilityError: The engine does not give access to activations.
    """
    model.engine.require(Capability.ACTIVATIONS)
    if chat_template is not None:
        model = model.with_chat_template(None if chat_template == "none" else chat_template)
    pool = read_examples(examples, split="identification")
    model = in_form_of_examples(model, pool, is_chosen=chat_template is not None)
    options = IdentificationOptions(
        method=method,
        n_examples=n_examples,
        top_k=top_k,
        seed=seed,
        alphas_plus=tuple(alphas_plus),
        alphas_minus=tuple(alphas_minus),
        relation=relation,
    )
    drawn, _ = usable_examples(model, pool, options)
    if method == "learned":
        check_name(name or target)
        check_conflicts(drawn, target)
        return learn_set(model, drawn, target, options, name=name or target, progress=progress)
    found = identify_targets(
        model, drawn, [target], options, names={target: name or target}, progress=progress
    )
    return found[target][0]


def identify_targets(
    model: SteeredModel,
    drawn: Sequence[ConflictExample],
    targets: Sequence[Target],
    options: IdentificationOptions,
    *,
    names: dict[Target, str],
    progress: Progress = silent,
    unfinished: Unfinished | None = None,
) -> dict[Target, list[HeadSet]]:
    """Find head sets for several targets from the same drawn examples, scoring them once.

    A target without a consistent head is left out with a warning.

    Args:
        model: The model.
        drawn: The examples to find heads on, which all have the same conflict types.
        targets: The targets.
        options: How heads are looked for.
        names: The head sets' names, by target.
        progress: Reports how much is scored.
        unfinished: Keeps what is scored, and does not score it again.

    Returns:
        For each target a set for each number of heads to try, which differ.

    Raises:
        ExampleError: The examples have no conflict for a target.
        JuiceError: Scaled heads overflow.
        NoConsistentHeadError: No target has a consistent head.
        UsageError: A name cannot be a head set's.
    """
    for name in names.values():
        check_name(name)
    types = {target: check_conflicts(drawn, target) for target in targets}
    scores = _scores(model, drawn, types, options, progress, unfinished)
    found: dict[Target, list[HeadSet]] = {}
    missing: list[NoConsistentHeadError] = []
    for target in targets:
        for top_k in options.top_ks:
            try:
                heads = chosen_heads(scores[target], top_k)
            except NoConsistentHeadError as error:
                missing.append(error)
                break
            if any(heads == other.heads for other in found.get(target, ())):
                continue
            found.setdefault(target, []).append(
                HeadSet(
                    name=names[target],
                    target=target,
                    model=model.description.identity,
                    heads=heads,
                    identification=provenance(model, drawn, target, options, top_k=top_k),
                    scores=scores[target],
                    scores_sha256=scores[target].sha256(),
                )
            )
    if not found:
        raise missing[0]
    for reason in missing:
        warnings.warn(str(reason), stacklevel=2)
    return found


def _scores(
    model: SteeredModel,
    drawn: Sequence[ConflictExample],
    types: dict[Target, tuple[ConflictType, ...]],
    options: IdentificationOptions,
    progress: Progress,
    unfinished: Unfinished | None,
) -> dict[Target, HeadScores]:
    if options.method == "probe":
        scores = score_heads(
            model,
            drawn,
            targets=types,
            alphas_plus=options.alphas_plus,
            alphas_minus=options.alphas_minus,
            progress=progress,
            unfinished=unfinished,
        )
    else:
        scores = attribute_heads(
            model, drawn, targets=types, progress=progress, unfinished=unfinished
        )
    if not all(own.plus.isfinite().all() and own.minus.isfinite().all() for own in scores.values()):
        remedy = "give smaller alphas, or " if options.method == "probe" else ""
        raise JuiceError(
            f"some scores are not finite: the model's activations overflow; {remedy}load with "
            "--dtype float32"
        )
    return scores


def check_name(name: str) -> None:
    """Raise UsageError for a name that a head set cannot have."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(
            f"the name {name!r} cannot be a head set's; "
            "expected up to 64 letters, digits, dots, dashes and underscores"
        )
