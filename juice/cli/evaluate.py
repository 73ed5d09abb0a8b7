"""`juice evaluate`: the paper's evaluation: methods, baselines, side effects and analyses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from juice.cli import console, options
from juice.errors import UsageError
from juice.options import LoadOptions

if TYPE_CHECKING:
    from juice.data.example import ConflictExample
    from juice.data.readers.source import Split
    from juice.evaluation.methods import MethodName
    from juice.evaluation.store import Store
    from juice.methods import Target
    from juice.steered_model import SteeredModel


@options.spelled_out
def run(
    out: Annotated[
        Path,
        typer.Option(help="Folder of the report; an evaluation that is already there is resumed."),
    ],
    loading: LoadOptions,
    model: options.Model = "mini",
    data: Annotated[
        list[str] | None,
        typer.Option(help="Examples to test on: a file, a folder, a data set, `mini`. Repeatable."),
    ] = None,
    target: Annotated[
        Literal["parametric", "context", "both"], typer.Option(help="Whose answer counts as right.")
    ] = "both",
    head_set: Annotated[
        str | None,
        typer.Option(
            help=(
                "A head set: its name, folder or scores file; "
                "else the one named like the target, else found now."
            )
        ),
    ] = None,
    examples: Annotated[
        str | None, typer.Option(help="Examples to find heads on; else some of the data.")
    ] = None,
    validation: Annotated[
        str | None, typer.Option(help="Examples to tune on; else 15% of the data.")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help=(
                "`all`, or some of: original, prompt, cad, adacad, ph3 (large and small), june, "
                "juice, served_once, served, learned, question, gated, gated_apart."
            )
        ),
    ] = "all",
    analyses: Annotated[
        str,
        typer.Option(
            help=(
                "`all`, `none`, or some of: heads, reversals, running_once, knock_outs, "
                "robustness, paraphrases, seeds, seeds_learned, seeds_probe, stability."
            )
        ),
    ] = "none",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Facts to test on, spread over the relations.")
    ] = None,
    relation: Annotated[
        str | None,
        typer.Option(
            help="Find heads on examples of this relation only; all relations are tested."
        ),
    ] = None,
    n_examples: Annotated[
        int, typer.Option(min=1, help="Examples that the paper's heads are found on.")
    ] = 4,
    top_k: Annotated[
        int,
        typer.Option(min=1, help="Heads of each sign that they choose: 5 up to about 3B."),
    ] = 5,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
    seeds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Repeat with this many seeds, from --seed on: mean, interval and worst.",
        ),
    ] = 1,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Plain text for perplexity, one text per line; else one that comes with JuICE."
        ),
    ] = None,
    templates: Annotated[
        Path | None,
        typer.Option(help="Templates of paraphrased prompts (JSON); else those of six relations."),
    ] = None,
    checkpoints: Annotated[
        list[Path] | None,
        typer.Option(
            help="Measure context reliance over these checkpoints instead of methods. Repeatable."
        ),
    ] = None,
    chat_template: options.ChatTemplate = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start again in a folder that holds another evaluation.")
    ] = False,
    head_sets: options.HeadSets = None,
    json: options.Json = False,
) -> None:
    """Measure what steering does to a model on your data, against its baselines; write a report."""
    from juice.evaluation.analyses import ANALYSES
    from juice.evaluation.checkpoints import find_checkpoints, measure_checkpoints
    from juice.evaluation.evaluate import evaluate
    from juice.evaluation.methods import METHODS, methods_for
    from juice.evaluation.report import require_extra
    from juice.evaluation.sources import read_templates, read_texts
    from juice.evaluation.splits import limited

    require_extra()
    test = _read(data or ["mini"])
    if checkpoints and seeds > 1:
        raise UsageError("--checkpoints measures nothing that a seed finds; leave --seeds out")
    if checkpoints and chat_template is not None:
        raise UsageError("--checkpoints measures plain prompts; leave --chat-template out")
    if checkpoints:
        _check_whole(loading)
        options.quiet_libraries()
        store = measure_checkpoints(
            find_checkpoints(checkpoints),
            limited(test, limit, seed),
            out,
            device=loading.device,
            dtype=loading.dtype,
            overwrite=force,
            progress=console.progress,
        )
        _report(store, as_json=json)
        return
    asked = METHODS if methods == "all" else _names("--methods", methods, [*METHODS, "ph3"])
    chosen: tuple[MethodName, ...] = tuple(
        name for name in METHODS if name in asked or (name.startswith("ph3") and "ph3" in asked)
    )
    wanted = (
        ()
        if analyses == "none"
        else (
            tuple(ANALYSES) if analyses == "all" else _names("--analyses", analyses, list(ANALYSES))
        )
    )
    targets: tuple[Target, ...] = ("parametric", "context") if target == "both" else (target,)
    if not any(methods_for(t, chosen) for t in targets):
        raise UsageError(
            "cad and adacad steer toward the context only; choose --target context, or other "
            "--methods"
        )
    texts, own_templates = read_texts(text, model), read_templates(templates)
    to_tune = _other_split(data, validation, "validation")
    to_find = _other_split(data, examples, "identification")
    loaded = options.in_chat(options.load(model, loading, head_sets), chat_template, test)
    store = evaluate(
        loaded,
        test,
        out,
        targets=targets,
        methods=chosen,
        analyses=wanted,
        head_set=_served(loaded, head_set),
        validation=to_tune,
        identification=to_find,
        limit=limit,
        n_examples=n_examples,
        top_k=top_k,
        relation=relation,
        seed=seed,
        n_seeds=seeds,
        texts=texts,
        templates=own_templates,
        overwrite=force,
        progress=console.progress,
    )
    _report(store, as_json=json)


def _served(model: SteeredModel, given: str | None) -> str | None:
    """Return the name of a head set; one given as a folder is added to those of the model."""
    found = options.head_set_for(model, given)
    if found is None or isinstance(found, str):
        return found
    model.head_sets.by_name[found.name] = found
    return found.name


def _read(sources: list[str], split: Split = "test") -> list[ConflictExample]:
    from juice.data.readers import read_examples

    return [example for source in sources for example in read_examples(source, split=split)]


def _other_split(
    sources: list[str] | None, given: str | None, split: Literal["validation", "identification"]
) -> list[ConflictExample] | None:
    """Return the examples of another split than the test's; None where there are none.

    They come from their own option, or from the files of a data set's folder.
    """
    from juice.data.readers.source import SPLIT_PARTS

    if given is not None:
        return _read([given], split)
    brought = [
        source
        for source in sources or ()
        if any(any(Path(source, at).glob(f"*{SPLIT_PARTS[split]}*")) for at in (".", "data"))
    ]
    return _read(brought, split) if brought else None


def _names(option: str, given: str, known: list[str]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"{option} names {unknown[0]!r}; expected {', '.join(known)}")
    if not names:
        raise UsageError(f"{option} is empty; expected {', '.join(known)}")
    return names


def _check_whole(loading: LoadOptions) -> None:
    """Raise UsageError for options that checkpoints are not loaded with."""
    ignored = loading.changed(
        "device_map",
        "offload_folder",
        "quantization",
        "allow_approximate",
        "allow_unverified",
        "revision",
        "attn_implementation",
    )
    if ignored:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
        raise UsageError(f"--checkpoints are folders, measured whole on one device; drop {named}")


def _report(store: Store, *, as_json: bool) -> None:
    from juice.evaluation.report.sections import sections
    from juice.evaluation.store import FILE

    console.note(
        f"{store.n_computed} units of work computed, {store.n_cached} were already in "
        f"{store.folder}"
    )
    if as_json:
        console.answer_json(
            {
                "out": str(store.folder),
                "files": [
                    *(FILE, "report.md", "report.html"),
                    *sorted(table.name for table in store.folder.glob("*.csv")),
                ],
                "n_cached": store.n_cached,
            }
        )
        return
    for section in sections(store.results):
        if section.items:
            continue
        if section.level == 2 or section.in_terminal:
            console.answer("\n".join([section.title, *section.text[:3]]))
        if section.in_terminal:
            console.answer("\n".join(table.as_text() for table in section.tables))
    console.answer(f"{store.folder / 'report.html'}")
