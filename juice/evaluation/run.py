"""One evaluation, a unit of work at a time; what the report folder holds is not computed again.

targets/<target>/head_set                  the heads of JuICE and JuNe
targets/<target>/methods/<method>/choice   what validation chose, by domain
                                  answers  {conflict type: [answer or null]}, an answer being
                                           [output, is_correct, p_parametric, p_context]
                                  collateral, continuations, perplexity
targets/<target>/analyses/<analysis>
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from juice.data.example import judged_types
from juice.errors import ExampleError
from juice.evaluation import analyses, side_effects
from juice.evaluation.analyses.inputs import AnalysisInputs
from juice.evaluation.answers import Answer, ask
from juice.evaluation.choices import MethodUnavailableError, Preparer
from juice.evaluation.head_sets import head_sets_of
from juice.evaluation.identity import described, identity_of
from juice.evaluation.methods import MethodName, Treatment, methods_for
from juice.evaluation.options import EvaluationOptions
from juice.evaluation.splits import Data, Splits, split
from juice.evaluation.store import Store, sha256
from juice.evaluation.tables import by_popularity, table
from juice.head_set import HeadSet
from juice.identification.scored_prompt import with_scored_answers
from juice.identification.validation import N_FEW
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel
from juice.targets import TARGETS, Target


def run(
    model: SteeredModel,
    data: Data,
    options: EvaluationOptions,
    out: Path,
    *,
    texts: Sequence[str] = (),
    templates: Mapping[str, Any] | None = None,
    overwrite: bool = False,
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
        head_sets = head_sets_of(model, examples, options, store, progress)
        served = {
            t: s
            for t in TARGETS
            if (s := model.head_sets.by_name.get(t)) is not None and s.target == t
        }
        splits = split(
            model,
            examples,
            {**served, **head_sets},
            options.identification,
            n_large=options.n_large,
            limit=options.limit,
        )
        store.check("examples", splits.sha256)
        if "paraphrases" in options.analyses:
            store.check("templates", sha256(json.dumps(templates, sort_keys=True)))
        _warn(model, splits, head_sets)
    store.results["data"] = described(splits, head_sets)
    for target in options.targets:
        if not judged_types(target, splits.test, in_all=False):
            raise ExampleError(
                f"no test example has a conflict prompt that the {target} target is judged on; "
                "give substitution or coherent ones"
            )
        _Target(model, splits, head_sets, options, store, target, texts, progress).run(templates)
    store.results["is_complete"] = True
    store.save()
    return store


def _warn(model: SteeredModel, splits: Splits, head_sets: Mapping[Target, HeadSet]) -> None:
    """Warn of what makes the numbers less reliable than they look."""
    n = len(splits.validation)
    if not n:
        warnings.warn(
            "no validation example can be used: the head set keeps its own betas, "
            "and PH3 prunes five heads",
            stacklevel=3,
        )
    elif n < N_FEW:
        warnings.warn(
            f"only {n} validation examples choose betas and pruned heads; "
            f"{N_FEW} or more are better (--validation)",
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


@dataclass(frozen=True)
class _Target:
    """The work of one target."""

    model: SteeredModel
    splits: Splits
    head_sets: dict[Target, HeadSet]
    options: EvaluationOptions
    store: Store
    target: Target
    texts: Sequence[str]
    progress: Progress

    def run(self, templates: Mapping[str, Any] | None) -> None:
        preparer = Preparer(
            model=self.model,
            splits=self.splits,
            head_sets=self.head_sets,
            seed=self.options.seed,
            progress=self.progress,
        )
        for name in methods_for(self.target, self.options.methods):
            self._method(name, preparer)
        methods = self.store.results.get("targets", {}).get(self.target, {}).get("methods", {})
        inputs = AnalysisInputs(
            model=self.model,
            splits=self.splits,
            target=self.target,
            head_set=self.head_sets.get(self.target),
            preparer=preparer,
            seed=self.options.seed,
            options=self.options.identification,
            choices={name: own["choice"] for name, own in methods.items()},
            templates=templates,
            progress=self.progress,
        )
        for analysis in self.options.analyses:
            if analysis in analyses.OF_THE_MODEL and self.target != self.options.targets[0]:
                continue
            with _noting(self.store):
                self._unit("analyses", analysis, make=partial(analyses.run, analysis, inputs))

    def _unit(self, *path: str, make: Callable[[], Any]) -> Any:
        return self.store.unit("targets", self.target, *path, make=make)

    def _method(self, name: MethodName, preparer: Preparer) -> None:
        at, description = ("methods", name), f"{name.replace('_', ' ')}, {self.target}"
        with _noting(self.store):
            try:
                choice = self._unit(*at, "choice", make=lambda: preparer.choose(name, self.target))
            except MethodUnavailableError as error:
                warnings.warn(
                    f"{name} toward the {self.target} answer is left out: {error}", stacklevel=2
                )
                return
            treatments = preparer.treatments(name, self.target, choice)
            answers = self._unit(
                *at, "answers", make=lambda: self._answers(treatments, description)
            )
            self._unit(*at, "collateral", make=lambda: self._collateral(treatments))
            self._unit(*at, "continuations", make=lambda: self._continuations(treatments))
            if name not in ("prompt", "cad"):  # plain text has neither an instruction nor a context
                self._unit(
                    *at,
                    "perplexity",
                    make=lambda: side_effects.plain_text_perplexity(
                        self.model, self.texts, treatments
                    ),
                )
        own = {t: [Answer.of(row) for row in rows] for t, rows in answers.items()}
        method = self.store.results["targets"][self.target]["methods"][name]
        method["table"] = table(self.splits.test, own, self.options.seed)
        method["by_popularity"] = by_popularity(self.splits.test, own, self.options.seed)

    def _answers(
        self, treatments: dict[str, Treatment], description: str
    ) -> dict[str, list[list[Any] | None]]:
        conflict_types = judged_types(self.target, self.splits.test, in_all=False)
        answers = ask(
            self.model,
            self.splits.test,
            conflict_types,
            treatments,
            self.target,
            progress=self.progress,
            description=description,
        )
        return {t: [None if a is None else a.to_list() for a in own] for t, own in answers.items()}

    def _collateral(self, treatments: dict[str, Treatment]) -> dict[str, Any]:
        return side_effects.collateral(
            self.model, self.splits.test, treatments, self.options.seed, self.progress
        )

    def _continuations(self, treatments: dict[str, Treatment]) -> dict[str, Any]:
        return side_effects.continuations(
            self.model, self.splits.test, treatments, self.options.seed, self.progress
        )


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
