"""The head sets that are evaluated: those that are served, and those that are found now.

    served    the named one, else the one named after the target, else what `juice identify` finds
    paper     found by probes, the paper's way
    learned   what `juice identify --method learned` finds

A served set that was found in a part's own way stands for that part.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from juice.data.example import ConflictExample
from juice.errors import HeadSetError, JuiceError
from juice.evaluation.methods import MethodName
from juice.evaluation.options import EvaluationOptions
from juice.evaluation.splits import Splits
from juice.evaluation.store import Store, sha256
from juice.head_set import HeadSet
from juice.head_set.scores import ScoreKind
from juice.identification import IdentificationOptions, identify_targets
from juice.identification.drawing import usable_examples
from juice.identification.recipe import find_head_sets
from juice.identification.validation import N_TUNED_ON, validation_share
from juice.methods import METHODS, Target
from juice.progress import Progress
from juice.steered_model import SteeredModel

Part = Literal["served", "paper", "learned"]
FOUND_BY: dict[Part, ScoreKind] = {
    "served": "attribution",
    "paper": "probe",
    "learned": "learned",
}
PART_OF: dict[MethodName, Part] = {
    "june": "paper",
    "juice": "paper",
    "served_once": "served",
    "served": "served",
    "learned": "learned",
    "question": "served",
    "gated": "served",
    "gated_apart": "served",
}
HeadSets = Mapping[Part, Mapping[Target, HeadSet]]


def served_head_sets(model: SteeredModel, options: EvaluationOptions) -> dict[Target, HeadSet]:
    """Return each target's head set: the named one, else the one named after it, if there is one.

    Raises HeadSetError where the named one is for a target that is not evaluated.
    """
    chosen: dict[Target, HeadSet] = {}
    if options.head_set is not None:
        named = model.head_sets.get(options.head_set)
        if named.target not in options.targets:
            raise HeadSetError(
                f"head set {named.name!r} steers toward {named.target}; "
                f"evaluate it with --target {named.target}"
            )
        chosen[named.target] = named
    for target in options.targets:
        served = model.head_sets.named_after(target)
        if target not in chosen and served is not None:
            chosen[target] = served
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
    parts = {PART_OF[name] for name in options.methods if name in PART_OF}
    if options.analyses:
        parts.add("served")
    chosen: dict[Part, dict[Target, HeadSet]] = {part: {} for part in FOUND_BY}
    for part in (part for part in FOUND_BY if part in parts):
        for target in options.targets:
            own = served.get(target)
            if own is None or (part != "served" and _kind(own) != FOUND_BY[part]):
                make = partial(_find, model, part, target, splits, options, progress)
                found = store.unit("targets", target, "found", part, make=make)
                own = HeadSet.parse(found, f"{store.folder}") if found is not None else None
            if own is None:
                continue
            chosen[part][target] = own
            content = own.model_dump(mode="json", exclude={"metrics"})
            kept = store.results.setdefault("targets", {}).setdefault(target, {})
            kept.setdefault("head_sets", {})[part] = content
            store.check(f"{target}_{part}_head_set", sha256(json.dumps(content, sort_keys=True)))
    return chosen


def finders(
    model: SteeredModel, splits: Splits, target: Target, options: IdentificationOptions
) -> list[ConflictExample]:
    """Return the examples on which heads are found now, none of which is tested on.

    They come from those that were set aside for the target; if these are too few, the large set
    joins them.
    """
    # Heads are found on examples with the same conflict types.
    types = splits.identification[target][0].prompts.keys()
    own, large = (
        [e for e in group if e.prompts.keys() == types and options.relation in (None, e.relation)]
        for group in (splits.identification[target], splits.large)
    )
    n_examples = options.n_wanted(len(own) + len(large))
    if n_examples > len(own):
        own = [*own, *large]
    wanted = replace(options, n_examples=max(1, min(n_examples, len(own))))
    return usable_examples(model, own, wanted)[0]


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
    own, names = options.identification, {target: str(target)}
    if part != "paper":
        own = IdentificationOptions(method=FOUND_BY[part], seed=own.seed, relation=own.relation)
    try:
        drawn = finders(model, splits, target, own)
        if part == "paper":  # its betas are tuned by relation
            sets = identify_targets(model, drawn, [target], own, names=names, progress=progress)
            return sets[target][0].model_dump(mode="json")
        found = find_head_sets(
            model,
            drawn,
            [target],
            own,
            names=names,
            validation=validation_share(splits.validation, own.seed, n=N_TUNED_ON),
            methods=METHODS if part == "served" else ("juice",),
            progress=progress,
        )
    except JuiceError as error:
        warnings.warn(f"no {FOUND_BY[part]} head set toward {target}: {error}", stacklevel=2)
        return None
    return found[target].model_dump(mode="json")
