"""From examples to a head set: draw, score, select; `tuning` does the rest."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from juice.data.example import ConflictExample, examples_sha256, judged_types
from juice.errors import ExampleError, JuiceError, NoConsistentHeadError, UsageError
from juice.head_set import HeadLists, HeadSet, Identification
from juice.head_set.schema import NAME_PATTERN
from juice.identification.drawing import usable_examples
from juice.identification.options import ALPHAS_MINUS, ALPHAS_PLUS, IdentificationOptions
from juice.identification.probing import score_heads
from juice.identification.selection import chosen_heads
from juice.methods import Target
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel
from juice.version import versions


def identify(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    *,
    target: Target,
    name: str | None = None,
    n_examples: int = 4,
    top_k: int = 5,
    seed: int = 0,
    alphas_plus: Sequence[float] = ALPHAS_PLUS,
    alphas_minus: Sequence[float] = ALPHAS_MINUS,
    relation: str | None = None,
    chat_template: str | Path | None = None,
    progress: Progress = silent,
) -> HeadSet:
    """Find the heads that push toward a target, without tuning betas (docs/method.md, "Stage 1").

    Args:
        model: The model, on an engine that gives access to its activations.
        examples: Facts that the model knows, each with a wrong answer.
        target: `parametric` or `context`.
        name: The head set's name; None: the target.
        n_examples: How many of the examples are drawn; the paper uses 4.
        top_k: Heads of each sign: 5 up to about 3B parameters, 10 above.
        seed: Seed of the draw.
        alphas_plus: Probing scales of the + heads, above 0; the grid of the paper's authors.
        alphas_minus: Probing scales of the - heads, below 0.
        relation: Draw examples of this relation only.
        chat_template: Make every prompt a user's message in a chat, where answers begin the
            assistant's turn: `default` for the tokenizer's own template, a file, or a template's
            text.
        progress: Reports how many probes are done.

    Returns:
        The head set, with its scores and without betas: `juice.tune` sets them.

    Raises:
        ExampleError: Too few examples can be used.
        NoConsistentHeadError: No head of either sign helps under every conflict type.
        UsageError: An option is out of range, or there is no such template.
        MissingCapabilityError: The engine does not give access to activations.
    """
    if chat_template is not None:
        model = model.with_chat_template(chat_template)
    options = IdentificationOptions(
        n_examples=n_examples,
        top_k=top_k,
        seed=seed,
        alphas_plus=tuple(alphas_plus),
        alphas_minus=tuple(alphas_minus),
        relation=relation,
    )
    drawn, _ = usable_examples(model, examples, options)
    return identify_targets(
        model, drawn, [target], options, names={target: name or target}, progress=progress
    )[target]


def identify_targets(
    model: SteeredModel,
    drawn: Sequence[ConflictExample],
    targets: Sequence[Target],
    options: IdentificationOptions,
    *,
    names: dict[Target, str],
    progress: Progress = silent,
) -> dict[Target, HeadSet]:
    """Find the heads of several targets from the same drawn examples, with one pass of probes.

    A target without a consistent head is left out with a warning.

    Args:
        model: The model.
        drawn: The examples to find heads on, which all have the same conflict types.
        targets: The targets.
        options: How heads are looked for.
        names: The head sets' names, by target.
        progress: Reports how many probes are done.

    Raises:
        ExampleError: The examples have no conflict for a target.
        JuiceError: Scaled heads overflow.
        NoConsistentHeadError: No target has a consistent head.
        UsageError: A name cannot be a head set's.
    """
    for name in names.values():
        check_name(name)
    types = {target: judged_types(target, drawn) for target in targets}
    for target, own in types.items():
        if not set(own) - {"clean"}:
            raise ExampleError(
                f"the examples hold no conflict for the {target} target; give each a substitution "
                "or a coherent prompt in addition to the clean one"
            )
    scores = score_heads(
        model,
        drawn,
        targets=types,
        alphas_plus=options.alphas_plus,
        alphas_minus=options.alphas_minus,
        progress=progress,
    )
    if not all(
        scores[t].plus.isfinite().all() and scores[t].minus.isfinite().all() for t in targets
    ):
        raise JuiceError(
            "some scores are not finite: scaled heads overflow; "
            "give smaller alphas, or load with --dtype float32"
        )
    heads: dict[Target, HeadLists] = {}
    missing: list[NoConsistentHeadError] = []
    for target in targets:
        try:
            heads[target] = chosen_heads(scores[target], options.top_k)
        except NoConsistentHeadError as error:
            missing.append(error)
    if not heads:
        raise missing[0]
    for reason in missing:
        warnings.warn(str(reason), stacklevel=2)
    return {
        target: HeadSet(
            name=names[target],
            target=target,
            model=model.description.identity,
            heads=heads[target],
            identification=Identification(
                alphas_plus=options.alphas_plus,
                alphas_minus=options.alphas_minus,
                n_examples=len(drawn),
                seed=options.seed,
                examples_sha256=examples_sha256(drawn),
                conflict_types=types[target],
                top_k=options.top_k,
                chat_template_sha256=model.prompts.sha256,
                versions=versions(),
            ),
            scores=scores[target],
            scores_sha256=scores[target].sha256(),
        )
        for target in heads
    }


def check_name(name: str) -> None:
    """Raise UsageError for a name that a head set cannot have."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(
            f"the name {name!r} cannot be a head set's; "
            "expected up to 64 letters, digits, dots, dashes and underscores"
        )
