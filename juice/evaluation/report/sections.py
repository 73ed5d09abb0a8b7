"""The report's content, from results alone, section by section.

Published numbers of the paper's models stand beside ours (`data/published.json`: tables 5 and 6 of
"Taming Knowledge Conflicts in Language Models", ICML 2025).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from juice.evaluation.options import METHOD_NAMES
from juice.evaluation.report import figures
from juice.evaluation.report.findings import finding
from juice.evaluation.report.parts import (
    Item,
    Picture,
    Row,
    Section,
    Table,
    between,
    head_name,
    number,
    percent,
    words,
    write_report,
)
from juice.evaluation.results import (
    ACCURACY,
    AVERAGE,
    COLUMNS,
    Store,
    answers_of,
    measured,
    spread,
    write_tables,
)
from juice.formula import CONFLICT_TYPES, OTHER, Target
from juice.head_set.head_set import HeadSet
from juice.identification.outcomes import difference_interval

if TYPE_CHECKING:
    from pandas import DataFrame, Series

FEW = 10


def champion(methods: Sequence[str]) -> str | None:
    """Return the method that the verdict is about: the served head set, else the paper's JuICE."""
    return next((name for name in ("served", "juice") if name in methods), None)


def verdict(accuracy: DataFrame) -> list[str]:
    """Return plain sentences on whether ours is best, on average and cell by cell.

    `accuracy` is one target's rows of the table. Methods that answer only some of its prompts are
    left out: they had other facts.
    """
    shown = accuracy.pivot(
        index=["domain", "conflict_type"], columns="method", values=["n", "accuracy"]
    ).reindex(accuracy.set_index(["domain", "conflict_type"]).index.unique())
    shown = shown.reindex(columns=accuracy.method.unique(), level="method")
    n, shares = shown["n"].loc[AVERAGE], shown["accuracy"]
    ours = champion(shares.columns)
    if ours is None or shares.shape[1] < 2 or not (n[ours] > 0).all():
        return []
    shares = shares.loc[:, n.eq(n[ours], axis=0).all()]
    if n[ours].max() < FEW:
        return [f"{n[ours].max():.0f} facts are too few to tell methods apart."]
    if shares.shape[1] < 2:
        return []
    average = shares.loc[AVERAGE].mean()
    summary = f"On average over domains and conflict types {ours} has {percent(average[ours])}"
    others = average.drop(ours)
    second = others.idxmax()
    if others[second] > average[ours]:
        summary += f" and is **not** best: {words(second)} has {percent(others[second])}."
    elif others[second] == average[ours]:
        summary += f", as has {words(second)}: a tie for the best."
    else:
        summary += f" and is best; next comes {words(second)} with {percent(others[second])}."
    cells = shares[shares.index.get_level_values("domain") != AVERAGE].dropna(how="all")
    behind = [
        f"{words(domain)} {t} ({words(row.idxmax())} {percent(row.max())}, "
        f"{ours} {percent(row[ours])})"
        for (domain, t), row in cells.iterrows()
        if row[ours] < row.max()
    ]
    if not behind:
        return [summary, "No other method is ahead in any cell."]
    return [summary, f"Another method is ahead in {len(behind)} cells: {'; '.join(behind)}."]


def beyond_chance(answers: DataFrame, methods: Sequence[str]) -> list[str]:
    """Return sentences on whether methods differ by more than chance, with the intervals.

    Ours against the best other method, and two runs against one with the same heads, by one
    target's rows of the answers, of the conflict types that count.
    """
    ours = champion(methods)
    if ours is None or len(methods) < 2 or answers.fact.nunique() < FEW:
        return []
    # The share of a fact's prompts that were answered right, [fact, method].
    right = answers.assign(is_right=answers.is_right.astype(float)).pivot_table(
        index="fact", columns="method", values="is_right"
    )
    right = right[[name for name in methods if name in right]]
    asked = right[right[ours].notna()]
    others = asked.drop(columns=ours).dropna(axis=1).sum()
    best = [(ours, others.idxmax())] if len(others) else []
    relations = answers.groupby("fact").relation.first()
    pairs = dict.fromkeys([*best, ("served", "served_once"), ("juice", "june")])
    return [
        sentence
        for a, b in pairs
        if a in right and b in right and (sentence := _against(right, relations, a, b))
    ]


