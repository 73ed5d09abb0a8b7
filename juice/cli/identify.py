"""`juice identify`: find the heads of a model, tune their betas, save the head sets."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from juice.cli import console, options
from juice.cli.head_set_page import check_page, write_page
from juice.errors import JuiceError, UsageError
from juice.methods import METHODS, Method, Target
from juice.options import LoadOptions

if TYPE_CHECKING:
    from juice.head_set import HeadSet, ModelIdentity


@options.spelled_out
def run(
    loading: LoadOptions,
    model: options.Model = "mini",
    target: Annotated[
        Literal["parametric", "context", "both"], typer.Option(help="What the heads push toward.")
    ] = "both",
    examples: Annotated[str, typer.Option(help=options.SOURCES)] = "mini",
    method: Annotated[
        Literal["attribution", "learned", "probe"],
        typer.Option(
            help="attribution (by gradients), learned (a beta for each head), or probe (the "
            "paper's way, with its alphas and its grid)."
        ),
    ] = "attribution",
    n_examples: Annotated[
        int | None,
        typer.Option(
            help="Examples drawn to find heads on; else 16, at most half of them; 4 for probes."
        ),
    ] = None,
    relation: Annotated[
        str | None, typer.Option(help="Draw examples of this relation only.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of what is drawn.")] = 0,
    top_k: Annotated[
        int | None,
        typer.Option(help="Heads of each sign; else 3, 5 and 10 compete; 5 for probes."),
    ] = None,
    alphas_plus: Annotated[
        str, typer.Option(help="Probing scales of the + heads.")
    ] = "1,3,5,10,30",
    alphas_minus: Annotated[
        str, typer.Option(help="The same of the - heads; write it with `=`.")
    ] = "-1,-2,-5",
    validation: Annotated[
        str | None,
        typer.Option(help="Examples to tune the betas on; else 40 of those not drawn."),
    ] = None,
    penalty: Annotated[
        float | None,
        typer.Option(help="What a learned beta of 1 costs, in nats; else 0.02. Fewer heads above."),
    ] = None,
    protect: Annotated[
        str,
        typer.Option(
            help="What tuning keeps steering from breaking: unknown (prompts whose context is all "
            "there is), clean (prompts without one), or none."
        ),
    ] = "unknown,clean",
    accepted_loss: Annotated[
        float, typer.Option(help="The share of these that may break at no cost.")
    ] = 0.1,
    tune: Annotated[bool, typer.Option("--tune/--no-tune", help="Tune the betas.")] = True,
    june: Annotated[
        bool, typer.Option("--june", help="Also tune the betas of the single run (JuNe).")
    ] = False,
    chat_template: options.ChatTemplate = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the head set, of one target; else the target.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of head sets; the set is saved to `OUT/<model>/<name>`.")
    ] = Path("head_sets"),
    html: options.Html = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite a set, and save one whose gain is uncertain.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Find the heads that push a model toward its memory or its context; save them as head sets."""
    from juice.data.example import examples_sha256
    from juice.data.readers import read_examples
    from juice.head_set.naming import slug
    from juice.head_set.writing import check_writable
    from juice.identification import IdentificationOptions
    from juice.identification.drawing import usable_examples
    from juice.identification.protection import Protection
    from juice.identification.recipe import find_head_sets
    from juice.identification.run import check_name
    from juice.identification.scored_prompt import with_scored_answers
    from juice.identification.unfinished import UnfinishedFile
    from juice.identification.validation import N_TUNED_ON, validation_share
    from juice.version import versions

    targets: list[Target] = ["parametric", "context"] if target == "both" else [target]
    if name is not None and len(targets) > 1:
        raise UsageError(
            "--name names one head set; give --target parametric or --target context with it"
        )
    how = IdentificationOptions(
        method=method,
        n_examples=n_examples,
        top_k=top_k,
        seed=seed,
        relation=relation,
        penalty=penalty,
        alphas_plus=options.numbers("--alphas-plus", alphas_plus),
        alphas_minus=options.numbers("--alphas-minus", alphas_minus),
    )
    kinds = () if protect == "none" else tuple(protect.split(","))
    protection = Protection(kinds=kinds, accepted=accepted_loss)  # type: ignore[arg-type]
    names: dict[Target, str] = {t: name or t for t in targets}
    for chosen in names.values():
        check_name(chosen)
    folders = {t: out / slug(model) / names[t] for t in targets}
    for folder in folders.values():
        check_writable(folder, overwrite=force)
    if html is not None:
        check_page(html, overwrite=force)
    pool = read_examples(examples, split="identification")
    loaded = options.in_chat(options.load(model, loading), chat_template, pool)
    pool = with_scored_answers(loaded, pool)
    drawn, rest = usable_examples(loaded, pool, how)
    given = (
        with_scored_answers(loaded, read_examples(validation, split="validation"))
        if validation
        else validation_share(rest, seed, n=N_TUNED_ON)
    )
    methods: tuple[Method, ...] = METHODS if june else ("juice",)
    unfinished = UnfinishedFile(
        # Beside the folder of head sets: one that holds none would hide the shipped ones.
        out.parent / f".juice-identify-{slug(model)}-{'-'.join(names[t] for t in targets)}.json",
        {
            "model": loaded.description.identity.model_dump(mode="json"),
            "dtype": loaded.description.dtype,
            "quantization": loaded.description.quantization,
            "exact": loaded.description.exact,
            "targets": targets,
            "chat_template": loaded.prompts.sha256,
            "drawn": examples_sha256(drawn),
            "validation": examples_sha256(given),
            "options": asdict(how),
            "protection": asdict(protection),
            "methods": methods,
            "versions": versions(),
        },
    )
    found = find_head_sets(
        loaded,
        drawn,
        targets,
        how,
        names=names,
        validation=given,
        methods=methods,
        tunes=tune,
        protection=protection,
        progress=console.progress,
        unfinished=unfinished,
    )
    if unfinished.n_found:
        console.note(f"juice: {unfinished.n_found} results came from an interrupted run")
    weak = {} if force else {t: s for t, s in found.items() if _is_weak(s)}
    saved = {t: s for t, s in found.items() if t not in weak}
    for t, head_set in saved.items():
        head_set.save(folders[t], overwrite=force)
    if html is not None:
        write_page(html, list(found.values()), overwrite=force)
    unfinished.remove()
    _report(found, folders, as_json=json)
    if saved:
        _say_what_serves(out, loaded.description.identity, {names[t] for t in saved})
    if weak:
        raise JuiceError(
            f"{' and '.join(names[t] for t in weak)}: not saved, because the gain is not certainly "
            "above zero; give more examples or another --seed, or save it all the same with --force"
        )


