"""The head sets that are evaluated: those that are served, and those that are found now.

    served    the named one, else the one named after the target, else what `juice identify
              --method attribution` finds
    paper     found by probes, the paper's way
    learned   what `juice identify --method learned` finds

A served set that was found in the way of a part stands for that part.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

from juice.data.example import ConflictExample
from juice.errors import HeadSetError, JuiceError
from juice.evaluation.methods import RECIPES, Part
from juice.evaluation.options import EvaluationOptions
from juice.evaluation.results import Store, sha256
from juice.evaluation.splits import Splits
from juice.formula import Target
from juice.head_set.head_set import HeadSet
from juice.head_set.scores import ScoreKind
from juice.identification.examples import N_TUNED_ON, usable_examples, validation_share
from juice.identification.find import find
from juice.identification.options import IdentificationOptions
from juice.progress import Progress
from juice.steered_model import SteeredModel


def probing(options: EvaluationOptions) -> IdentificationOptions:
    """Return the options by which the paper's heads are found."""
    shared = {"n_examples", "top_k", "seed", "alphas_plus", "alphas_minus", "relation"}
    return IdentificationOptions(method="probe", **options.model_dump(include=shared))


FOUND_BY: dict[Part, ScoreKind] = {"served": "attribution", "paper": "probe", "learned": "learned"}
HeadSets = Mapping[Part, Mapping[Target, HeadSet]]


def served_head_sets(model: SteeredModel, options: EvaluationOptions) -> dict[Target, HeadSet]:
    """Return each target's head set: the named one, else the one named after it, if there is one.

    Raises HeadSetError where the named one is for a target that is not evaluated.
    """
    of_targets = {target: model.head_sets.named_after(target) for target in options.targets}
    chosen = {target: found for target, found in of_targets.items() if found is not None}
    if options.head_set is not None:
        named = model.head_sets.get(options.head_set)
        if named.target not in options.targets:
            raise HeadSetError(
                f"head set {named.name!r} steers toward {named.target}; "
                f"evaluate it with --target {named.target}"
            )
        chosen[named.target] = named
    return chosen


def head_sets_of(
    model: SteeredModel,
    served: Mapping[Target, HeadSet],
    splits: Splits,
    options: EvaluationOptions,
    store: Store,
    progress: Progress,
) -> HeadSets:
    """Return the head sets that the methods need, by part and target; none where none is found."""
    parts = {RECIPES[name].part for name in options.methods}
    if options.analyses:
        parts.add("served")
    chosen: dict[Part, dict[Target, HeadSet]] = {part: {} for part in FOUND_BY}
    for part, target in product(FOUND_BY, options.targets):
        if part not in parts:
            continue
        head_set = served.get(target)
        if head_set is None or (part != "served" and _kind(head_set) != FOUND_BY[part]):
            make = partial(_find, model, part, target, splits, options, progress)
            found = store.unit("targets", target, "found", part, make=make)
            if found is None:
                continue
            head_set = HeadSet.parse(found, str(store.folder))
        chosen[part][target] = head_set
        content = head_set.model_dump(mode="json", exclude={"metrics"})
        kept = store.results.setdefault("targets", {}).setdefault(target, {})
        kept.setdefault("head_sets", {})[part] = content
        store.check(f"{target}_{part}_head_set", sha256(json.dumps(content, sort_keys=True)))
    return chosen


def finders(
    model: SteeredModel, splits: Splits, target: Target, options: IdentificationOptions
) -> list[ConflictExample]:
    """Return the examples on which heads are found now, none of which is tested on."""
    return usable_examples(model, *_to_draw_from(splits, target, options))[0]


def _to_draw_from(
    splits: Splits, target: Target, options: IdentificationOptions
) -> tuple[list[ConflictExample], IdentificationOptions]:
    """Return the examples that heads may be found on, and the options that fit their number.

    The large set joins those that were set aside for the target where they are too few.
    """
    # Heads are found on examples with the same conflict types.
    drawn = splits.finders_of(target)
    types = drawn[0].prompts.keys()
    aside, large = (
        [e for e in group if e.prompts.keys() == types and options.relation in (None, e.relation)]
        for group in (drawn, splits.large)
    )
    n_examples = options.n_wanted(len(aside) + len(large))
    pool = [*aside, *large] if n_examples > len(aside) else aside
    return pool, options.but(n_examples=max(1, min(n_examples, len(pool))))


def _kind(head_set: HeadSet) -> ScoreKind | None:
    return head_set.identification.method if head_set.identification else None


def _find(
    model: SteeredModel,
    part: Part,
    target: Target,
    splits: Splits,
    options: EvaluationOptions,
    progress: Progress,
) -> Any:
    if part == "paper":
        how = probing(options).but(target=target, tune=False)  # its betas are tuned by relation
    else:
        how = IdentificationOptions(
            target=target,
            method=FOUND_BY[part],
            june=part == "served",
            **options.model_dump(include={"seed", "relation"}),
        )
    try:
        pool, how = _to_draw_from(splits, target, how)
        validation = validation_share(splits.validation, how.seed, n=N_TUNED_ON)
        found = find(model, pool, how, validation=validation, progress=progress)
    except JuiceError as error:
        warnings.warn(f"no {FOUND_BY[part]} head set toward {target}: {error}", stacklevel=2)
        return None
    return found.head_sets[target].model_dump(mode="json")
