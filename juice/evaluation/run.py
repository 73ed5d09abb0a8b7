"""The evaluation, one unit of work at a time, and `juice.evaluate`, which writes its report.

results.json:
targets/<target>/found/<part>              a head set that was found now
targets/<target>/head_sets/<part>          those in use
targets/<target>/methods/<method>/choice   what validation chose, by domain
                                  answers  {conflict type: [answer or null]}, an answer being
                                           [output, is_correct, p_parametric, p_context]
                                  collateral, continuations, perplexity
                                  table, by_popularity: what follows from the answers
targets/<target>/analyses/<analysis>
seeds                                      every number over several seeds

seeds/<seed>/results.json is the evaluation under every seed but the first, without analyses and
longer texts. An answer that was given under one seed is not asked for again under another.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from juice.data.example import ConflictExample, examples_sha256, judged_types
from juice.data.readers.sources import Examples, read_examples
from juice.errors import ExampleError
from juice.evaluation import analyses, side_effects
from juice.evaluation.analyses.inputs import AnalysisInputs
from juice.evaluation.analyses.robustness import check_templates
from juice.evaluation.answers import Answer, Remembered, ask
from juice.evaluation.choices import MethodUnavailableError, Preparer
from juice.evaluation.head_sets import head_sets_of, probing, served_head_sets
from juice.evaluation.methods import RECIPES, Treatment, methods_for
from juice.evaluation.options import EvaluationFields, EvaluationOptions, MethodName, require_extra
from juice.evaluation.report.sections import write
from juice.evaluation.results import Store, by_popularity, over_seeds, sha256, table
from juice.evaluation.splits import Data, Splits, split
from juice.files import MINI
from juice.formula import TARGETS, ConflictType, Target
from juice.head_set.head_set import HeadSet
from juice.identification.examples import N_FEW, with_scored_answers
from juice.progress import Advance, Progress, silent
from juice.steered_model import SteeredModel
from juice.version import versions

N_TESTED_LEAST = 30
DATA = Path(__file__).parent / "data"

# What of identification the numbers depend on.
OF_PROBING = {"method", "n_examples", "top_k", "seed", "relation", "penalty"} | {
    "alphas_plus",
    "alphas_minus",
}


def evaluate(
    model: SteeredModel,
    examples: Examples,
    out: str | Path,
    *,
    validation: Examples | None = None,
    identification: Examples | None = None,
    texts: Sequence[str] | None = None,
    templates: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
    **options: Unpack[EvaluationFields],
) -> Store:
    """Measure what steering does to a model, against its baselines, and write a report.

    docs/evaluation.md describes it. What the folder already holds is not computed again, so an
    interrupted evaluation continues where it stopped.

    Args:
        model: The model; heads are found for a target for which it has no head set.
        examples: The examples to test on: examples, rows, a data set of `datasets`, or what
            `juice.read_examples` takes.
        out: The folder of the report: `report.html`, `report.md`, `results.json`, tables as CSV.
        validation: Examples to tune on, as `examples`; None: 15 % of those.
        identification: Examples to find heads on, as `examples`; None: some of those.
        texts: Plain texts for perplexity; None: those that come with JuICE.
        templates: Templates of paraphrased prompts, by relation; None: those that come with JuICE.
        overwrite: Start anew, whatever the folder holds.
        progress: Reports the progress of each piece of work.
        options: `targets`, `methods`, `analyses`, `head_set`, `limit`, `relation`, `n_examples`,
            `top_k`, `seed` and `n_seeds`, as `juice.evaluation.options.EvaluationOptions` has them.

    Returns:
        The report's store: `results` is the content of `results.json`, `folder` its folder, and
        `to_frame` gives its tables as pandas frames.

    Raises:
        ExampleError: Nothing is left to test on, or a file cannot be used.
        HeadSetError: The named head set cannot be used.
        OutputError: The folder cannot be written, or holds another evaluation.
        UsageError: An option is out of range, or the extra `eval` is not installed.
    """
    require_extra()
    data = Data(
        read_examples(examples),
        None if validation is None else read_examples(validation, split="validation"),
        None if identification is None else read_examples(identification, split="identification"),
        read_texts(None, model.id) if texts is None else texts,
        read_templates(None) if templates is None else templates,
    )
    asked = EvaluationOptions.of(**options)
    return evaluate_data(model, data, asked, Path(out), overwrite=overwrite, progress=progress)


def evaluate_data(
    model: SteeredModel,
    data: Data,
    options: EvaluationOptions,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Store:
    """Evaluate a model on data with every seed, and write the report.

    Raises as `run`.
    """
    run_one = partial(run, model, data, overwrite=overwrite, remembered=Remembered())
    store = run_one(options, out, progress=progress)
    every = {options.seed: store.results}
    for seed in range(options.seed + 1, options.seed + options.n_seeds):
        with warnings.catch_warnings():
            # They are kept as notes; those of the first seed need not be repeated.
            warnings.simplefilter("ignore", UserWarning)
            folder, named = store.folder / "seeds" / str(seed), partial(_named, progress, seed)
            other = run_one(options.with_seed(seed), folder, progress=named)
        every[seed] = other.results
        store.n_computed += other.n_computed
        store.n_cached += other.n_cached
    if len(every) > 1:
        store.results["seeds"] = over_seeds(every)
        _note_others(store, every)
        store.save()
    write(store)
    return store


def run(
    model: SteeredModel,
    data: Data,
    options: EvaluationOptions,
    out: Path,
    *,
    overwrite: bool = False,
    remembered: Remembered | None = None,
    progress: Progress = silent,
) -> Store:
    """Evaluate a model on data with one seed and keep everything in the folder `out`.

    Answers that are `remembered` are not asked for again.

    Raises:
        ExampleError: Nothing is left to test on.
        HeadSetError: The named head set cannot be used.
        OutputError: The folder cannot be written, or holds another evaluation.
    """
    # Opened before anything is computed, so that an unusable folder fails early.
    store = Store.open(out, _identity(model, data, options), overwrite=overwrite)
    with _noting(store):
        preparer = _prepared(model, data, options, store, progress)
    store.results["data"] = _described(preparer.splits, preparer.head_sets["served"])
    said: Remembered = {} if remembered is None else remembered
    evaluation = Evaluation(preparer, data, options, store, said)
    for target in options.targets:
        if not judged_types(target, preparer.splits.test, any):
            raise ExampleError(
                f"no test example has a conflict prompt that the {target} target is judged on; "
                "give substitution or coherent ones"
            )
        for name in methods_for(target, options.methods):
            evaluation.measure(name, target)
        evaluation.analyse(target)
    store.results["is_complete"] = True
    store.save()
    return store


def _prepared(
    model: SteeredModel, data: Data, options: EvaluationOptions, store: Store, progress: Progress
) -> Preparer:
    """Split the data, find the head sets that are missing, and check both against the store."""
    served = served_head_sets(model, options)
    named = {t: s for t in TARGETS if (s := model.head_sets.named_after(t)) is not None}
    scored = replace(
        data,
        test=with_scored_answers(model, data.test),
        validation=data.validation and with_scored_answers(model, data.validation),
        identification=data.identification and with_scored_answers(model, data.identification),
    )
    splits = split(
        model,
        scored,
        {**named, **served},
        probing(options),
        n_large=options.n_large,
        limit=options.limit,
    )
    store.check("examples", splits.sha256)
    if "paraphrases" in options.analyses:
        store.check("templates", sha256(json.dumps(data.templates, sort_keys=True)))
    for doubt in _doubts(model, splits, served):
        warnings.warn(doubt, stacklevel=3)
    return Preparer(
        model=model,
        splits=splits,
        head_sets=head_sets_of(model, served, splits, options, store, progress),
        options=probing(options),
        progress=progress,
    )


@dataclass(frozen=True)
class Evaluation:
    """The work of one evaluation; each unit of it is kept in the store."""

    preparer: Preparer
    data: Data
    options: EvaluationOptions
    store: Store
    remembered: Remembered

    def measure(self, name: MethodName, target: Target) -> None:
        """Measure one method; where it cannot be used, warn with the reason."""
        model, test = self.preparer.model, self.preparer.splits.test
        unit = partial(self.store.unit, "targets", target, "methods", name)
        with _noting(self.store):
            try:
                choice = unit("choice", make=partial(self.preparer.choose, name, target))
            except MethodUnavailableError as error:
                warnings.warn(
                    f"{name} toward the {target} answer is left out: {error}", stacklevel=2
                )
                return
            treatments = self.preparer.treatments(name, target, choice)
            asked = model, test, treatments, self.options.seed, self.preparer.progress
            answers = unit("answers", make=partial(self._answers, name, target, treatments))
            harm = partial(side_effects.collateral, *asked, remembered=self.remembered)
            unit("collateral", make=harm)
            if self.options.measures_text:
                unit("continuations", make=partial(side_effects.continuations, *asked))
                if not RECIPES[name].is_of_prompts:
                    perplexity = side_effects.plain_text_perplexity
                    unit("perplexity", make=partial(perplexity, model, self.data.texts, treatments))
        given = {t: [row and Answer(*row) for row in rows] for t, rows in answers.items()}
        method = self.store.results["targets"][target]["methods"][name]
        method["table"] = table(test, given)
        method["by_popularity"] = by_popularity(test, given)

    def _answers(
        self, name: MethodName, target: Target, treatments: Mapping[str, Treatment]
    ) -> dict[ConflictType, list[list[Any] | None]]:
        test = self.preparer.splits.test
        answers = ask(
            self.preparer.model,
            test,
            judged_types(target, test, any),
            treatments,
            target,
            remembered=self.remembered,
            progress=self.preparer.progress,
            description=f"{name.replace('_', ' ')}, {target}",
        )
        return {
            t: [None if a is None else a.to_list() for a in given] for t, given in answers.items()
        }

    def analyse(self, target: Target) -> None:
        """Run the analyses of a target."""
        methods = self.store.results.get("targets", {}).get(target, {}).get("methods", {})
        inputs = AnalysisInputs(
            **vars(self.preparer),
            target=target,
            choices={name: found["choice"] for name, found in methods.items()},
            templates=self.data.templates,
        )
        for analysis in self.options.analyses:
            if analysis in analyses.OF_THE_MODEL and target != self.options.targets[0]:
                continue
            with _noting(self.store):
                make = partial(analyses.run, analysis, inputs)
                self.store.unit("targets", target, "analyses", analysis, make=make)


def _identity(model: SteeredModel, data: Data, options: EvaluationOptions) -> dict[str, Any]:
    """Return all that the numbers depend on.

    Methods, targets and analyses are not part of it: they may be added to a report later.
    """

    def hashed(examples: Sequence[ConflictExample] | None) -> str | None:
        return None if examples is None else examples_sha256(examples)

    described = model.description
    return {
        "model": described.identity.model_dump(mode="json"),
        "dtype": described.dtype,
        "chat_template_sha256": model.prompts.sha256,
        "quantization": described.quantization,
        "exact": described.exact,
        "data_sha256": hashed(data.test),
        "validation_sha256": hashed(data.validation),
        "identification_sha256": hashed(data.identification),
        "texts_sha256": sha256("\n".join(data.texts)),
        "head_set": options.head_set,
        "limit": options.limit,
        "seed": options.seed,
        "n_large": options.n_large,
        "identification": probing(options).model_dump(mode="json", include=OF_PROBING),
        "versions": versions(),
    }


def _described(splits: Splits, head_sets: Mapping[Target, HeadSet]) -> dict[str, Any]:
    """Return the test examples, the subjects that heads are found on, and how many others."""
    return {
        "test": [
            e.model_dump(mode="json", exclude_none=True, exclude_defaults=True) for e in splits.test
        ],
        "identification": {
            target: [e.subject for e in drawn] for target, drawn in splits.identification.items()
        },
        "finders_are_known": {
            target: splits.holds_finders_of(head_set) for target, head_set in head_sets.items()
        },
        "n_large": len(splits.large),
        "n_validation": len(splits.validation),
        "left_out": splits.left_out,
    }


def _doubts(
    model: SteeredModel, splits: Splits, head_sets: Mapping[Target, HeadSet]
) -> Iterator[str]:
    """Yield what makes the numbers less reliable than they look."""
    n = len(splits.validation)
    if not n:
        yield (
            "no validation example can be used: head sets keep their own betas, "
            "and PH3 prunes five heads"
        )
    elif n < N_FEW:
        yield (
            f"only {n} validation examples choose betas and pruned heads; "
            f"{N_FEW} or more are better (--validation)"
        )
    if len(splits.test) < N_TESTED_LEAST:
        yield (
            f"only {len(splits.test)} facts are tested on: read the intervals, not the shares; "
            f"{N_TESTED_LEAST} or more are better"
        )
    for head_set in head_sets.values():
        if warning := head_set.form_warning(model.prompts.sha256):
            yield warning
        if not head_set.facts and not splits.holds_finders_of(head_set):
            yield (
                f"head set {head_set.name!r} was found on examples that are not recognised in this "
                "data: if some of them are tested on, its results are optimistic"
            )


@contextmanager
def _noting(store: Store) -> Iterator[None]:
    """Keep every user warning raised within as a note of the report, once, and pass it on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    store.results.setdefault("notes", [])
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            _note(store, str(warning.message))


