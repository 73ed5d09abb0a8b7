"""From drawn examples to tuned head sets, whichever way heads are looked for."""

from __future__ import annotations

from collections.abc import Sequence

from juice.data.example import ConflictExample
from juice.head_set import HeadSet
from juice.identification.drawing import check_conflicts
from juice.identification.learned_sets import learn_set
from juice.identification.options import IdentificationOptions
from juice.identification.protection import DEFAULT, Protection
from juice.identification.run import identify_targets
from juice.identification.tuning import measure, tune_all
from juice.identification.unfinished import Unfinished
from juice.identification.validation import usable_validation
from juice.methods import Method, Target
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel


def find_head_sets(
    model: SteeredModel,
    drawn: Sequence[ConflictExample],
    targets: Sequence[Target],
    options: IdentificationOptions,
    *,
    names: dict[Target, str],
    validation: Sequence[ConflictExample],
    methods: Sequence[Method] = ("juice",),
    tunes: bool = True,
    protection: Protection = DEFAULT,
    progress: Progress = silent,
    unfinished: Unfinished | None = None,
) -> dict[Target, HeadSet]:
    """Return a head set toward each target for which there are heads.

    Args:
        model: The model.
        drawn: The examples to find heads on, which all have the same conflict types.
        targets: The targets.
        options: How heads are looked for.
        names: The head sets' names, by target.
        validation: The examples to choose and tune on.
        methods: The methods whose betas to tune; the first chooses the heads.
        tunes: Whether to tune; learned heads have their betas in any case.
        protection: What steering should leave alone.
        progress: Reports how far it is.
        unfinished: Keeps what is computed, and does not compute it again.

    Raises:
        ExampleError: The examples have no conflict for a target.
        NoConsistentHeadError: No target has a consistent head.
        UnsupportedModelError: Gradients do not pass through the model.
        UsageError: A name cannot be a head set's.
    """
    if options.method == "learned":
        learned = {}
        for target in targets:
            check_conflicts(drawn, target)
            held_out = usable_validation(model, validation, target)
            learned[target] = learn_set(
                model,
                drawn,
                target,
                options,
                name=names[target],
                held_out=held_out,
                methods=methods,
                protection=protection,
                progress=progress,
                unfinished=unfinished,
            )
            for method in methods:
                learned[target] = measure(
                    model,
                    learned[target],
                    held_out,
                    method=method,
                    protection=protection,
                    progress=progress,
                )
        return learned
    candidates = identify_targets(
        model, drawn, targets, options, names=names, progress=progress, unfinished=unfinished
    )
    if not tunes:
        return {target: own[0] for target, own in candidates.items()}
    return tune_all(
        model,
        candidates,
        validation,
        methods=methods,
        grid=options.method == "probe",
        protection=protection,
        progress=progress,
        unfinished=unfinished,
    )
