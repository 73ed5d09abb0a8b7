"""`juice.evaluate`: the paper's evaluation on a model and examples, as a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from juice.data.readers import Examples, read_examples
from juice.errors import UsageError
from juice.evaluation.frames import write_tables
from juice.evaluation.methods import METHODS, MethodName
from juice.evaluation.options import EvaluationOptions
from juice.evaluation.remembered import Remembered
from juice.evaluation.repeats import repeat
from juice.evaluation.report import require_extra, write_report
from juice.evaluation.report.sections import sections
from juice.evaluation.run import run
from juice.evaluation.sources import read_templates, read_texts
from juice.evaluation.splits import Data
from juice.evaluation.store import Store
from juice.identification import IdentificationOptions
from juice.methods import Target
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel


def evaluate(
    model: SteeredModel,
    examples: Examples,
    out: str | Path,
    *,
    targets: Sequence[Target] = ("parametric", "context"),
    methods: Sequence[MethodName] = METHODS,
    analyses: Sequence[str] = (),
    head_set: str | None = None,
    validation: Examples | None = None,
    identification: Examples | None = None,
    limit: int | None = None,
    n_examples: int = 4,
    top_k: int = 5,
    relation: str | None = None,
    seed: int = 0,
    n_seeds: int = 1,
    texts: Sequence[str] | None = None,
    templates: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Store:
    """Measure what steering does to a model, against its baselines, and write a report.

    docs/evaluation.md describes it. What the folder already holds is not computed again, so an
    interrupted evaluation continues where it stopped.

    Args:
        model: The model; heads are found for a target for which it has no head set.
        examples: The examples to test on: examples, rows, a data set of `datasets`, or what
            `juice.read_examples` takes.
        out: The folder of the report: `report.html`, `report.md`, `results.json`, tables as CSV.
        targets: Whose answer counts as right.
        methods: What to compare; docs/evaluation.md, "Methods", has the names.
        analyses: What else to measure; `juice.evaluation.analyses.ANALYSES` has the names.
        head_set: The name of a head set for its target; None: the one named after the target.
        validation: Examples to tune on, as `examples`; None: 15 % of those.
        identification: Examples to find heads on, as `examples`; None: some of those.
        limit: Most examples to test on, spread over the relations; None: all.
        n_examples: How many examples the paper's heads are found on.
        top_k: Heads of each sign that the paper's probes choose.
        relation: Find heads on examples of this relation only.
        seed: Seed of everything that is drawn.
        n_seeds: With how many seeds, from `seed` on; with several, results also have the mean over
            them, its interval and the worst.
        texts: Plain texts for perplexity; None: those that come with JuICE.
        templates: Templates of paraphrased prompts, by relation; None: those that come with JuICE.
        overwrite: Start anew, whatever the folder holds.
        progress: Reports the progress of each piece of work.

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
    if n_seeds < 1:
        raise UsageError(f"n_seeds is {n_seeds}; expected at least 1")
    options = EvaluationOptions(
        targets=tuple(targets),
        methods=tuple(methods),
        analyses=tuple(analyses),
        head_set=head_set,
        limit=limit,
        seed=seed,
        identification=IdentificationOptions(
            method="probe", n_examples=n_examples, top_k=top_k, seed=seed, relation=relation
        ),
    )
    data = Data(
        read_examples(examples),
        None if validation is None else read_examples(validation, split="validation"),
        None if identification is None else read_examples(identification, split="identification"),
    )
    texts, remembered = read_texts(None, model.id) if texts is None else texts, Remembered()
    store = run(
        model,
        data,
        options,
        Path(out),
        texts=texts,
        templates=read_templates(None) if templates is None else templates,
        overwrite=overwrite,
        remembered=remembered,
        progress=progress,
    )
    if n_seeds > 1:
        repeat(
            store,
            model,
            data,
            options,
            n_seeds=n_seeds,
            remembered=remembered,
            texts=texts,
            overwrite=overwrite,
            progress=progress,
        )
    write_report(store.folder, sections(store.results))
    write_tables(store.folder, store.results)
    return store
