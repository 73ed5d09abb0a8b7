"""`juice evaluate`: the paper's evaluation: methods, baselines, side effects and analyses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field

from juice.cli import console, options
from juice.engine.load_options import LoadOptions
from juice.engine.sampling_options import Options
from juice.errors import UsageError
from juice.evaluation.options import (
    ANALYSIS_NAMES,
    METHOD_NAMES,
    EvaluationOptions,
    require_extra,
)

if TYPE_CHECKING:
    from juice.data.example import ConflictExample
    from juice.data.readers.sources import Split
    from juice.evaluation.results import Store
    from juice.steered_model import SteeredModel


class Asked(Options):
    """The flags that are files, names in a list, or how often: what Python gives as objects."""

    data: list[str] | None = Field(
        default=None,
        description="Examples to test on: a file, a folder, a data set, `mini`. Repeatable.",
    )
    target: Literal["parametric", "context", "both"] = Field(
        default="both", description="Whose answer counts as right."
    )
    examples: str | None = Field(
        default=None, description="Examples to find heads on; else some of the data."
    )
    validation: str | None = Field(
        default=None, description="Examples to tune on; else 15% of the data."
    )
    methods: str = Field(
        default="all",
        description=(
            "`all`, or some of: original, prompt, cad, adacad, cocoa, ckplug, grd, ph3 (large and "
            "small), june, juice, served_once, served, learned, question, gated, gated_apart."
        ),
    )
    analyses: str = Field(
        default="none",
        description=f"`all`, `none`, or some of: {', '.join(ANALYSIS_NAMES)}.",
    )
    seeds: int = Field(
        default=1,
        ge=1,
        description="Repeat with this many seeds, from --seed on: mean, interval and worst.",
    )
    text: Path | None = Field(
        default=None,
        description="Plain text for perplexity, one text per line; else one that comes with JuICE.",
    )
    templates: Path | None = Field(
        default=None,
        description="Templates of paraphrased prompts (JSON); else those of six relations.",
    )
    checkpoints: list[Path] | None = Field(
        default=None,
        description="Measure context reliance over these checkpoints instead of methods. "
        "Repeatable.",
    )

    def options(self, wanted: EvaluationOptions) -> EvaluationOptions:
        """Return all options of the evaluation."""
        from juice.evaluation.methods import methods_for

        chosen: dict[str, Any] = {
            "n_seeds": self.seeds,
            "targets": ("parametric", "context") if self.target == "both" else (self.target,),
            "methods": _names("--methods", self.methods, METHOD_NAMES),
            "analyses": ()
            if self.analyses == "none"
            else _names("--analyses", self.analyses, ANALYSIS_NAMES),
        }
        if not any(methods_for(target, chosen["methods"]) for target in chosen["targets"]):
            raise UsageError(
                f"{', '.join(chosen['methods'])} do not steer toward {self.target}; choose another "
                "--target, or other --methods"
            )
        return EvaluationOptions.of(**wanted.model_dump() | chosen)


@options.spelled_out
def run(
    out: Annotated[
        Path,
        typer.Option(help="Folder of the report; an evaluation that is already there is resumed."),
    ],
    asked: Asked,
    wanted: EvaluationOptions,
    loading: LoadOptions,
    model: options.Model = "mini",
    chat_template: options.ChatTemplate = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start again in a folder that holds another evaluation.")
    ] = False,
    head_sets: options.HeadSets = None,
    json: options.Json = False,
) -> None:
    """Measure what steering does to a model on your data, against its baselines; write a report."""
    require_extra()
    if asked.checkpoints:
        others = {"model": model != "mini", "chat_template": chat_template, "head_sets": head_sets}
        _refuse_unused(asked, wanted, *(name for name, given in others.items() if given))
        _report(_measure_checkpoints(out, asked, wanted, loading, overwrite=force), as_json=json)
        return
    from juice.evaluation.run import evaluate_data, read_templates, read_texts
    from juice.evaluation.splits import Data

    compared = asked.options(wanted)
    data = Data(
        _read(asked.data or ["mini"]),
        _other_split(asked.data, asked.validation, "validation"),
        _other_split(asked.data, asked.examples, "identification"),
        read_texts(asked.text, model),
        read_templates(asked.templates),
    )
    loaded = options.in_chat(options.load(model, loading, head_sets), chat_template, data.test)
    compared = compared.model_copy(update={"head_set": _served(loaded, wanted.head_set)})
    store = evaluate_data(loaded, data, compared, out, overwrite=force, progress=console.progress)
    _report(store, as_json=json)


def _refuse_unused(asked: Asked, wanted: EvaluationOptions, *others: str) -> None:
    """Raise UsageError for flags that say nothing where checkpoints are measured."""
    used = ("data", "checkpoints", "limit", "seed")
    given = [
        name
        for each in (asked, wanted)
        for name in each.changed(*(n for n in type(each).model_fields if n not in used))
    ]
    if unused := [f"--{name.replace('_', '-')}" for name in (*given, *others)]:
        raise UsageError(
            "--checkpoints measures how models that are not steered rely on the context of plain "
            f"prompts; leave {', '.join(unused)} out"
        )


def _measure_checkpoints(
    out: Path, asked: Asked, wanted: EvaluationOptions, loading: LoadOptions, *, overwrite: bool
) -> Store:
    others = [
        name for name in LoadOptions.model_fields if name not in ("device", "dtype", "threads")
    ]
    if ignored := loading.changed(*others):
        named = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
        raise UsageError(f"--checkpoints are folders, measured whole on one device; drop {named}")
    from juice.evaluation.checkpoints import find_checkpoints, measure_checkpoints
    from juice.evaluation.splits import limited
    from juice.processor import use_threads

    options.quiet_libraries()
    use_threads(loading.threads)
    return measure_checkpoints(
        find_checkpoints(asked.checkpoints or ()),
        limited(_read(asked.data or ["mini"]), wanted.limit, wanted.seed),
        out,
        device=loading.device,
        dtype=loading.dtype,
        overwrite=overwrite,
        progress=console.progress,
    )


def _served(model: SteeredModel, given: str | None) -> str | None:
    """Return the name of a head set; one given as a folder is added to those of the model."""
    found = options.head_set_for(model, given)
    if found is None or isinstance(found, str):
        return found
    model.head_sets.by_name[found.name] = found
    return found.name


def _read(sources: list[str], split: Split = "test") -> list[ConflictExample]:
    from juice.data.readers.sources import read_examples

    return [example for source in sources for example in read_examples(source, split=split)]


def _other_split(
    sources: list[str] | None, given: str | None, split: Literal["validation", "identification"]
) -> list[ConflictExample] | None:
    """Return the examples of an option of their own, else of a data set's folder, or None."""
    from juice.data.readers.sources import SPLIT_PARTS

    if given is not None:
        return _read([given], split)
    brought = [
        source
        for source in sources or ()
        if any(any(Path(source, at).glob(f"*{SPLIT_PARTS[split]}*")) for at in (".", "data"))
    ]
    return _read(brought, split) if brought else None


