"""The findings of each analysis: sentences, a table and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from juice.evaluation.report import figures
from juice.evaluation.report.parts import (
    Picture,
    Section,
    Table,
    between,
    head_name,
    number,
    percent,
    words,
)
from juice.formula import CONFLICTS

# Sentences, and the header and rows of a table.
Described = tuple[list[str], Sequence[str], list[list[str]]]
Result = Mapping[str, Any]


def finding(name: str, target: str, result: Result) -> Section:
    """Return the section of an analysis of one target."""
    subject, describe, draw = ANALYSES[name]
    title = f"{subject}, {target}"
    if "unavailable" in result:
        return Section(title, level=3, text=[f"Not available: {result['unavailable']}"])
    text, header, rows = describe(result, target)
    stem = f"{target}-{name.replace('_', '-')}"
    return Section(
        title,
        level=3,
        text=text,
        tables=[Table(header, rows)] if rows else [],
        pictures=[Picture(stem, title, partial(draw, result, target))] if draw else [],
    )


def _heads(result: Result, target: str) -> Described:
    alphas = ", ".join(f"{alpha:g}" for alpha in result["alphas"])
    text = (
        f"What scaling a head does to p of the {target} answer, mean over {result['n_examples']} "
        f"examples and the alphas {alphas}; dots mark the chosen heads."
    )
    return [text], (), []


def _reversals(result: Result, target: str) -> Described:  # noqa: ARG001
    consistent = result["n_consistent"]
    text = [
        "The heads whose removal raises p of the context answer most under substitution, on "
        f"{result['n_examples']} facts. {result['n_reversed']} of the {len(result['rows'])} "
        "change the sign of an effect under coherent conflict.",
        f"Of all {result['n_heads']} heads, {consistent['context']} have an effect of one sign on "
        "the context answer under both conflict types, "
        f"{consistent['parametric']} on the parametric answer.",
    ]
    shown = [(t, answer) for t in CONFLICTS for answer in ("context", "parametric")]
    header = ["head", "substitution: context", "parametric", "coherent: context", "parametric"]
    rows = [
        [
            head_name(row["head"]),
            *(f"{row[t][answer]:+.3f}" for t, answer in shown),
            "yes" if row["is_reversed"] else "",
        ]
        for row in result["rows"]
    ]
    return text, [*header, "turns"], rows


def _running_once(result: Result, target: str) -> Described:
    text = (
        f"Mean p of the {target} answer on {result['n_examples']} facts when the best heads, "
        f"ranked one by one on {result['n_finders']} other facts, are removed together."
    )
    rows = []
    for conflict_type, found in result["by_type"].items():
        for runs, method in (("one", "june"), ("two", "juice")):
            p = dict(enumerate([found["none"], *found[method]]))
            rows.append([conflict_type, runs, *(number(p.get(i)) for i in (0, 1, 3, 5, 10))])
    return [text], ("conflict", "runs", "none", "top 1", "top 3", "top 5", "top 10"), rows


def _knock_outs(result: Result, target: str) -> Described:  # noqa: ARG001
    n_layers = len(next(iter(result["changes"].values()))["mlp"]["mean"])
    counts = ", ".join(f"{name} {n}" for name, n in result["n_consistent"].items())
    text = (
        f"The change of p of the parametric answer on {result['n_examples']} facts when a layer's "
        "component is removed; the shaded band is one standard deviation over the facts. "
        f"Layers, of {n_layers}, whose removal helps under every conflict type: {counts}."
    )
    return [text], (), []


def _robustness(result: Result, target: str) -> Described:  # noqa: ARG001
    beta = result["beta"]
    text = (
        f"Accuracy averaged over the conflict types, {result['n_examples']} facts "
        f"({result['betas']['n_examples']} for the betas), one thing varied at a time; "
        f"|D| and K with betas {beta['plus']:+g} {beta['minus']:+g}. "
        f"Unsteered: {percent(result['unsteered'])}."
    )
    rows = [
        [title, *(f"{row[x]}: {percent(row['accuracy'])}" for row in result[name])]
        for title, name, x in (("examples |D|", "examples", "n"), ("heads K", "heads", "k"))
    ]
    width = max(map(len, rows))
    padded = [row + [""] * (width - len(row)) for row in rows]
    return [text], ("varied", *([""] * (width - 1))), padded


def _paraphrases(result: Result, target: str) -> Described:  # noqa: ARG001
    tables = result["methods"]
    domains = list(next(iter(tables.values())))
    text = (
        f"{result['n_examples']} facts, each prompt in a template drawn at random. For example: "
        f"“{result['example'].get('substitution', '')}”"
    )
    rows = [
        [name, *(" / ".join(percent(c["accuracy"]) for c in table[d].values()) for d in domains)]
        for name, table in tables.items()
    ]
    return [text], ("method", *map(words, domains)), rows


def _seeds(result: Result, target: str) -> Described:
    text = [
        f"How often {result['n_examples']} facts get the {target} answer under conflict, with the "
        f"head set that each seed finds by {result['way']} and tunes on facts that are not tested "
        f"on; percent. Unsteered: {percent(result['unsteered'])}.",
        f"Mean {percent(result['mean'])} ({between(*result['interval'])}, over the facts), worst "
        f"{percent(result['worst'])}.",
        *(f"Seed {r['seed']}: {r['problem']}" for r in result["seeds"] if "problem" in r),
    ]
    rows = [
        [
            str(row["seed"]),
            percent(row["accuracy"]),
            " + ".join(map(str, row["heads"])) if "heads" in row else "none",
            row.get("betas", "–"),
        ]
        for row in result["seeds"]
    ]
    return text, ("seed", "accuracy", "heads, + and -", "betas"), rows


def _stability(result: Result, target: str) -> Described:  # noqa: ARG001
    text = (
        f"Head sets (K = {result['top_k']}) of {result['n_draws']} draws of |D| examples from "
        f"{result['n_pool']}: the mean overlap of two of them, |A and B| / |A or B|, "
        "and that of heads drawn at random. "
        "Large draws from the same pool share examples, which raises it."
    )
    header = ("examples |D|", "+ heads", "- heads", "both", "by chance", "draws without heads")
    rows = []
    for size, found in result["sizes"].items():
        values = [*(found["overlap"][sign] for sign in ("plus", "minus", "both"))]
        shown = (number(value, 2) for value in (*values, found["by_chance"]))
        rows.append([size, *shown, str(found["n_empty"])])
    return [text], header, rows


def _transfer(result: Result, target: str) -> Described:
    home, elsewhere = result["gain_at_home"], result["gain_elsewhere"]
    share = f": {percent(max(0.0, elsewhere / home))} % of it carries over" if home > 0 else ""
    low, high = result["interval"]
    if low > 0:
        told = "Find heads on examples of your own task"
    elif high < 0:
        told = "Heads found elsewhere help more"
    else:
        told = "These facts do not tell whether heads found elsewhere help less"
    text = [
        f"How often facts of each relation get the {target} answer under conflict, with the heads "
        f"that each relation finds by {result['way']}, on facts that are not tested on; percent.",
        f"Heads found on a relation gain {100 * home:+.1f} points there and {100 * elsewhere:+.1f} "
        f"on the others{share}. The difference is {100 * low:+.1f} to {100 * high:+.1f} (95 %), "
        f"fact by fact. {told}.",
        *(f"{a}: {row['problem']}" for a, row in result["found_on"].items() if "problem" in row),
    ]
    rows = {"none, unsteered": result["unsteered"]}
    rows |= {words(name): row["accuracy"] for name, row in result["found_on"].items()}
    rows |= {"served head set": result["served"]} if result["served"] else {}
    tested = list(result["n_examples"].items())
    header = ["heads found on", *(f"{words(name)} ({n})" for name, n in tested)]
    return text, header, [[a, *(percent(row[b]) for b, _ in tested)] for a, row in rows.items()]


# By analysis: its title; its sentences and table, from a result and its target; its picture.
ANALYSES: dict[str, tuple[str, Callable[[Result, str], Described], Callable[..., Any] | None]] = {
    "heads": ("Head scores", _heads, figures.heads),
    "reversals": ("Heads that turn into their opposite", _reversals, figures.reversals),
    "running_once": ("One run against two", _running_once, figures.running_once),
    "knock_outs": ("Layers without MLP or attention", _knock_outs, figures.knock_outs),
    "robustness": ("Robustness", _robustness, figures.robustness),
    "paraphrases": ("Other templates", _paraphrases, None),
    "seeds": ("Ten seeds, by attribution", _seeds, None),
    "seeds_learned": ("Ten seeds, learned", _seeds, None),
    "seeds_probe": ("Ten seeds, by probes", _seeds, None),
    "stability": ("Stability of the head sets", _stability, figures.stability),
    "transfer": ("From relation to relation, by attribution", _transfer, None),
    "transfer_learned": ("From relation to relation, learned", _transfer, None),
}
