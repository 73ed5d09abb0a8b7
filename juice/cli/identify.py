"""`juice identify`: find the heads of a model, tune their betas, save the head sets."""

from __future__ import annotations

import warnings
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from juice.cli import console, options
from juice.cli.inspect import check_page, window, write_page
from juice.cli.tune import answer_effect
from juice.engine.load_options import LoadOptions
from juice.errors import JuiceError
from juice.identification.options import IdentificationOptions

if TYPE_CHECKING:
    from juice.head_set.head_set import HeadSet
    from juice.head_set.schema import ModelIdentity

N_SHOWN = 10  # heads of a sign
DEFAULTS = {"juice": "two runs (juice)", "june": "one run (june), which costs nothing to serve"}


@options.spelled_out
def run(
    how: IdentificationOptions,
    loading: LoadOptions,
    model: options.Model = "mini",
    examples: Annotated[
        str | None,
        typer.Option(
            help=f"{options.SOURCES} Else `memory`: what the model remembers of subjects that come "
            "with JuICE (the bundled model's own facts for that one)."
        ),
    ] = None,
    validation: Annotated[
        str | None,
        typer.Option(help="Examples to tune the betas on; else 48 of those not drawn."),
    ] = None,
    chat_template: options.ChatTemplate = None,
    out: options.OutFolder = Path("head_sets"),
    html: options.Html = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Overwrite a set, and save one that is weak or does harm."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Find the heads that push a model toward its memory or its context; save them as head sets."""
    from juice.data.readers.sources import prompts_without_answers, read_examples
    from juice.head_set.schema import slug
    from juice.head_set.storage import check_writable
    from juice.identification.find import MEMORY, check_name, find, pool_of

    folders = {name: out / slug(model) / name for name in how.names.values()}
    for name, folder in folders.items():
        check_name(name)
        check_writable(folder, overwrite=force)
    if html is not None:
        check_page(html, overwrite=force)
    given = []
    if examples not in (None, MEMORY) and not prompts_without_answers(examples):
        given = read_examples(examples, split="identification")
    held_out = None if validation is None else read_examples(validation, split="validation")
    loaded = options.in_chat(options.load(model, loading), chat_template, given)
    began = monotonic()
    pool = given or pool_of(loaded, examples, how, console.progress)
    found = find(
        loaded,
        pool,
        how,
        validation=held_out,
        progress=console.progress,
        # Beside the folder of head sets: one that holds none would hide the shipped ones.
        began=began,
        kept_in=out.parent / f".juice-identify-{slug(model)}-{'-'.join(folders)}.json",
    )
    for reason in found.unreached.values():
        warnings.warn(str(reason), stacklevel=2)
    if found.unfinished.n_found:
        console.note(f"juice: {found.unfinished.n_found} results came from an interrupted run")
    sets = list(found.head_sets.values())
    refused = {one.name: _why_not(one, how) for one in sets if not force}
    saved = [one for one in sets if not refused.get(one.name)]
    for head_set in saved:
        head_set.save(folders[head_set.name], overwrite=force)
    _report(sets, folders, refused, as_json=json)
    if html is not None:
        write_page(html, sets, overwrite=force)
    if len(saved) == len(sets):
        found.unfinished.remove()  # else --force takes up what was computed
    if saved:
        _say_what_serves(out, loaded.description.identity, {one.name for one in saved})
    if reasons := [f"{name}: not saved, because {why}" for name, why in refused.items() if why]:
        raise JuiceError(
            f"{'; '.join(reasons)}; give more examples or another --seed, or save it all the same "
            "with --force"
        )


def _why_not(head_set: HeadSet, how: IdentificationOptions) -> str:
    """Return the reason for which a head set is not saved; nothing where it is."""
    measured = head_set.validation()
    if measured is None:
        return ""
    if measured.is_weak:
        return "the gain is not certainly above zero"
    broken = measured.broken(how.accepted_loss)
    return " and ".join(
        f"it breaks {kind} prompts, which need no steering ({before:.2f} -> {after:.2f} right)"
        for kind, (before, after) in broken.items()
    )


def _report(
    sets: list[HeadSet], folders: dict[str, Path], refused: dict[str, str], *, as_json: bool
) -> None:
    if as_json:
        console.answer_json(
            [
                {
                    "path": str(folders[one.name]),
                    "saved": not refused.get(one.name),
                    "not_saved_because": refused.get(one.name) or None,
                    **one.model_dump(mode="json"),
                }
                for one in sets
            ]
        )
        return
    for head_set in sets:
        console.answer(f"{folders[head_set.name]}")
        for sign, heads in (("+", head_set.heads.plus), ("-", head_set.heads.minus)):
            more = f" and {len(heads) - N_SHOWN} more" if len(heads) > N_SHOWN else ""
            shown = " ".join(map(str, heads[:N_SHOWN])) or "none"
            console.answer(f"  {sign} heads  {shown}{more}")
        console.answer(f"  betas    {head_set.betas() or 'untuned'}")
        layers = window(head_set)
        cost = f" in {console.working_twice(layers, head_set.model.n_layers)}" if layers else ""
        console.answer(f"  default  {DEFAULTS[head_set.method]}{cost}")
        answer_effect(head_set, head_set.method)


def _say_what_serves(out: Path, model: ModelIdentity, saved: set[str]) -> None:
    """Tell which sets serve now, and which shipped ones no longer do."""
    from juice.head_set.library import HeadSetLibrary, find_folder, shipped_folder

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
