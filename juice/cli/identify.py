"""`juice identify`: find the heads of a model, tune their betas, save the head sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from juice.cli import console, options
from juice.errors import UsageError
from juice.methods import METHODS, Target
from juice.options import LoadOptions

if TYPE_CHECKING:
    from juice.head_set import HeadSet


@options.spelled_out
def run(
    loading: LoadOptions,
    model: options.Model = "mini",
    target: Annotated[
        Literal["parametric", "context", "both"], typer.Option(help="What the heads push toward.")
    ] = "both",
    examples: Annotated[str, typer.Option(help=options.SOURCES)] = "mini",
    n_examples: Annotated[
        int, typer.Option(help="Examples drawn to find heads on; the paper uses 4.")
    ] = 4,
    relation: Annotated[
        str | None, typer.Option(help="Draw examples of this relation only.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of what is drawn.")] = 0,
    top_k: Annotated[
        int, typer.Option(help="Heads of each sign: 5 up to about 3B parameters, 10 above.")
    ] = 5,
    alphas_plus: Annotated[
        str, typer.Option(help="Probing scales of the + heads.")
    ] = "1,3,5,10,30",
    alphas_minus: Annotated[str, typer.Option(help="Probing scales of the - heads.")] = "-1,-2,-5",
    validation: Annotated[
        str | None, typer.Option(help="Examples to tune the betas on; else 15% of those not drawn.")
    ] = None,
    tune: Annotated[bool, typer.Option("--tune/--no-tune", help="Tune the betas.")] = True,
    june: Annotated[
        bool, typer.Option("--june", help="Also tune the betas of the single run (JuNe).")
    ] = False,
    chat_template: options.ChatTemplate = None,
    name: Annotated[str | None, typer.Option(help="Name of the head set; else the target.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of head sets; the set is saved to OUT/<model>/<name>.")
    ] = Path("head_sets"),
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Find the heads that push a model toward its memory or its context; save them as head sets."""
    from juice.data.readers import read_examples
    from juice.head_set.naming import slug
    from juice.head_set.storage import check_writable
    from juice.identification import IdentificationOptions, identify_targets
    from juice.identification.drawing import usable_examples
    from juice.identification.run import check_name
    from juice.identification.scored_prompt import with_scored_answers
    from juice.identification.tuning import tune_all
    from juice.identification.validation import validation_share

    targets: list[Target] = ["parametric", "context"] if target == "both" else [target]
    if name is not None and len(targets) > 1:
        raise UsageError(
            "--name names one head set; give --target parametric or --target context with it"
        )
    how = IdentificationOptions(
        n_examples=n_examples,
        top_k=top_k,
        seed=seed,
        relation=relation,
        alphas_plus=options.numbers("--alphas-plus", alphas_plus),
        alphas_minus=options.numbers("--alphas-minus", alphas_minus),
    )
    names: dict[Target, str] = {t: name or t for t in targets}
    for chosen in names.values():
        check_name(chosen)
    folders = {t: out / slug(model) / names[t] for t in targets}
    for folder in folders.values():
        check_writable(folder, overwrite=force)
    pool = read_examples(examples, split="identification")
    loaded = options.in_chat(options.load(model, loading), chat_template)
    pool = with_scored_answers(loaded, pool)
    drawn, rest = usable_examples(loaded, pool, how)
    found = identify_targets(loaded, drawn, targets, how, names=names, progress=console.progress)
    if tune:
        given = (
            with_scored_answers(loaded, read_examples(validation, split="validation"))
            if validation
            else validation_share(rest, seed)
        )
        found = tune_all(
            loaded,
            found,
            given,
            methods=METHODS if june else ("juice",),
            progress=console.progress,
        )
    for t, head_set in found.items():
        head_set.save(folders[t], overwrite=force)
    _report(found, folders, as_json=json)


def _report(found: dict[Target, HeadSet], folders: dict[Target, Path], *, as_json: bool) -> None:
    if as_json:
        console.answer_json(
            [{"path": str(folders[t]), **s.model_dump(mode="json")} for t, s in found.items()]
        )
        return
    for target, head_set in found.items():
        betas = head_set.betas()
        console.answer(f"{folders[target]}")
        for sign, heads in (("+", head_set.heads.plus), ("-", head_set.heads.minus)):
            console.answer(f"  {sign} heads  {' '.join(map(str, heads)) or 'none'}")
        console.answer(f"  betas    {f'{betas.plus:+g} {betas.minus:+g}' if betas else 'untuned'}")
        accuracy = head_set.metrics.get("validation_juice")
        if accuracy:
            for conflict_type, value in accuracy["accuracy"].items():
                before = accuracy["accuracy_unsteered"][conflict_type]
                console.answer(
                    f"  {conflict_type:13}{before:.2f} -> {value:.2f}  ({target} answer, "
                    f"{accuracy['n_examples']} validation facts)"
                )
