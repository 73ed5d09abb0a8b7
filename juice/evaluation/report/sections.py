"""The report's content, from results alone: sections of sentences, tables and pictures, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from juice.evaluation.methods import METHODS
from juice.evaluation.metrics import interval_of_groups
from juice.evaluation.report import analysis_tables, figures
from juice.evaluation.report.published import published, source
from juice.evaluation.tables import AVERAGE

Row = Sequence[str]
FEW = 10
ARTICLES = {"parametric": "what the model remembers", "context": "what the prompt claims"}


@dataclass(frozen=True)
class Table:
    """A table of texts; the first column names the row."""

    header: Row
    rows: Sequence[Row]


@dataclass(frozen=True)
class Picture:
    """A picture: its file's stem, what it shows, and how it is drawn."""

    name: str
    caption: str
    draw: Callable[[], Any]


@dataclass(frozen=True)
class Section:
    """A title of level 2 or 3, sentences, tables and pictures."""

    title: str
    level: int = 2
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = field(default_factory=tuple)


def percent(value: float | None) -> str:
    """Return a share in percent with one decimal, as in the paper; a dash for none."""
    return "–" if value is None else f"{100 * value:.1f}"


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
            made += [
                _accuracy(results, target, tables),
                _averages(target, tables),
                *_popularity(own),
                _chosen(own),
                _side_effects(own),
            ]
        for name, result in own.get("analyses", {}).items():
            made.append(_analysis(name, target, result))
    return made


