"""Each analysis in words and in a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from juice.evaluation.report.parts import number, percent, words

Described = tuple[list[str], Sequence[str], list[list[str]]]


def _head(head: Sequence[int]) -> str:
    return f"L{head[0]}H{head[1]}"


def _heads(result: Mapping[str, Any], target: str) -> Described:
    text = (
        f"What scaling a head does to p of the {target} answer, mean over {result['n_examples']} "
        f"examples and the alphas {', '.join(f'{a:g}' for a in result['alphas'])}; "
        "dots mark the chosen heads."
    )
    return [text], (), []


def _reversals(result: Mapping[str, Any], target: str) -> Described:  # noqa: ARG001
    n, consistent = result["n_heads"], result["n_consistent"]
    text = [
        (
            "The heads whose removal raises p of the context answer most under substitution, on "
            f"{result['n_examples']} facts. {result['n_reversed']} of the {len(result['rows'])} "
            "change the sign of an effect under coherent conflict."
        ),
        (
            f"Of all {n} heads, {consistent['context']} have an effect of one sign on the context "
            "answer under both conflict types, "
            f"{consistent['parametric']} on the parametric answer."
        ),
    ]
    header = (
        "head",
        "substitution: context",
        "parametric",
        "coherent: context",
        "parametric",
        "turns",
    )
    rows = [
        [
            _head(r["head"]),
            *(
                f"{r[t][a]:+.3f}"
                for t in ("substitution", "coherent")
                for a in ("context", "parametric")
            ),
            "yes" if r["is_reversed"] else "",
        ]
        for r in result["rows"]
    ]
    return text, header, rows


def _running_once(result: Mapping[str, Any], target: str) -> Described:
    text = [
        (
            f"Mean p of the {target} answer on {result['n_examples']} facts when the best heads, "
            f"ranked one by one on {result['n_finders']} other facts, are removed together."
        ),
    ]
    rows = []
    for conflict_type, own in result["by_type"].items():
        for method in ("june", "juice"):
            values = [own["none"], *own[method]]
            shown = {i: f"{values[i]:.3f}" if i < len(values) else "–" for i in (0, 1, 3, 5, 10)}
            rows.append([conflict_type, "one" if method == "june" else "two", *shown.values()])
    return text, ("conflict", "runs", "none", "top 1", "top 3", "top 5", "top 10"), rows


def _knock_outs(result: Mapping[str, Any], target: str) -> Described:  # noqa: ARG001
    n_layers = len(next(iter(result["changes"].values()))["mlp"]["mean"])
    counts = ", ".join(f"{name} {n}" for name, n in result["n_consistent"].items())
    text = (
        f"The change of p of the parametric answer on {result['n_examples']} facts when a layer's "
        "component is removed; the shaded band is one standard deviation over the facts. "
        f"Layers, of {n_layers}, whose removal helps under every conflict type: {counts}."
    )
    return [text], (), []


def _robustness(result: Mapping[str, Any], target: str) -> Described:  # noqa: ARG001
    beta = result["beta"]
    text = (
        f"Accuracy averaged over the conflict types, {result['n_examples']} facts "
        f"({result['betas']['n_examples']} for the betas), one thing varied at a time; "
        f"|D| and K with betas {beta['plus']:+g} {beta['minus']:+g}. "
        f"Unsteered: {100 * result['unsteered']:.1f}."
    )
    rows = [
        ["examples |D|", *(f"{r['n']}: {100 * r['accuracy']:.1f}" for r in result["examples"])],
        ["heads K", *(f"{r['k']}: {100 * r['accuracy']:.1f}" for r in result["heads"])],
    ]
    width = max(map(len, rows))
    return (
        [text],
        ("varied", *([""] * (width - 1))),
        [row + [""] * (width - len(row)) for row in rows],
    )


def _paraphrases(result: Mapping[str, Any], target: str) -> Described:  # noqa: ARG001
    tables = result["methods"]
    domains = list(next(iter(tables.values())))
    example = result["example"].get("substitution", "")
    text = [
        f"{result['n_examples']} facts, each prompt in a template drawn at random. For example: "
        f"“{example}”"
    ]
    rows = [
        [
            name,
            *(" / ".join(f"{100 * c['accuracy']:.1f}" for c in table[d].values()) for d in domains),
        ]
        for name, table in tables.items()
    ]
    return text, ("method", *map(words, domains)), rows


def _seeds(result: Mapping[str, Any], target: str) -> Described:
    low, high = result["interval"]
    text = [
        f"How often {result['n_examples']} facts get the {target} answer under conflict, with the "
        f"head set that each seed finds by {result['way']} and tunes on facts that are not tested "
        f"on; percent. Unsteered: {percent(result['unsteered'])}.",
        f"Mean {percent(result['mean'])} ({percent(low)}–{percent(high)}, over the facts), worst "
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


def _stability(result: Mapping[str, Any], target: str) -> Described:  # noqa: ARG001
    text = [
        (
            f"Head sets (K = {result['top_k']}) of {result['n_draws']} draws of |D| examples from "
            f"{result['n_pool']}: the mean overlap of two of them, |A and B| / |A or B|, "
            "and that of heads drawn at random. "
            "Large draws from the same pool share examples, which raises it."
        ),
    ]
    rows = []
    for size, own in result["sizes"].items():
        values = [
            own["overlap"]["plus"],
            own["overlap"]["minus"],
            own["overlap"]["both"],
            own["by_chance"],
        ]
        rows.append([size, *(number(v, 2) for v in values), str(own["n_empty"])])
    return (
        text,
        ("examples |D|", "+ heads", "- heads", "both", "by chance", "draws without heads"),
        rows,
    )


# By analysis: its title, and what makes its sentences and its table's header and rows from a result
# and its target.
ANALYSES: dict[str, tuple[str, Callable[[Mapping[str, Any], str], Described]]] = {
    "heads": ("Head scores", _heads),
    "reversals": ("Heads that turn into their opposite", _reversals),
    "running_once": ("One run against two", _running_once),
    "knock_outs": ("Layers without MLP or attention", _knock_outs),
    "robustness": ("Robustness", _robustness),
    "paraphrases": ("Other templates", _paraphrases),
    "seeds": ("Ten seeds, by attribution", _seeds),
    "seeds_learned": ("Ten seeds, learned", _seeds),
    "seeds_probe": ("Ten seeds, by probes", _seeds),
    "stability": ("Stability of the head sets", _stability),
}
