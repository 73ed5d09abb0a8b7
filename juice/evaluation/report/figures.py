"""A picture for each analysis, from its plain data, readable in grey.

Lines differ by dash and marker; maps have a colour bar. Each function returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from juice.evaluation.report.parts import head_name, words
from juice.head_set.scores import MEANINGS

if TYPE_CHECKING:
    from pandas import DataFrame

STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))
GREYS = ("black", "dimgrey", "darkgrey", "silver")
WIDTH, HEIGHT = 4.2, 3.2
WHOLE = (0, 1.02)


def _axes(n: int, *, width: float = WIDTH, n_rows: int = 1) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * -(-n // n_rows), HEIGHT * n_rows), layout="constrained")
    axes = figure.subplots(n_rows, -(-n // n_rows), squeeze=False)
    return figure, axes.ravel()


def _lines(ax: Any, x: Sequence[Any], series: Mapping[str, Sequence[float | None]]) -> None:
    for i, (name, values) in enumerate(series.items()):
        dash, marker = STYLES[i % len(STYLES)]
        shown = [float("nan") if v is None else v for v in values]
        style = {"marker": marker, "color": GREYS[i % 3], "markersize": 4}
        ax.plot(x, shown, dash, label=name, **style)
    ax.grid(visible=True, color="0.9")


def heads(result: Mapping[str, Any], target: str) -> Any:
    """Draw heat maps of head scores: + above, - below, a column per conflict type.

    Dots mark the chosen heads.
    """
    types, meaning = result["conflict_types"], MEANINGS[result.get("kind", "probe")]
    figure, axes = _axes(2 * len(types), n_rows=2)
    for sign, row in zip(("plus", "minus"), axes.reshape(2, -1), strict=True):
        limit = max((abs(v) for t in result[sign] for heads in t for v in heads), default=0) or 1.0
        chosen = result["chosen"][sign]
        shade = {"cmap": "cividis", "vmin": -limit, "vmax": limit}
        dot = {"color": "white", "markeredgecolor": "black", "markersize": 8}
        for ax, scores, conflict_type in zip(row, result[sign], types, strict=True):
            image = ax.imshow(scores, aspect="auto", origin="lower", **shade)
            ax.plot([index for _, index in chosen], [layer for layer, _ in chosen], "o", **dot)
            title = f"{'+' if sign == 'plus' else '-'} scores, {conflict_type}"
            ax.set(title=title, xlabel="head", ylabel="layer")
        figure.colorbar(image, ax=row, label=f"{meaning}\n({target} answer)")
    return figure


def line(points: Sequence[Mapping[str, float]], allowed: float) -> Any:
    """Draw the conflicts won against divergence, and what may be of it."""
    figure, (ax,) = _axes(1, width=5.0)
    ordered = sorted(points, key=lambda point: point["divergence"])
    x = [point["divergence"] for point in ordered]
    ax.plot(x, [point["won"] for point in ordered], "ko-", linewidth=1, markersize=4)
    ax.axvline(allowed, color="grey", linestyle="--", linewidth=1)
    ax.set(
        xlabel="divergence of text, or of what is left open (nats)",
        ylabel="conflicts won",
        ylim=WHOLE,
    )
    return figure


def reversals(result: Mapping[str, Any], target: str) -> Any:  # noqa: ARG001
    """Draw each head as a point: the effect of its removal under either conflict type."""
    figure, axes = _axes(2)
    for ax, answer in zip(axes, ("context", "parametric"), strict=True):
        first, second = ([v for row in table for v in row] for table in result["changes"][answer])
        points = list(zip(first, second, strict=True))
        for is_turned, marker, name in ((False, "o", "same sign"), (True, "x", "opposite sign")):
            shown = [point for point in points if (point[0] * point[1] < 0) == is_turned]
            style = {"marker": marker, "color": "black" if is_turned else "darkgrey"}
            ax.scatter([x for x, _ in shown], [y for _, y in shown], label=name, **style)
        ax.axhline(0, color="0.7", linewidth=0.8)
        ax.axvline(0, color="0.7", linewidth=0.8)
        title = f"head removed: change of p ({answer} answer)"
        ax.set(title=title, xlabel="substitution", ylabel="coherent")
        ax.legend()
    return figure


def running_once(result: Mapping[str, Any], target: str) -> Any:
    """Draw p over the number of heads removed, in one run and in two."""
    figure, axes = _axes(len(result["by_type"]))
    for ax, (conflict_type, found) in zip(axes, result["by_type"].items(), strict=True):
        names = {"two runs (juice)": "juice", "one run (june)": "june"}
        series = {name: [found["none"], *found[method]] for name, method in names.items()}
        _lines(ax, range(len(found["heads"]) + 1), series)
        ax.set(title=conflict_type, xlabel="best heads removed together")
        ax.set_ylabel(f"mean p ({target} answer)")
        ax.legend()
    return figure


def knock_outs(result: Mapping[str, Any], target: str) -> Any:  # noqa: ARG001
    """Draw the change of p of the parametric answer when a component of a layer is removed.

    Lines run over the layers, with a panel per conflict type; bands are one standard deviation.
    """
    figure, axes = _axes(len(result["changes"]))
    for ax, (conflict_type, removed) in zip(axes, result["changes"].items(), strict=True):
        layers = range(len(removed["mlp"]["mean"]))
        _lines(ax, layers, {name: values["mean"] for name, values in removed.items()})
        for values, colour in zip(removed.values(), GREYS, strict=False):
            spans = [(m - s, m + s) for m, s in zip(values["mean"], values["std"], strict=True)]
            ax.fill_between(layers, *zip(*spans, strict=True), color=colour, alpha=0.12)
        ax.axhline(0, color="0.5", linewidth=0.8)
        ax.set(title=conflict_type, xlabel="layer removed")
        ax.set_ylabel("change of p (parametric answer)")
        ax.legend()
    return figure


def robustness(result: Mapping[str, Any], target: str) -> Any:  # noqa: ARG001
    """Draw accuracy over |D|, over K, and over the grid of betas."""
    figure, axes = _axes(3)
    varied = (("examples", "n", "examples |D|"), ("heads", "k", "heads of each sign K"))
    for ax, (name, x, label) in zip(axes, varied, strict=False):
        rows = result[name]
        _lines(ax, [row[x] for row in rows], {"steered": [row["accuracy"] for row in rows]})
        ax.axhline(result["unsteered"], color="0.5", linestyle=":", label="unsteered")
        ax.set(xlabel=label, ylabel="mean accuracy", ylim=WHOLE)
        ax.legend()
    ax, betas = axes[2], result["betas"]
    plus, minus, accuracy = betas["plus"], betas["minus"], betas["accuracy"]
    labels = {"plus": "beta of the + heads", "minus": "beta of the - heads"}
    if len(plus) > 1 and len(minus) > 1:
        extent = (minus[0] + 0.25, minus[-1] - 0.25, plus[0] - 0.25, plus[-1] + 0.25)
        shade = {"cmap": "Greys_r", "vmin": 0, "vmax": 1, "extent": extent}
        image = ax.imshow(accuracy, aspect="auto", origin="lower", **shade)
        ax.set(xlabel=labels["minus"], ylabel=labels["plus"])
        figure.colorbar(image, ax=ax, label="mean accuracy")
    else:
        sign = "minus" if len(minus) > 1 else "plus"
        values = accuracy[0] if sign == "minus" else [row[0] for row in accuracy]
        _lines(ax, betas[sign], {"steered": values})
        ax.set(xlabel=labels[sign], ylabel="mean accuracy", ylim=WHOLE)
    return figure


def stability(result: Mapping[str, Any], target: str) -> Any:  # noqa: ARG001
    """Draw the overlap of resampled head sets over |D|, and how often each head is chosen."""
    figure, (overlap, often) = _axes(2)
    sizes = result["sizes"]
    series = {
        "+ heads": [size["overlap"]["plus"] for size in sizes.values()],
        "- heads": [size["overlap"]["minus"] for size in sizes.values()],
        "by chance": [size["by_chance"] for size in sizes.values()],
    }
    _lines(overlap, list(sizes), series)
    overlap.set(xlabel="examples |D|", ylabel="mean overlap (Jaccard)", ylim=WHOLE)
    overlap.legend()
    size = "4" if "4" in sizes else list(sizes)[-1]
    rows = sizes[size]["frequency"][:12][::-1]
    names = [f"{row['sign']} {head_name(row['head'])}" for row in rows]
    colours = ["dimgrey" if row["sign"] == "+" else "silver" for row in rows]
    often.barh(names, [row["share"] for row in rows], color=colours, edgecolor="k")
    often.set(xlabel=f"share of draws of {size} examples that choose it", xlim=(0, 1))
    return figure


def methods(averages: DataFrame, target: str) -> Any:
    """Draw the average accuracy by method, a bar with its interval per conflict type.

    `averages` are those rows of the accuracy table, in the order of the methods.
    """
    figure, (ax,) = _axes(1, width=7.5)
    names = list(averages.method.unique())
    types = averages.conflict_type.unique()
    width = 0.8 / len(types)
    for j, conflict_type in enumerate(types):
        rows = averages[averages.conflict_type == conflict_type].set_index("method").reindex(names)
        x = [i + (j - (len(types) - 1) / 2) * width for i in range(len(names))]
        style = {"color": str(0.25 + 0.3 * j), "edgecolor": "black", "linewidth": 0.5}
        ax.bar(x, rows.accuracy.fillna(0.0), width, label=conflict_type, **style)
        ax.vlines(x, rows.low.astype(float), rows.high.astype(float), color="black", linewidth=1)
    ax.set_xticks(range(len(names)), map(words, names), rotation=40, ha="right")
    ax.set(ylabel=f"accuracy ({target} answer)", ylim=WHOLE)
    ax.legend(ncols=len(types), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def checkpoints(series: Sequence[Mapping[str, Any]]) -> Any:
    """Draw accuracies, context reliance and attention over a series of checkpoints."""
    accuracies = {
        "counterfactual (context)": "counterfactual_accuracy",
        "parametric": "parametric_accuracy",
        "clean": "clean_accuracy",
    }
    attended = {"on the context": "attention_context", "on the subject": "attention_subject"}
    shown = (
        (accuracies, "accuracy"),
        ({"M_C": "context_reliance"}, "context reliance M_C"),
        (attended, "attention mass of the last token"),
    )
    figure, axes = _axes(3)
    x = range(len(series))
    for ax, (columns, label) in zip(axes, shown, strict=True):
        _lines(ax, x, {name: [row[column] for row in series] for name, column in columns.items()})
        ax.set(xlabel="checkpoint", ylabel=label, ylim=(0, None if columns is attended else 1.02))
        ax.set_xticks(x, [row["name"] for row in series], rotation=60, fontsize=7)
        ax.legend(fontsize=8)
    return figure
