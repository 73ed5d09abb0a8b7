"""What the methods did toward one target: accuracy, averages, choices, text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from juice.evaluation.report import figures
from juice.evaluation.report.parts import Picture, Section, Table, number, percent, words
from juice.evaluation.report.published import differences, published, source
from juice.evaluation.report.verdicts import beyond_chance, verdict
from juice.evaluation.tables import AVERAGE
from juice.head_set import Betas
from juice.methods import Target

N_NAMED = 12
ANSWERS = {"parametric": "what the model remembers", "context": "what the prompt claims"}


def accuracy_section(
    results: Mapping[str, Any], target: Target, tables: Mapping[str, Any]
) -> Section:
    """Return accuracy by method and domain, with what it means."""
    domains = [d for d in next(iter(tables.values())) if d != AVERAGE]
    types = list(next(iter(tables.values()))[AVERAGE])
    columns = [AVERAGE, *domains]
    header = ["method", *map(words, columns)]
    rows = [
        [words(name), *(_cells(table[d], types) for d in columns)] for name, table in tables.items()
    ]
    model_id: str = results["identity"]["model"]["id"]
    printed = published(model_id, target)
    rows += [
        [
            f"{words(name)} (published)",
            *(_printed(own.get(d), types) for d in columns),
        ]
        for name, own in printed.items()
    ]
    text = [
        (
            f"Accuracy in percent: how often the answer is {ANSWERS[target]}. "
            f"Each cell: {' / '.join(types)}."
        ),
        *verdict(tables, types),
        *beyond_chance(results, target, tables, types),
    ]
    if printed:
        text.append(
            f"Published numbers: {source()}. The test facts, the heads and the validation split "
            f"differ from the authors'. {' '.join(differences(model_id, target))}"
        )
    picture = Picture(
        f"{target}-methods",
        f"Average accuracy by method toward the {target} answer",
        lambda: figures.methods(tables, target),
    )
    return Section(
        f"Toward the {target} answer", text=text, tables=[Table(header, rows)], pictures=[picture]
    )


def _cells(row: Mapping[str, Any], types: Sequence[str]) -> str:
    return " / ".join(percent(row[t]["accuracy"] if t in row else None) for t in types)


def _printed(own: Any, types: Sequence[str]) -> str:
    if own is None:
        return "–"
    return (
        " / ".join(f"{own[t]:.1f}" if t in own else "–" for t in types)
        if isinstance(own, dict)
        else f"{own:.1f}"
    )


def averages_section(target: str, tables: Mapping[str, Any]) -> Section:
    """Return the averages over the domains, with their intervals."""
    rows = []
    for name, table in tables.items():
        for conflict_type, c in table[AVERAGE].items():
            span = (
                f"{percent(c['interval'][0])}–{percent(c['interval'][1])}" if c["interval"] else "–"
            )
            numbers = [
                percent(c["accuracy"]),
                span,
                *(number(c[k]) for k in ("p_parametric", "p_context", "context_reliance")),
            ]
            rows.append([words(name), conflict_type, str(c["n"]), *numbers])
    header = (
        "method",
        "conflict",
        "n",
        "accuracy",
        "95 % interval",
        "p parametric",
        "p context",
        "M_C",
    )
    text = [
        (
            "p is the probability of the first token of an answer at the prompt's end, "
            "M_C = p context / (p context + p parametric), means over the domains. "
            "The interval is Wilson's, of this mean."
        ),
    ]
    return Section(f"Averages, {target}", level=3, text=text, tables=[Table(header, rows)])


def popularity_sections(own: Mapping[str, Any]) -> list[Section]:
    """Return accuracy by popularity; nothing where the data has none."""
    rows = [
        [
            words(name),
            f"{b['from']:g}–{b['to']:g}",
            str(b["n"]),
            " / ".join(percent(c["accuracy"]) for c in b["cells"].values()),
        ]
        for name, method in own["methods"].items()
        for b in method.get("by_popularity") or []
    ]
    return (
        [
            Section(
                "By popularity",
                level=3,
                tables=[Table(("method", "popularity", "n", "accuracy"), rows)],
            )
        ]
        if rows
        else []
    )


def choices_section(own: Mapping[str, Any]) -> Section:
    """Return what validation chose for each method and domain."""
    rows = []
    for name, method in own["methods"].items():
        for domain, choice in method["choice"].items():
            if "beta_plus" in choice:
                chosen = f"betas {choice['beta_plus']:+g} {choice['beta_minus']:+g}"
            elif "heads" in choice:
                chosen = (
                    f"{len(choice['heads'])} heads: "
                    f"{' '.join(f'L{h[0]}H{h[1]}' for h in choice['heads'])}"
                )
            else:
                continue
            tuned = choice["tuned_on"] or "nothing: the head set's own"
            rows.append(
                [
                    words(name),
                    words(domain),
                    chosen,
                    f"{words(tuned)} ({choice['n_validation']})",
                ]
            )
    text = [_described(part, head_set) for part, head_set in own.get("head_sets", {}).items()]
    return Section(
        "What validation chose",
        level=3,
        text=text,
        tables=[Table(("method", "domain", "choice", "tuned on"), rows)] if rows else [],
    )


def _described(part: str, head_set: Mapping[str, Any]) -> str:
    heads, betas = head_set["heads"], (head_set["beta"] or {}).get("juice")
    signed = {
        sign: " ".join(f"L{h[0]}H{h[1]}" for h in own[:N_NAMED])
        + (f" and {len(own) - N_NAMED} more" if len(own) > N_NAMED else "")
        for sign, own in heads.items()
    }
    tuned = f"betas {Betas.model_validate(betas)}; " if betas else ""
    return (
        f"Heads, {part}: + {signed['plus'] or 'none'}; - {signed['minus'] or 'none'}; {tuned}"
        f"scores {head_set['scores_sha256']}."
    )


def text_section(own: Mapping[str, Any]) -> Section:
    """Return what each method does to plain text and to longer answers."""
    rows = [
        [
            words(name),
            number(method.get("perplexity"), 2),
            number(going_on["mean_tokens"], 1),
            percent(going_on["ended"]),
            percent(going_on["repetition"]),
        ]
        for name, method in own["methods"].items()
        if (going_on := method.get("continuations"))
    ]
    text = [
        (
            "Perplexity is of plain text; tokens, answers that end by themselves and repeated "
            "3-grams (percent) are of answers of up to 64 tokens to conflict prompts."
        ),
    ]
    header = ("method", "perplexity", "tokens", "ended", "repetition")
    return Section("Text", level=3, text=text, tables=[Table(header, rows)])