def _note(store: Store, text: str) -> None:
    if text not in store.results["notes"]:
        store.results["notes"].append(text)
        warnings.warn(text, stacklevel=3)


def _note_others(store: Store, every: Mapping[int, Mapping[str, Any]]) -> None:
    """Keep what only other seeds warned of as notes, and warn."""
    known = set(store.results["notes"])
    for seed, results in every.items():
        for note in results["notes"]:
            if note not in known:
                _note(store, f"seed {seed}: {note}")


def _named(progress: Progress, seed: int, what: str, n: int) -> AbstractContextManager[Advance]:
    return progress(f"seed {seed}: {what}", n)


def read_texts(given: Path | None, model_id: str) -> list[str]:
    """Read plain texts, one per line; None: those that come with JuICE. Raises ExampleError."""
    path = given or (MINI if model_id == "mini" else DATA) / "plain_text.txt"
    try:
        texts = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ExampleError(
            f"cannot read the text {path}: {error}; give a UTF-8 file with one text per line"
        ) from error
    if not texts:
        raise ExampleError(f"the text {path} is empty; give a file with one text per line")
    return texts


def read_templates(given: Path | None) -> dict[str, Any]:
    """Read templates by relation; None: those that come with JuICE. Raises ExampleError."""
    path = given or DATA / "templates.json"
    try:
        templates: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ExampleError(
            f"cannot read the templates {path}: {error}; expected a JSON object"
        ) from error
    check_templates(templates, str(path))
    return templates
