"""The report's content, from results alone, section by section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from juice.evaluation.methods import METHODS
from juice.evaluation.report import figures
from juice.evaluation.report.analysis_tables import ANALYSES
from juice.evaluation.report.harm import harm_section
from juice.evaluation.report.items import items_section
from juice.evaluation.report.method_sections import (
    accuracy_section,
    averages_section,
    choices_section,
    popularity_sections,
    text_section,
)
from juice.evaluation.report.parts import Picture, Row, Section, Table, number
from juice.evaluation.report.seeds import seeds_section


def sections(results: Mapping[str, Any]) -> list[Section]:
    """Return the report's sections."""
    if "checkpoints" in results:
        return [_checkpoints(results)]
    made = [_setting(results)]
    for target, own in results.get("targets", {}).items():
        methods: dict[str, Any] = own.get("methods", {})
        tables: dict[str, Any] = {
            name: methods[name]["table"] for name in METHODS if "table" in methods.get(name, {})
        }
        if tables:
            optional = (seeds_section(results, target), harm_section(target, own))
            made += [
                accuracy_section(results, target, tables),
                *(section for section in optional if section),
                averages_section(target, tables),
                *popularity_sections(own),
                choices_section(own),
                text_section(own),
            ]
        for name, result in own.get("analyses", {}).items():
            made.append(_analysis(name, target, result))
    singles = (items_section(results, target) for target in results.get("targets", {}))
    return [*made, *(section for section in singles if section)]


def _setting(results: Mapping[str, Any]) -> Section:
    identity, data = results["identity"], results.get("data", {})
    model, versions = identity["model"], identity["versions"]
    rows = [
        (
            "model",
            (
                f"{model['id']} ({model['architecture']}, {model['n_layers']} layers of "
                f"{model['n_heads']} heads), {identity['dtype']}"
            ),
        ),
        ("fingerprint", str(model["fingerprint"])),
        *(
            [("chat template", f"sha256 {template}")]
            if (template := identity.get("chat_template_sha256"))
            else []
        ),
        (
            "test facts",
            f"{len(data.get('test', []))}"
            + (f", limited to {identity['limit']}" if identity["limit"] else ""),
        ),
        (
            "validation facts",
            f"{data.get('n_validation', 0)} that the model answers right on the clean prompt",
        ),
        *_finders(results),
        ("`ph3_large` found on", f"{data.get('n_large', 0)} facts"),
        *((f"left out: {reason}", str(n)) for reason, n in data.get("left_out", {}).items()),
        ("seed", str(identity["seed"])),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    notes = [f"Note: {note}" for note in results.get("notes", [])]
    return Section(f"Evaluation of {model['id']}", text=notes, tables=[Table(("", ""), rows)])


def _finders(results: Mapping[str, Any]) -> list[Row]:
    """Return what the heads were found on, or what is set aside where that is not known."""
    data = results.get("data", {})
    return [
        (
            (
                f"served heads toward {target} found on"
                if data.get("finders_are_known", {}).get(target)
                else f"set aside, {target}"
            ),
            ", ".join(names),
        )
        for target, names in data.get("identification", {}).items()
        if target in results.get("targets", {})
    ]


def _checkpoints(results: Mapping[str, Any]) -> Section:
    columns = (
        "clean_accuracy",
        "counterfactual_accuracy",
        "parametric_accuracy",
        "context_reliance",
        "attention_context",
        "attention_subject",
    )
    header = (
        "checkpoint",
        "clean",
        "counterfactual",
        "parametric",
        "M_C",
        "attention on context",
        "on subject",
    )
    rows = [
        [row["name"], *(number(row[column]) for column in columns)]
        for row in results["checkpoints"]
    ]
    reliance = [row["context_reliance"] or 0.0 for row in results["checkpoints"]]
    peak = max(range(len(reliance)), key=lambda i: reliance[i])
    name = results["checkpoints"][peak]["name"]
    if 0 < peak < len(reliance) - 1:
        summary = (
            f"Context reliance rises from {reliance[0]:.2f} to {reliance[peak]:.2f} at {name}, "
            f"then falls to {reliance[-1]:.2f}."
        )
    else:
        summary = (
            f"Context reliance is highest at the {'first' if peak == 0 else 'last'} checkpoint "
            f"({reliance[peak]:.2f}): no inversion."
        )
    text = [
        (
            f"{results['checkpoints'][0]['n']} conflict prompts, unsteered. "
            "Counterfactual: the context answer; parametric: the model's own; "
            "M_C = p context / (p context + p parametric), mean over the prompts; "
            "attention of the last token, mean over layers and heads."
        ),
        summary,
    ]
    picture = Picture(
        "checkpoints", "Context reliance over checkpoints", lambda: figures.checkpoints(results)
    )
    return Section(
        "Context reliance over checkpoints",
        text=text,
        tables=[Table(header, rows)],
        pictures=[picture],
    )


def _analysis(name: str, target: str, result: Mapping[str, Any]) -> Section:
    subject, describe = ANALYSES[name]
    title = f"{subject}, {target}"
    if "unavailable" in result:
        return Section(title, level=3, text=[f"Not available: {result['unavailable']}"])
    text, header, rows = describe(result, target)
    draw = getattr(figures, name, None)
    pictures = (
        [Picture(f"{target}-{name.replace('_', '-')}", title, lambda: draw(result, target))]
        if draw is not None
        else []
    )
    return Section(
        title,
        level=3,
        text=text,
        tables=[Table(header, rows)] if rows else [],
        pictures=pictures,
    )