def _setting(results: Mapping[str, Any]) -> Section:
    identity, data = results["identity"], results.get("data", {})
    model, versions = identity["model"], identity["versions"]
    rows = [
        (
            "model",
            (
                f"{model['id']} ({model['architecture']}, {model['n_layers']} layers of"
                f" {model['n_heads']} heads), {identity['dtype']}"
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
    """Say what the heads were found on, or what is set aside where that is not known."""
    data = results.get("data", {})
    return [
        (
            (
                f"heads toward {target} found on"
                if data.get("finders_are_known", {}).get(target)
                else f"set aside, {target}"
            ),
            ", ".join(names),
        )
        for target, names in data.get("identification", {}).items()
        if target in results.get("targets", {})
    ]


def _accuracy(results: Mapping[str, Any], target: str, tables: Mapping[str, Any]) -> Section:
    domains = [d for d in next(iter(tables.values())) if d != AVERAGE]
    types = list(next(iter(tables.values()))[AVERAGE])
    header = ["method", *(d.replace("_", " ") for d in domains), AVERAGE]
    rows = [
        [name.replace("_", " "), *(_cells(table[d], types) for d in [*domains, AVERAGE])]
        for name, table in tables.items()
    ]
    printed = published(results["identity"]["model"]["id"], target)  # type: ignore[arg-type]
    rows += [
        [
            f"{name.replace('_', ' ')} (published)",
            *(_printed(own.get(d), types) for d in [*domains, AVERAGE]),
        ]
        for name, own in printed.items()
    ]
    text = [
        (
            f"Accuracy in percent: how often the answer is {ARTICLES[target]}. Each cell:"
            f" {' / '.join(types)}."
        ),
        *verdict(tables, types),
        *_beyond_chance(results, target, tables, types),
    ]
    if printed:
        text.append(
            f"Published numbers: {source()}. The test facts, the heads and the validation split"
            " differ from the authors'."
        )
    picture = Picture(
        f"{target}-methods",
        f"Average accuracy by method toward the {target} answer",
        lambda: figures.methods(tables, target),
    )
    return Section(
        f"Toward the {target} answer", text=text, tables=[Table(header, rows)], pictures=[picture]
    )


def verdict(tables: Mapping[str, Any], types: Sequence[str]) -> list[str]:
    """Say plainly whether JuICE is the best method, on average and cell by cell."""
    if "juice" not in tables or len(tables) < 2 or not types:
        return []
    average = {
        name: sum(t[AVERAGE][j]["accuracy"] for j in types) / len(types)
        for name, t in tables.items()
        if all(j in t[AVERAGE] for j in types)
    }
    if "juice" not in average:
        return []
    if (n := max(c["n"] for c in tables["juice"][AVERAGE].values())) < FEW:
        return [f"{n} facts are too few to tell methods apart."]
    best = max(average, key=lambda name: (average[name], name == "juice"))
    said = f"On average over domains and conflict types JuICE has {percent(average['juice'])}"
    if best == "juice":
        others = {name: value for name, value in average.items() if name != "juice"}
        second = max(others, key=lambda name: others[name])
        name = second.replace("_", " ")
        is_tie = others[second] == average["juice"]
        said += (
            f", as has {name}: a tie for the best."
            if is_tie
            else f" and is best; next comes {name} with {percent(others[second])}."
        )
    else:
        said += f" and is **not** best: {best.replace('_', ' ')} has {percent(average[best])}."
    behind = []
    for domain in (d for d in tables["juice"] if d != AVERAGE):
        for j in types:
            cells = {
                name: t[domain][j]["accuracy"]
                for name, t in tables.items()
                if j in t.get(domain, {})
            }
            top = max(cells.values(), default=0.0)
            if cells.get("juice", 0.0) < top:
                first = next(name for name in cells if cells[name] == top)
                behind.append(
                    f"{domain.replace('_', ' ')} {j} ({first.replace('_', ' ')} {percent(top)},"
                    f" juice {percent(cells.get('juice'))})"
                )
    return (
        [said, f"Another method is ahead in {len(behind)} cells: {'; '.join(behind)}."]
        if behind
        else [said, "No method is ahead of it in any cell."]
    )


def _beyond_chance(
    results: Mapping[str, Any], target: str, tables: Mapping[str, Any], types: Sequence[str]
) -> list[str]:
    """Say whether JuICE and the best of the others differ by more than chance: the interval of the difference, fact by fact."""
    methods, test = results["targets"][target]["methods"], results["data"]["test"]
    if "juice" not in tables or len(tables) < 2 or len(test) < FEW:
        return []
    right = {
        name: [_right(methods[name].get("answers", {}), types, i) for i in range(len(test))]
        for name in tables
    }
    best = max(
        (name for name in right if name != "juice"),
        key=lambda name: sum(v for v in right[name] if v is not None),
    )
    groups: dict[str, list[float]] = {}
    for fact, a, b in zip(test, right["juice"], right[best], strict=True):
        if a is not None and b is not None:
            groups.setdefault(fact.get("relation", ""), []).append(a - b)
    span = interval_of_groups(list(groups.values()), results["identity"]["seed"])
    if span is None:
        return []
    low, high = (100 * bound for bound in span)
    name = best.replace("_", " ")
    if low <= 0 <= high:
        return [
            f"Against {name}, fact by fact, the difference is within chance: {low:+.1f} to"
            f" {high:+.1f} points (95 %)."
        ]
    return [
        f"Against {name}, fact by fact, JuICE is {'ahead' if low > 0 else 'behind'}: {low:+.1f} to"
        f" {high:+.1f} points (95 %)."
    ]


def _right(answers: Mapping[str, Any], types: Sequence[str], i: int) -> float | None:
    """Return the share of a fact's prompts that were answered right."""
    own = [float(row[1]) for t in types if t in answers and (row := answers[t][i])]
    return sum(own) / len(own) if own else None


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


def _averages(target: str, tables: Mapping[str, Any]) -> Section:
    rows = []
    for name, table in tables.items():
        for conflict_type, c in table[AVERAGE].items():
            span = (
                f"{percent(c['interval'][0])}–{percent(c['interval'][1])}" if c["interval"] else "–"
            )
            numbers = [
                percent(c["accuracy"]),
                span,
                *(_number(c[k]) for k in ("p_parametric", "p_context", "context_reliance")),
            ]
            rows.append([name.replace("_", " "), conflict_type, str(c["n"]), *numbers])
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
            "p is the probability of the first token of an answer at the prompt's end, M_C = p"
            " context / (p context + p parametric), means over the domains. The interval is that of"
            " this mean (bootstrap within the domains, 1,000 resamples)."
        ),
    ]
    return Section(f"Averages, {target}", level=3, text=text, tables=[Table(header, rows)])


def _popularity(own: Mapping[str, Any]) -> list[Section]:
    rows = [
        [
            name.replace("_", " "),
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


def _chosen(own: Mapping[str, Any]) -> Section:
    rows = []
    for name, method in own["methods"].items():
        for domain, choice in method["choice"].items():
            if "beta_plus" in choice:
                said = f"betas {choice['beta_plus']:+g} {choice['beta_minus']:+g}"
            elif "heads" in choice:
                said = (
                    f"{len(choice['heads'])} heads:"
                    f" {' '.join(f'L{h[0]}H{h[1]}' for h in choice['heads'])}"
                )
            else:
                continue
            tuned = choice["tuned_on"] or "nothing: the head set's own"
            rows.append(
                [
                    name.replace("_", " "),
                    domain.replace("_", " "),
                    said,
                    f"{tuned.replace('_', ' ')} ({choice['n_validation']})",
                ]
            )
    head_set = own.get("head_set")
    text = []
    if head_set:
        heads = head_set["heads"]
        plus, minus = (
            " ".join(f"L{h[0]}H{h[1]}" for h in heads[sign]) or "none" for sign in ("plus", "minus")
        )
        text = [
            f"Head set `{head_set['name']}`: + {plus}; - {minus}; scores"
            f" {head_set['scores_sha256']}."
        ]
    return Section(
        "What validation chose",
        level=3,
        text=text,
        tables=[Table(("method", "domain", "choice", "tuned on"), rows)] if rows else [],
    )


def _side_effects(own: Mapping[str, Any]) -> Section:
    header = (
        "method",
        "clean",
        "change",
        "true context",
        "unknown subject",
        "perplexity",
        "tokens",
        "ended",
        "repetition",
    )
    original = (
        own["methods"]
        .get("original", {})
        .get("collateral", {})
        .get("clean", {})
        .get("clean", {})
        .get("accuracy")
    )
    rows = []
    for name, method in own["methods"].items():
        if "continuations" not in method:
            continue
        situations, going_on = method["collateral"], method["continuations"]
        clean = situations.get("clean", {}).get("clean", {}).get("accuracy")
        change = "–" if clean is None or original is None else f"{100 * (clean - original):+.1f}"
        told = (
            " / ".join(percent(c["accuracy"]) for c in situations.get(s, {}).values()) or "–"
            for s in ("true_context", "unknown_subject")
        )
        numbers = (
            _number(method.get("perplexity"), 2),
            _number(going_on["mean_tokens"], 1),
            percent(going_on["ended"]),
        )
        rows.append(
            [
                name.replace("_", " "),
                percent(clean),
                change,
                *told,
                *numbers,
                percent(going_on["repetition"]),
            ]
        )
    text = [
        (
            "Where steering is not needed. `clean`: the parametric answer without a context, and"
            " its change against the original; `true context`: the context tells the truth;"
            " `unknown subject`: the subject is invented, the context is all there is (substitution"
            " / coherent each). Perplexity is of plain text; tokens, answers that end by themselves"
            " and repeated 3-grams (percent) are of answers of up to 64 tokens to conflict prompts."
        ),
    ]
    return Section("Side effects", level=3, text=text, tables=[Table(header, rows)])


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


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
        [row["name"], *(_number(row[column]) for column in columns)]
        for row in results["checkpoints"]
    ]
    reliance = [row["context_reliance"] or 0.0 for row in results["checkpoints"]]
    peak = max(range(len(reliance)), key=lambda i: reliance[i])
    name = results["checkpoints"][peak]["name"]
    if 0 < peak < len(reliance) - 1:
        said = (
            f"Context reliance rises from {reliance[0]:.2f} to {reliance[peak]:.2f} at {name}, then"
            f" falls to {reliance[-1]:.2f}."
        )
    else:
        said = (
            f"Context reliance is highest at the {'first' if peak == 0 else 'last'} checkpoint"
            f" ({reliance[peak]:.2f}): no inversion."
        )
    text = [
        (
            f"{results['checkpoints'][0]['n']} conflict prompts, unsteered. Counterfactual: the"
            " context answer; parametric: the model's own; M_C = p context / (p context + p"
            " parametric), mean over the prompts; attention of the last token, mean over layers"
            " and heads."
        ),
        said,
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
    title = f"{analysis_tables.TITLES[name]}, {target}"
    if "unavailable" in result:
        return Section(title, level=3, text=[f"Not available: {result['unavailable']}"])
    text, header, rows = analysis_tables.describe(name, result, target)
    draw = getattr(figures, name, None)
    pictures: Iterable[Picture] = (
        [Picture(f"{target}-{name.replace('_', '-')}", title, lambda: draw(result, target))]
        if draw is not None
        else []
    )
    return Section(
        title,
        level=3,
        text=text,
        tables=[Table(header, rows)] if rows else [],
        pictures=list(pictures),
    )
