"""A head set for people: its facts as lines, its scores as a picture, all of it as a page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from juice.errors import UsageError
from juice.files import check_writable
from juice.methods import METHODS

if TYPE_CHECKING:
    from juice.head_set import HeadSet


def check_page(path: Path, *, overwrite: bool) -> None:
    """Raise an error, before any work is done, if no page can be made or written there."""
    from juice.evaluation.report import require_extra

    require_extra()
    check_writable(path, overwrite=overwrite)


def write_page(path: Path, head_sets: Sequence[HeadSet], *, overwrite: bool) -> None:
    """Write one page about head sets of a model; it needs nothing else.

    Raises OutputError where it cannot be written.
    """
    from juice.evaluation.report.parts import Section
    from juice.evaluation.report.render import write_page as write

    first = Section(f"Head sets of {head_sets[0].model.id}")
    write(path, [first, *map(_section, head_sets)], overwrite=overwrite)


def _section(head_set: HeadSet) -> Any:
    from juice.evaluation.report.parts import Picture, Section, Table

    tables = [Table(("", ""), facts(head_set))]
    if measured := head_set.validation():
        before, after = measured.accuracy_unsteered, measured.accuracy
        rows = [(kind, f"{before[kind]:.2f}", f"{value:.2f}") for kind, value in after.items()]
        rows += [
            (f"{kind} (should not change)", f"{was:.2f}", f"{now:.2f}")
            for kind, (was, now) in measured.side_effects.items()
            if kind not in after
        ]
        tables.append(Table((f"{head_set.target} answers", "unsteered", "steered"), rows))
    pictures = []
    if head_set.scores is not None:
        caption = f"Head scores; dots are the chosen heads toward {head_set.target}"
        pictures.append(Picture(f"scores_{head_set.name}", caption, partial(figure_of, head_set)))
    return Section(head_set.name, tables=tables, pictures=pictures)


def figure_of(head_set: HeadSet) -> Any:
    """Draw the scores of a head set that has some; raises UsageError without matplotlib."""
    from juice.evaluation.report import figures

    scores = head_set.scores
    assert scores is not None
    tables = {
        "kind": scores.kind,
        "conflict_types": scores.conflict_types,
        "plus": scores.plus.tolist(),
        "minus": scores.minus.tolist(),
        "chosen": head_set.heads.model_dump(mode="json"),
    }
    try:
        figure = figures.heads(tables, head_set.target)
    except ImportError as error:
        raise UsageError(
            "plots need matplotlib; install it with: pip install 'juice-steering[eval]'"
        ) from error
    figure.suptitle(f"{head_set.model.id}: heads toward {head_set.target} (dots: chosen)")
    return figure


def facts(head_set: HeadSet) -> list[tuple[str, str]]:
    """Return what is in a head set, as names and values."""
    model, found = head_set.model, head_set.identification
    lines = [
        ("name", f"{head_set.name}, toward {head_set.target}"),
        (
            "model",
            f"{model.id} ({model.architecture}, {model.n_layers} layers of {model.n_heads} heads)",
        ),
        ("fingerprint", model.fingerprint or "none: matched by architecture and shape"),
        ("+ heads", " ".join(map(str, head_set.heads.plus)) or "none"),
        ("- heads", " ".join(map(str, head_set.heads.minus)) or "none"),
    ]
    for method in METHODS:
        betas = head_set.betas(method)
        lines.append((f"{method} betas", str(betas) if betas else "untuned"))
    if found:
        alphas = " ".join(f"{alpha:g}" for alpha in (*found.alphas_plus, *found.alphas_minus))
        lines.append(
            (
                "identified on",
                (
                    f"{found.n_examples} examples, seed {found.seed}, by {found.method}"
                    f"{f' (alphas {alphas})' if alphas else ''}, "
                    f"{', '.join(found.conflict_types)}"
                ),
            )
        )
        lines.append(
            (
                "chat template",
                found.chat_template_sha256 or "none: identified on plain prompts",
            )
        )
    if head_set.source:
        lines.append(("source", head_set.source))
    for method in METHODS:
        if measured := head_set.validation(method):
            changes = ", ".join(
                f"{t} {measured.accuracy_unsteered[t]:.2f} -> {after:.2f}"
                for t, after in measured.accuracy.items()
            )
            lines.append(
                (
                    f"{method} did",
                    f"{changes} ({head_set.target} answer, {measured.n_examples} validation facts)",
                )
            )
        if gate := head_set.gate(method):
            lines += [(f"{method} gate", str(rule)) for rule in gate.rules]
    return lines