def _against(right: DataFrame, relations: Mapping[int, str], a: str, b: str) -> str | None:
    differences = (right[a] - right[b]).dropna()
    groups = differences.groupby(relations, dropna=False)
    interval = difference_interval(*(values.tolist() for _, values in groups))
    if interval is None:
        return None
    low, high = (100 * bound for bound in interval)
    how = "not apart by more than chance" if low <= 0 <= high else "ahead" if low > 0 else "behind"
    return f"{a} against {words(b)}, fact by fact: {how}, {low:+.1f} to {high:+.1f} points (95 %)."


ANSWERS = {"parametric": "what the model remembers", "context": "what the prompt claims"}
SITUATIONS = {
    "clean": "no context",
    "true_context": "true context",
    "irrelevant_context": "irrelevant context",
    "irrelevant_truth": "irrelevant truth",
    "unknown_subject": "invented subject",
}
KINDS = {
    (s, t): title if s == t else f"{title}, {t}"
    for s, title in SITUATIONS.items()
    for t in CONFLICT_TYPES
}
# The methods whose harm is summed up in a sentence.
NAMED = ("original", "juice", "served", "learned", "question", "gated", "gated_apart")
# Heads that are named of each sign.
N_NAMED = 12
# More items would make a page that a browser opens slowly.
N_SHOWN = 1500

PUBLISHED = Path(__file__).parents[1] / "data" / "published.json"
KEYS: dict[Target, str] = {"parametric": "parametric", "context": "contextual"}
# Where the authors' code does other than their text, and ours (docs/method.md).
DIFFERENCES = (
    "They ran in float16; decoded 10 tokens unsteered and 15 steered, where we decode 15; and took "
    "the facts whose answer is in 10 tokens as known.",
    "Their heads come from world capitals that the model knows.",
    "In their code a head of both signs gets the - beta twice, and in their JuNe the largest + head"
    " gets the - beta where a layer has heads of both signs.",
)
TOWARD_CONTEXT = "Their grid goes down to -5 for the - beta, with K = 10 except for StableLM."
ON_GEMMA = "The attention that they put into Gemma ignores its soft cap."


def write(store: Store) -> None:
    """Write the report and the tables of complete results into their folder."""
    write_report(store.folder, sections(store.results))
    write_tables(store.folder, store.results)


def sections(results: Mapping[str, Any]) -> list[Section]:
    """Return the report's sections."""
    if "checkpoints" in results:
        return [_checkpoints(results)]
    numbers, answers, made = measured(results), answers_of(results), [_setting(results)]
    for target, found in results.get("targets", {}).items():
        # In the order of the methods, whenever they were measured.
        methods: dict[str, Any] = {
            name: found["methods"][name]
            for name in METHOD_NAMES
            if name in found.get("methods", {})
        }
        rows = numbers[numbers.target == target].sort_values(
            "method", kind="stable", key=lambda names: names.map(METHOD_NAMES.index)
        )
        kinds = zip(rows.measure, rows.conflict_type, strict=True)
        rows["kind"] = [KINDS.get((measure, t), t) for measure, t in kinds]
        first = rows[rows.n.notna()]
        accuracy, harm = first[first.measure == ACCURACY], first[first.measure != ACCURACY]
        if len(accuracy):
            made.append(_accuracy(results, target, accuracy, answers[answers.target == target]))
            if "seeds" in results:
                made.append(_seeds(target, rows, results["seeds"]["seeds"]))
            made += [
                *([_harm(target, harm)] if len(harm) else []),
                _averages(target, accuracy[accuracy.domain == AVERAGE]),
                *_popularity(methods),
                _choices(methods, found.get("head_sets", {})),
                _text(methods),
            ]
        for name, result in found.get("analyses", {}).items():
            made.append(finding(name, target, result))
    for target in results.get("targets", {}):
        if items := _items(target, answers[answers.target == target]):
            text = [
                f"{len(items)} prompts, each with its context, its question, what is expected and "
                "what every method answered. All answers are also in `answers.csv`.",
            ]
            if len(items) > N_SHOWN:
                text.append(f"This page shows the first {N_SHOWN:,} prompts.")
            title = f"Single answers, toward the {target} answer"
            made.append(Section(title, text=text, items=items[:N_SHOWN]))
    return made


