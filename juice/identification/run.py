"""From examples to a head set: draw, score, select, tune."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

import juice
from juice.errors import ExampleError, JuiceError, NoConsistentHeadError, UsageError
from juice.examples import ConflictExample, Target, draw, examples_sha256
from juice.head_set import HeadLists, HeadSet, Identification
from juice.head_set.schema import NAME_PATTERN, Method
from juice.identification.scores import score_heads, scored_prompt
from juice.identification.select import chosen_heads
from juice.identification.tuning import conflict_types_of, tune
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

VALIDATION_SHARE = 0.15


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How heads are looked for; the alphas are the grids of the paper's authors."""

    n_examples: int = 4
    top_k: int = 5
    seed: int = 0
    alphas_plus: tuple[float, ...] = (1.0, 3.0, 5.0, 10.0, 30.0)
    alphas_minus: tuple[float, ...] = (-1.0, -2.0, -5.0)
    relation: str | None = None

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise UsageError(f"top_k is {self.top_k}; expected at least 1 (5 up to about 3B parameters, 10 above)")
        if not all(math.isfinite(alpha) for alpha in (*self.alphas_plus, *self.alphas_minus)):
            raise UsageError(f"the alphas are {[*self.alphas_plus, *self.alphas_minus]}; expected finite numbers")
        if not self.alphas_plus or not all(alpha > 0 for alpha in self.alphas_plus):
            raise UsageError(f"alphas_plus is {list(self.alphas_plus)}; expected numbers above 0, such as 1,3,5,10,30")
        if not self.alphas_minus or not all(alpha < 0 for alpha in self.alphas_minus):
            raise UsageError(f"alphas_minus is {list(self.alphas_minus)}; expected numbers below 0, such as -1,-2,-5")


def identify(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    *,
    target: Target,
    name: str | None = None,
    chat_template: str | Path | None = None,
    progress: Progress = silent,
    **settings: object,
) -> HeadSet:
    """Find the heads that push toward a target, without tuning betas; settings are the fields of `Settings`.

    `n_examples` of the examples are drawn with `seed`. With a `chat_template` ("default", a file, or a template's text) every prompt
    is the user's message in a chat, and the answers begin the assistant's turn. Raises ExampleError, NoConsistentHeadError, and
    UsageError for a template that there is not.
    """
    if chat_template is not None:
        model = model.with_chat_template(chat_template)
    chosen = Settings(**settings)  # type: ignore[arg-type]
    drawn, _ = usable_examples(model, examples, chosen)
    return identify_targets(model, drawn, [target], chosen, names={target: name or target}, progress=progress)[target]


def identify_targets(
    model: SteeredModel,
    drawn: Sequence[ConflictExample],
    targets: Sequence[Target],
    settings: Settings,
    *,
    names: dict[Target, str],
    progress: Progress = silent,
) -> dict[Target, HeadSet]:
    """Find the heads of several targets from the same drawn examples, with one pass of probes.

    A target without a consistent head is left out with a warning; raises NoConsistentHeadError when none is left.
    """
    for name in names.values():
        check_name(name)
    types = {target: conflict_types_of(target, drawn) for target in targets}
    for target, own in types.items():
        if not set(own) - {"clean"}:
            raise ExampleError(
                f"the examples hold no conflict for the {target} target; give each a substitution or a coherent prompt beside the clean one"
            )
    scores = score_heads(
        model.loaded, drawn, targets=types, alphas_plus=settings.alphas_plus, alphas_minus=settings.alphas_minus, progress=progress
    )
    if not all(scores[t].plus.isfinite().all() and scores[t].minus.isfinite().all() for t in targets):
        raise JuiceError("some scores are not finite: scaled heads overflow; give smaller alphas, or load with --dtype float32")
    heads: dict[Target, HeadLists] = {}
    missing: list[NoConsistentHeadError] = []
    for target in targets:
        try:
            heads[target] = chosen_heads(scores[target], settings.top_k)
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
            model=model.loaded.identity,
            heads=heads[target],
            identification=Identification(
                alphas_plus=settings.alphas_plus,
                alphas_minus=settings.alphas_minus,
                n_examples=len(drawn),
                seed=settings.seed,
                examples_sha256=examples_sha256(drawn),
                conflict_types=types[target],
                top_k=settings.top_k,
                chat_template_sha256=model.loaded.prompts.sha256,
                versions={"juice": juice.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
            ),
            scores=scores[target],
            scores_sha256=scores[target].sha256(),
        )
        for target in heads
    }


def usable_examples(
    model: SteeredModel, examples: Sequence[ConflictExample], settings: Settings
) -> tuple[list[ConflictExample], list[ConflictExample]]:
    """Draw the examples to identify on from those that can be scored; return them and all that were not drawn.

    With a `relation`, only its examples are drawn. Warns of examples that cannot be scored, with the first reason;
    raises ExampleError when too few are left.
    """
    candidates, reasons = [], []
    wanted = {t for e in examples if settings.relation in (None, e.relation) for t in e.prompts}
    for example in examples:
        if settings.relation is not None and example.relation != settings.relation:
            continue
        try:
            if lacking := wanted - example.prompts.keys():
                raise ExampleError(f"example {example.subject!r} has no {' and no '.join(sorted(lacking))} prompt, others have")
            for conflict_type in example.prompts:
                scored_prompt(model.loaded, example, conflict_type)
            candidates.append(example)
        except ExampleError as error:
            reasons.append(str(error))
    if reasons:
        warnings.warn(f"{len(reasons)} examples cannot be scored and are not drawn; first: {reasons[0]}", stacklevel=2)
    if settings.relation is not None and not candidates and not reasons:
        known = sorted({e.relation for e in examples if e.relation})
        raise ExampleError(f"no example has the relation {settings.relation!r}; the file has {', '.join(known) or 'none'}")
    drawn, _ = draw(candidates, settings.n_examples, settings.seed)
    chosen = set(map(id, drawn))
    return drawn, [e for e in examples if id(e) not in chosen]


def check_name(name: str) -> None:
    """Raise UsageError for a name that a head set cannot have."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(f"the name {name!r} cannot be a head set's; expected up to 64 letters, digits, dots, dashes and underscores")


def validation_share(examples: Sequence[ConflictExample], seed: int) -> list[ConflictExample]:
    """Return the seeded share of the examples that tunes the betas when no validation file is given."""
    n = max(1, round(VALIDATION_SHARE * len(examples)))
    return draw(examples, n, seed)[0] if examples else []


def tune_all(
    model: SteeredModel,
    head_sets: dict[Target, HeadSet],
    validation: Sequence[ConflictExample],
    *,
    methods: Sequence[Method] = ("juice",),
    progress: Progress = silent,
) -> dict[Target, HeadSet]:
    """Tune the betas of every set; where no validation example can be used, warn and keep the set as it is."""
    tuned = dict(head_sets)
    for target in head_sets:
        for method in methods:
            try:
                tuned[target] = tune(model, tuned[target], validation, method=method, progress=progress)
            except ExampleError as error:
                warnings.warn(f"betas of {tuned[target].name!r} ({method}) stay untuned: {error}", stacklevel=2)
    return tuned
