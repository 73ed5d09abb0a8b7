"""One evaluation, a unit of work at a time; what the report folder holds is not computed again.

targets/<target>/found/<part>              a head set that was found now
targets/<target>/head_sets/<part>          those in use
targets/<target>/methods/<method>/choice   what validation chose, by domain
                                  answers  {conflict type: [answer or null]}, an answer being
                                           [output, is_correct, p_parametric, p_context]
                                  collateral, continuations, perplexity
targets/<target>/analyses/<analysis>
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from juice.data.example import judged_types
from juice.errors import ExampleError
from juice.evaluation import analyses, side_effects
from juice.evaluation.analyses.inputs import AnalysisInputs
from juice.evaluation.answers import Answer, ask
from juice.evaluation.choices import MethodUnavailableError, Preparer
from juice.evaluation.head_sets import head_sets_of, served_head_sets
from juice.evaluation.identity import described, identity_of
from juice.evaluation.methods import MethodName, Treatment, methods_for
from juice.evaluation.options import EvaluationOptions
from juice.evaluation.remembered import Remembered
from juice.evaluation.splits import Data, Splits, split
from juice.evaluation.store import Store, sha256
from juice.evaluation.tables import by_popularity, table
from juice.head_set import HeadSet
from juice.identification.scored_prompt import with_scored_answers
from juice.identification.validation import N_FEW
from juice.methods import CONTRASTS, TARGETS, Target
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

N_TESTED_LEAST = 30


def run(
    model: SteeredModel,
    data: Data,
    options: EvaluationOptions,
    out: Path,
    *,
    texts: Sequence[str] = (),
    templates: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    remembered: Remembered | None = None,
    progress: Progress = silent,
) -> Store:
    """Evaluate a model on data and keep everything in the folder `out`.

    Args:
        model: The model, with the head sets that it serves.
        data: The examples to test on, to tune on and to find heads on.
        options: What is evaluated and how.
        out: The folder of the report.
        texts: Plain texts for perplexity.
        templates: Templates of paraphrased prompts, by relation.
        overwrite: Start anew, whatever the folder holds.
        remembered: Answers of this model that need not be asked for again.
        progress: Reports the progress of each piece of work.

    Returns:
        The folder's store, complete.

    Raises:
        ExampleError: Nothing is left to test on.
        HeadSetError: The named head set cannot be used.
        OutputError: The folder cannot be written, or holds another evaluation.
    """
    # Opened before anything is computed, so that an unusable folder fails early.
    store = Store.open(out, identity_of(model, data, options, texts), overwrite=overwrite)
    with _noting(store):
        examples = Data(
            with_scored_answers(model, data.test),
            None if data.validation is None else with_scored_answers(model, data.validation),
            (
                None
                if data.identification is None
                else with_scored_answers(model, data.identification)
            ),
        )
        served = served_head_sets(model, options)
        others = {t: s for t in TARGETS if (s := model.head_sets.named_after(t)) is not None}
        splits = split(
            model,
            examples,
            {**others, **served},
            options.identification,
            n_large=options.n_large,
            limit=options.limit,
        )
        store.check("examples", splits.sha256)
        if "paraphrases" in options.analyses:
            store.check("templates", sha256(json.dumps(templates, sort_keys=True)))
        _warn(model, splits, served)
        head_sets = head_sets_of(model, served, splits, options, store, progress)
    store.results["data"] = described(splits, head_sets["served"])
    preparer = Preparer(
        model=model,
        splits=splits,
        head_sets=head_sets,
        options=options.identification,
        seed=options.seed,
        progress=progress,
    )
    for target in options.targets:
        if not judged_types(target, splits.test, any):
            raise ExampleError(
                f"no test example has a conflict prompt that the {target} target is judged on; "
                "give substitution or coherent ones"
            )
        _evaluate(target, preparer, options, store, texts, templates, remembered or Remembered())
    store.results["is_complete"] = True
    store.save()
    return store


def _warn(model: SteeredModel, splits: Splits, head_sets: Mapping[Target, HeadSet]) -> None:
    """Warn of what makes the numbers less reliable than they look."""
    n = len(splits.validation)
    if not n:
        warnings.warn(
            "no validation example can be used: head sets keep their own betas, "
            "and PH3 prunes five heads",
            stacklevel=3,
        )
    elif n < N_FEW:
        warnings.warn(
            f"only {n} validation examples choose betas and pruned heads; "
            f"{N_FEW} or more are better (--validation)",
            stacklevel=3,
        )
    if len(splits.test) < N_TESTED_LEAST:
        warnings.warn(
            f"only {len(splits.test)} facts are tested on: read the intervals, not the shares; "
            f"{N_TESTED_LEAST} or more are better",
            stacklevel=3,
        )
    for head_set in head_sets.values():
        if warning := head_set.form_warning(model.prompts.sha256):
            warnings.warn(warning, stacklevel=3)
        if not splits.holds_finders_of(head_set):
            warnings.warn(
                f"head set {head_set.name!r} was found on examples that are not recognised in this "
                "data: if some of them are tested on, its results are optimistic",
                stacklevel=3,
            )


def _evaluate(
    target: Target,
    preparer: Preparer,
    options: EvaluationOptions,
    store: Store,
    texts: Sequence[str],
    templates: Mapping[str, Any] | None,
    remembered: Remembered,
) -> None:
    """Do the work of one target."""
    for name in methods_for(target, options.methods):
        _measure(
            name, target, preparer, store, remembered, texts if options.measures_text else None
        )
    methods = store.results.get("targets", {}).get(target, {}).get("methods", {})
    inputs = AnalysisInputs(
        model=preparer.model,
        splits=preparer.splits,
        target=target,
        head_set=preparer.head_sets["served"].get(target),
        preparer=preparer,
        seed=options.seed,
        options=options.identification,
        choices={name: own["choice"] for name, own in methods.items()},
        templates=templates,
        progress=preparer.progress,
    )
    for analysis in options.analyses:
        if analysis in analyses.OF_THE_MODEL and target != options.targets[0]:
            continue
        with _noting(store):
            make = partial(analyses.run, analysis, inputs)
            store.unit("targets", target, "analyses", analysis, make=make)


def _measure(
    name: MethodName,
    target: Target,
    preparer: Preparer,
    store: Store,
    remembered: Remembered,
    texts: Sequence[str] | None,
) -> None:
    """Measure one method; without texts, neither plain text nor longer answers."""
    model, test, seed = preparer.model, preparer.splits.test, preparer.seed
    unit = partial(store.unit, "targets", target, "methods", name)
    with _noting(store):
        try:
            choice = unit("choice", make=lambda: preparer.choose(name, target))
        except MethodUnavailableError as error:
            warnings.warn(f"{name} toward the {target} answer is left out: {error}", stacklevel=2)
            return
        treatments = preparer.treatments(name, target, choice)
        asked = model, test, treatments, seed, preparer.progress
        answers = unit(
            "answers", make=lambda: _answers(name, target, preparer, treatments, remembered)
        )
        unit("collateral", make=lambda: side_effects.collateral(*asked, remembered=remembered))
        if texts is not None:
            unit("continuations", make=lambda: side_effects.continuations(*asked))
        # Plain text has neither an instruction nor a context, and no gate.
        if texts is not None and name not in (
            *("prompt", "question", "gated", "gated_apart"),
            *CONTRASTS,
        ):
            unit(
                "perplexity",
                make=lambda: side_effects.plain_text_perplexity(model, texts, treatments),
            )
    own = {t: [row and Answer(*row) for row in rows] for t, rows in answers.items()}
    method = store.results["targets"][target]["methods"][name]
    method["table"] = table(test, own)
    method["by_popularity"] = by_popularity(test, own)


def _answers(
    name: MethodName,
    target: Target,
    preparer: Preparer,
    treatments: Mapping[str, Treatment],
    remembered: Remembered,
) -> dict[str, list[list[Any] | None]]:
    test = preparer.splits.test
    answers = ask(
        preparer.model,
        test,
        judged_types(target, test, any),
        treatments,
        target,
        remembered=remembered,
        progress=preparer.progress,
        description=f"{name.replace('_', ' ')}, {target}",
    )
    return {t: [None if a is None else a.to_list() for a in own] for t, own in answers.items()}


@contextmanager
def _noting(store: Store) -> Iterator[None]:
    """Keep every user warning raised within as a note of the report, once, and pass it on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    notes: list[str] = store.results.setdefault("notes", [])
    for warning in caught:
        if issubclass(warning.category, UserWarning) and str(warning.message) not in notes:
            notes.append(str(warning.message))
            warnings.warn(str(warning.message), stacklevel=2)