def _setting(results: Mapping[str, Any]) -> Section:
    identity, data = results["identity"], results.get("data", {})
    model, versions = identity["model"], identity["versions"]
    template, limit = identity.get("chat_template_sha256"), identity["limit"]
    known = data.get("finders_are_known", {})
    finders: list[Row] = []
    for target, names in data.get("identification", {}).items():
        if target in results.get("targets", {}):
            found_on = f"served heads toward {target} found on"
            is_served = known.get(target)
            finders.append((found_on if is_served else f"set aside, {target}", ", ".join(names)))
    shape = f"{model['architecture']}, {model['n_layers']} layers of {model['n_heads']} heads"
    rows: list[Row] = [
        ("model", f"{model['id']} ({shape}), {identity['dtype']}"),
        ("fingerprint", str(model["fingerprint"])),
        *([("chat template", f"sha256 {template}")] if template else []),
        ("test facts", f"{len(data.get('test', []))}" + (f", limited to {limit}" if limit else "")),
        (
            "validation facts",
            f"{data.get('n_validation', 0)} that the model answers right on the clean prompt",
        ),
        *finders,
        ("`ph3_large` found on", f"{data.get('n_large', 0)} facts"),
        *((f"left out: {reason}", str(n)) for reason, n in data.get("left_out", {}).items()),
        ("seed", str(identity["seed"])),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    notes = [f"Note: {note}" for note in results.get("notes", [])]
    return Section(f"Evaluation of {model['id']}", text=notes, tables=[Table(("", ""), rows)])


def _accuracy(
    results: Mapping[str, Any], target: Target, accuracy: DataFrame, answers: DataFrame
) -> Section:
    """Return accuracy by method and domain, the average first, with what it means."""
    methods, types = list(accuracy.method.unique()), list(accuracy.conflict_type.unique())
    domains = sorted(accuracy.domain.unique(), key=lambda name: (name != AVERAGE, name))
    cells = accuracy.pivot(index=["method", "domain"], columns="conflict_type", values="accuracy")
    texts = cells[types].map(percent).agg(" / ".join, axis=1).unstack()
    texts = texts.reindex(methods)[domains].fillna(" / ".join("–" for _ in types))
    model_id: str = results["identity"]["model"]["id"]
    printed = published(model_id, target)
    for name, shares in printed.items():
        texts.loc[f"{name} (published)"] = [_printed(shares.get(d), types) for d in domains]
    text = [
        f"Accuracy in percent: how often the answer is {ANSWERS[target]}. "
        f"Each cell: {' / '.join(types)}.",
        *verdict(accuracy),
        *beyond_chance(answers[answers.conflict_type.isin(types)], methods),
    ]
    if printed:
        source = json.loads(PUBLISHED.read_text(encoding="utf-8"))["source"]
        notes = [*DIFFERENCES, *([TOWARD_CONTEXT] if target == "context" else [])]
        notes += [ON_GEMMA] if "gemma" in model_id.lower() else []
        text.append(
            f"Published numbers: {source}. The test facts, the heads and the validation split "
            f"differ from the authors'. {' '.join(notes)}"
        )
    picture = Picture(
        f"{target}-methods",
        f"Average accuracy by method toward the {target} answer",
        partial(figures.methods, accuracy[accuracy.domain == AVERAGE], target),
    )
    title = f"Toward the {target} answer"
    return Section(title, text=text, tables=[Table.of(texts)], pictures=[picture])


def published(model_id: str, target: Target) -> dict[str, dict[str, Any]]:
    """Return a model's published {method: {domain: {conflict type: percent} or percent}}.

    The model is known by its hub id or the id's last part; others have none.
    """
    tables = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    name = model_id.rstrip("/").rsplit("/", 1)[-1].lower()
    rows = [row for row in tables[KEYS[target]] if row["model"].rsplit("/", 1)[-1].lower() == name]
    return {row["method"]: row["accuracy"] for row in rows}


def _printed(shares: Any, types: Sequence[str]) -> str:
    if isinstance(shares, dict):
        return " / ".join(number(shares.get(t), 1) for t in types)
    return number(shares, 1)


def _seeds(target: str, rows: DataFrame, seeds: Sequence[int]) -> Section:
    """Return the means over the seeds with their intervals and the worst."""

    def shown(values: Series) -> str:
        found = spread(values.tolist())
        assert found is not None, "a group has a row"
        bounds = f" ({between(*found['interval'])})" if found["interval"] else ""
        missing = f", {found['n']} seeds" if found["n"] < len(seeds) else ""
        return f"{percent(found['mean'])}{bounds}, worst {percent(found['worst'])}{missing}"

    averages = rows[rows.domain == AVERAGE].groupby(["measure", "method", "kind"], sort=False)
    found = averages.accuracy.agg(shown).rename("text").reset_index()
    harm = found[found.measure != ACCURACY]
    text = [
        f"Seeds {seeds[0]} to {seeds[-1]}: each draws which examples find heads and tune, and what "
        "is tested on. Average accuracy in percent: the mean over the seeds, in brackets its 95 % "
        "interval (Student's t), and the worst seed.",
    ]
    tables = [Table.of(_by_kind(found[found.measure == ACCURACY]))]
    if len(harm):
        text.append("The second table is of right answers where steering is not needed.")
        tables.append(Table.of(_by_kind(harm)))
    title = f"Over {len(seeds)} seeds, {target}"
    return Section(title, level=3, text=text, tables=tables, in_terminal=True)


def _by_kind(rows: DataFrame) -> DataFrame:
    """Return the column `text` by method and kind, both in their order."""
    kinds = [kind for kind in (*CONFLICT_TYPES, *KINDS.values()) if kind in set(rows.kind)]
    texts = rows.pivot(index="method", columns="kind", values="text")
    return texts.reindex(index=rows.method.unique(), columns=kinds).fillna("–")


def _harm(target: str, harm: DataFrame) -> Section:
    """Return the accuracy of each method where steering is not needed."""
    shares = harm.groupby(["method", "measure"]).accuracy.mean()
    named = [
        f"{words(name)}: "
        + ", ".join(
            f"{title} {percent(shares[name, situation])}"
            for situation, title in SITUATIONS.items()
            if (name, situation) in shares
        )
        for name in NAMED
        if name in shares
    ]
    text = [
        "Right answers in percent where steering is not needed: without a context, with one "
        "that tells the truth or is about something else, and about an invented subject, of which "
        "the context is all there is. In brackets 95 % intervals.",
        *([f"{'; '.join(named)}."] if named else []),
    ]
    cells = [
        f"{percent(row.accuracy)} ({between(row.low, row.high)}, n = {row.n:.0f})"
        for row in harm.itertuples()
    ]
    title = f"Where steering toward the {target} answer is not needed"
    return Section(title, text=text, tables=[Table.of(_by_kind(harm.assign(text=cells)))])


def _averages(target: str, averages: DataFrame) -> Section:
    """Return the averages over the domains, with their intervals."""
    columns = {
        "method": averages.method.map(words),
        "conflict": averages.conflict_type,
        "n": averages.n.map("{:.0f}".format),
        "accuracy": averages.accuracy.map(percent),
        "95 % interval": map(between, averages.low, averages.high),
        "p parametric": averages.p_parametric.map(number),
        "p context": averages.p_context.map(number),
        "M_C": averages.context_reliance.map(number),
    }
    text = [
        "p is the probability of the first token of an answer at the prompt's end, "
        "M_C = p context / (p context + p parametric), means over the domains. "
        "The interval is Wilson's, of this mean.",
    ]
    tables = [Table.by_column(columns)]
    return Section(f"Averages, {target}", level=3, text=text, tables=tables)


def _popularity(methods: Mapping[str, Any]) -> list[Section]:
    """Return accuracy by popularity; nothing where the data has none."""
    rows = [
        [
            words(name),
            f"{b['from']:g}–{b['to']:g}",
            str(b["n"]),
            " / ".join(percent(c["accuracy"]) for c in b["cells"].values()),
        ]
        for name, method in methods.items()
        for b in method.get("by_popularity") or []
    ]
    table = Table(("method", "popularity", "n", "accuracy"), rows)
    return [Section("By popularity", level=3, tables=[table])] if rows else []


def _choices(methods: Mapping[str, Any], head_sets: Mapping[str, Any]) -> Section:
    """Return the choices of validation for each method and domain."""
    rows = []
    for name, method in methods.items():
        for domain, choice in method["choice"].items():
            if "beta_plus" in choice:
                chosen = f"betas {choice['beta_plus']:+g} {choice['beta_minus']:+g}"
            elif "heads" in choice:
                heads = choice["heads"]
                chosen = f"{len(heads)} heads: {' '.join(map(head_name, heads))}"
            else:
                continue
            tuned = words(choice["tuned_on"] or "nothing: the head set's own")
            rows.append([words(name), words(domain), chosen, f"{tuned} ({choice['n_validation']})"])
    sets = {
        part: HeadSet.parse(content, f"the head set {part!r} of the results")
        for part, content in head_sets.items()
    }
    costs = [
        [words(part), strength, number(harm.divergence, 3), number(harm.perplexity, 2)]
        for part, head_set in sets.items()
        if (found := head_set.validation()) is not None
        for strength, harm in found.harm.items()
    ]
    tables = [Table(("method", "domain", "choice", "tuned on"), rows)] if rows else []
    if costs:
        header = ("head set", "strength", "ordinary text diverges, nats a token", "perplexity ×")
        tables.append(Table(header, costs))
    text = [_heads_of(part, head_set) for part, head_set in sets.items()]
    return Section("What validation chose", level=3, text=text, tables=tables)


def _heads_of(part: str, head_set: HeadSet) -> str:
    betas = head_set.betas()
    signed = [
        " ".join(map(head_name, heads[:N_NAMED]))
        + (f" and {len(heads) - N_NAMED} more" if len(heads) > N_NAMED else "")
        for heads in (head_set.heads.plus, head_set.heads.minus)
    ]
    plus, minus = (names or "none" for names in signed)
    tuned = f"betas {betas}; " if betas else ""
    return f"Heads, {part}: + {plus}; - {minus}; {tuned}scores {head_set.scores_sha256}."


def _text(methods: Mapping[str, Any]) -> Section:
    """Return the effects of each method on plain text and on longer answers."""
    measured_on = {name: method for name, method in methods.items() if method.get("continuations")}
    longer = [method["continuations"] for method in measured_on.values()]
    columns = {
        "method": map(words, measured_on),
        "perplexity": [number(method.get("perplexity"), 2) for method in measured_on.values()],
        "tokens": [number(answers["mean_tokens"], 1) for answers in longer],
        "ended": [percent(answers["ended"]) for answers in longer],
        "repetition": [percent(answers["repetition"]) for answers in longer],
    }
    text = [
        "Perplexity is of plain text; tokens, answers that end by themselves and repeated "
        "3-grams (percent) are of answers of up to 64 tokens to conflict prompts.",
    ]
    return Section("Text", level=3, text=text, tables=[Table.by_column(columns)])


def _items(target: Target, answers: DataFrame) -> list[Item]:
    """Return every prompt of every test fact, with what is expected and what each method said."""
    types = list(answers.conflict_type.unique())
    rows = answers.fillna({"context": "", "relation": ""})
    rows = rows.assign(place=rows.conflict_type.map(types.index)).sort_values(
        ["fact", "place"], kind="stable"
    )
    items = []
    for _, group in groupby(rows.itertuples(), key=lambda row: (row.fact, row.place)):
        said = list(group)
        first = said[0]
        items.append(
            Item(
                subject=first.subject,
                relation=words(first.relation),
                conflict_type=first.conflict_type,
                context=first.context.strip(),
                question=first.question,
                expected=first.expected.replace(" | ", ", "),
                other=f"the {OTHER[target]} answer: {first.other.replace(' | ', ', ')}",
                answers=[
                    (
                        words(r.method),
                        r.answer.strip(),
                        r.is_right,
                        number(r.p_parametric),
                        number(r.p_context),
                    )
                    for r in said
                ],
            )
        )
    return items


def _checkpoints(results: Mapping[str, Any]) -> Section:
    """Return the changes of the answers over a series of checkpoints."""
    series = results["checkpoints"]
    names = ("checkpoint", "clean", "counterfactual", "parametric", "M_C", "attention on context")
    rows = [
        [row["name"], *(number(row[column]) for column in COLUMNS["checkpoints"][2:])]
        for row in series
    ]
    reliance = [row["context_reliance"] or 0.0 for row in series]
    peak = max(range(len(reliance)), key=lambda i: reliance[i])
    if 0 < peak < len(reliance) - 1:
        summary = (
            f"Context reliance rises from {reliance[0]:.2f} to {reliance[peak]:.2f} at "
            f"{series[peak]['name']}, then falls to {reliance[-1]:.2f}."
        )
    else:
        summary = (
            f"Context reliance is highest at the {'first' if peak == 0 else 'last'} checkpoint "
            f"({reliance[peak]:.2f}): no inversion."
        )
    text = [
        f"{series[0]['n']} conflict prompts, unsteered. "
        "Counterfactual: the context answer; parametric: the model's own; "
        "M_C = p context / (p context + p parametric), mean over the prompts; "
        "attention of the last token, mean over layers and heads.",
        summary,
    ]
    title = "Context reliance over checkpoints"
    picture = Picture("checkpoints", title, partial(figures.checkpoints, series))
    return Section(
        title, text=text, tables=[Table((*names, "on subject"), rows)], pictures=[picture]
    )