def _is_weak(head_set: HeadSet) -> bool:
    measured = head_set.validation()
    return measured is not None and measured.is_weak


def _report(found: dict[Target, HeadSet], folders: dict[Target, Path], *, as_json: bool) -> None:
    if as_json:
        console.answer_json(
            [{"path": str(folders[t]), **s.model_dump(mode="json")} for t, s in found.items()]
        )
        return
    for target, head_set in found.items():
        console.answer(f"{folders[target]}")
        for sign, heads in (("+", head_set.heads.plus), ("-", head_set.heads.minus)):
            console.answer(f"  {sign} heads  {' '.join(map(str, heads)) or 'none'}")
        console.answer(f"  betas    {head_set.betas() or 'untuned'}")
        measured = head_set.validation()
        if measured is None:
            continue
        for conflict_type, value in measured.accuracy.items():
            before = measured.accuracy_unsteered[conflict_type]
            console.answer(f"  {conflict_type:13}{before:.2f} -> {value:.2f}")
        for kind, (before, after) in measured.side_effects.items():
            if kind not in measured.accuracy:
                console.answer(f"  {kind:13}{before:.2f} -> {after:.2f}  (should not change)")
        if measured.gain is not None and measured.gain_interval is not None:
            low, high = measured.gain_interval
            console.answer(
                f"  gain         {measured.gain:+.2f} [{low:+.2f}, {high:+.2f}]  ({target} answers "
                f"to {measured.n_examples} validation facts in conflict)"
                f"{': weak' if measured.is_weak else ''}"
            )
        gate = head_set.gate()
        for rule in gate.rules if gate else ("none: no signal tells well when to steer",):
            console.answer(f"  gate         {rule}")


def _say_what_serves(out: Path, model: ModelIdentity, saved: set[str]) -> None:
    """Tell which sets serve now, and which shipped ones no longer do."""
    from juice.head_set.library import HeadSetLibrary
    from juice.head_set.lookup import find_folder, shipped_folder

    names, is_trusted = ", ".join(sorted(saved)), model.fingerprint is None
    if is_trusted:
        console.note(
            f"juice: {model.id} has no fingerprint that {names} could be known to fit by: serve "
            "them with --allow-unverified"
        )
    if find_folder(None).resolve() != out.resolve():
        console.note(f"juice: serve {names} with --head-sets {out}")
        return
    here = HeadSetLibrary.scan(out, model, allow_unverified=is_trusted).by_name
    shipped = HeadSetLibrary.scan(shipped_folder(), model).by_name
    if out.resolve() == shipped_folder().resolve():
        return
    console.note(f"juice: {names} of {model.id} now come from {out.resolve()}")
    if replaced := sorted(saved & shipped.keys()):
        console.note(
            f"juice: they replace {', '.join(replaced)} as shipped with JuICE, wherever juice is "
            f"run in this folder; remove {out} to have those again"
        )
    if hidden := sorted(shipped.keys() - here.keys()):
        console.note(
            f"juice: {out} has no {', '.join(hidden)}, so the shipped one no longer serves here; "
            f"identify it too, or copy it from {shipped_folder()}"
        )