def _names(option: str, given: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in a comma-separated list, in the order of those known.

    `all` stands alone; `ph3` is both of its methods.
    """
    if given == "all":
        return known
    names = [name.strip() for name in given.split(",") if name.strip()]
    allowed = [*known, *(["ph3"] if "ph3_large" in known else [])]
    if unknown := [name for name in names if name not in allowed]:
        raise UsageError(f"{option} names {unknown[0]!r}; expected {', '.join(allowed)}")
    if not names:
        raise UsageError(f"{option} is empty; expected {', '.join(allowed)}")
    return tuple(n for n in known if n in names or (n.startswith("ph3") and "ph3" in names))


def _report(store: Store, *, as_json: bool) -> None:
    from juice.evaluation.report.sections import sections

    out, cached = store.folder, store.n_cached
    console.note(f"{store.n_computed} units of work computed, {cached} were already in {out}")
    if as_json:
        console.answer_json({"out": str(out), "files": store.files, "n_cached": cached})
        return
    for section in sections(store.results):
        if section.items:
            continue
        if section.level == 2 or section.in_terminal:
            console.answer("\n".join([section.title, *section.text[:3]]))
        if section.in_terminal:
            console.answer("\n".join(table.as_text() for table in section.tables))
    console.answer(f"{out / 'report.html'}")
