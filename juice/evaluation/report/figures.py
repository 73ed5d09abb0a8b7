"""A picture for each analysis, from its plain data, readable in grey.

Lines differ by dash and marker; maps have a colour bar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from juice.evaluation.report.parts import words
from juice.head_set.scores import MEANINGS

STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))
GREYS = ("black", "dimgrey", "darkgrey", "silver")
WIDTH, HEIGHT = 4.2, 3.2


def _axes(n: int, *, width: float = WIDTH, n_rows: int = 1) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * -(-n // n_rows), HEIGHT * n_rows), layout="constrained")
    axes = figure.subplots(n_rows, -(-n // n_rows), squeeze=False)
    return figure, [ax for row in axes for ax in row]


def _lines(ax: Any, x: Sequence[Any], series: Mapping[str, Sequence[float | None]]) -> None:
    for i, (name, values) in enumerate(series.items()):
        dash, marker = STYLES[i % len(STYLES)]
        ax.plot(
            x,
            [float("nan") if v is None else v for v in values],
            dash,
            marker=marker,
            color=GREYS[i % 3],
            label=name,
            markersize=4,
        )
    ax.grid(visible=True, color="0.9")


def heads(result: Mapping[str, Any], target: str) -> Any:
    """Draw heat maps of head scores: + above, - below, a column per conflict type.

    Dots mark the chosen heads.
    """
    types = result["conflict_types"]
    figure, axes = _axes(2 * len(types), n_rows=2)
    for i, sign in enumerate(("plus", "minus")):
        limit = (
            max((abs(v) for table in result[sign] for row in table for v in row), default=0) or 1.0
        )
        for j, conflict_type in enumerate(types):
            ax = axes[i * len(types) + j]
            image = ax.imshow(
                result[sign][j],
                cmap="cividis",
                vmin=-limit,
                vmax=limit,
                aspect="auto",
                origin="lower",
            )
            chosen = result["chosen"][sign]
            ax.plot(
                [h[1] for h in chosen],
                [h[0] for h in chosen],
                "o",
                color="white",
                markeredgecolor="black",
                markersize=8,
            )
            ax.set(
                title=f"{'+' if sign == 'plus' else '-'} scores, {conflict_type}",
                xlabel="head",
                ylabel="layer",
            )
        figure.colorbar(
            image,
            ax=axes[i * len(types) : (i + 1) * len(types)],
            label=f"{MEANINGS[result.get('kind', 'probe')]}\n({target} answer)",
        )
    return figure


def reversals(result: Mapping[str, Any], target: str) -> Any:  # noqa: ARG001
    """Draw each head as a point: what its removal does under either conflict type."""
    figure, axes = _axes(2)
    for ax, answer in zip(axes, ("context", "parametric"), strict=True):
        first, second = ([v for row in table for v in row] for table in result["changes"][answer])
        turned = [a * b < 0 for a, b in zip(first, second, strict=True)]
        for is_turned, marker, name in ((False, "o", "same sign"), (True, "x", "opposite sign")):
            x = [a for a, t in zip(first, turned, strict=True) if t == is_turned]
            y = [b for b, t in zip(second, turned, strict=True) if t == is_turned]
            ax.scatter(x, y, marker=marker, color="black" if is_turned else "darkgrey", label=name)
        ax.axhline(0, color="0.7", linewidth=0.8)
        ax.axvline(0, color="0.7", linewidth=0.8)
        ax.set(
            title=f"head removed: change of p ({answer} answer)",
            xlabel="substitution",
            ylabel="coherent",
        )
        ax.legend()
    return figure


def running_once(result: Mapping[str, Any], target: str) -> Any:
    """Draw p over the number of heads removed, in one run and in two."""
    by_type = result["by_type"]
    figure, axes = _axes(len(by_type))
    for ax, (conflict_type, own) in zip(axes, by_type.items(), strict=True):
        x = list(range(len(own["heads"]) + 1))
        _lines(
            ax,
            x,
            {
                "two runs (juice)": [own["none"], *own["juice"]],
                "one run (june)": [own["none"], *own["june"]],
            },
        )
        ax.set(
            title=conflict_type,
            xlabel="best heads removed together",
            ylabel=f"mean p ({target} answer)",
        )
        ax.legend()
    return figure


def knock_outs(result: Mapping[str, Any], target: str) -> Any:  # noqa: ARG001
    """Draw the change of p of the parametric answer when a component of a layer is removed.

    Lines run over the layers, with a panel per conflict type.
    """
    changes = result["changes"]
    figure, axes = _axes(len(changes))
    for ax, (conflict_type, own) in zip(axes, changes.items(), strict=True):
        layers = list(range(len(own["mlp"]["mean"])))
        _lines(ax, layers, {name: values["mean"] for name, values in own.items()})
        for i, values in enumerate(own.values()):
            low, high = zip(
                *((m - s, m + s) for m, s in zip(values["mean"], values["std"], strict=True)),
                strict=True,
            )
            ax.fill_between(layers, low, high, color=GREYS[i % 3], alpha=0.12)
        ax.axhline(0, color="0.5", linewidth=0.8)
        ax.set(
            title=conflict_type, xlabel="layer removed", ylabel="change of p (parametric answer)"
        )
        ax.legend()
    return figure


def robustness(result: Mapping[str, Any], target: str) -> Any:  # noqa: ARG001
    """Draw accuracy over |D|, over K, and over the grid of betas."""
    figure, axes = _axes(3)
    for ax, name, x, label in (
        (axes[0], "examples", "n", "examples |D|"),
        (axes[1], "heads", "k", "heads of each sign K"),
    ):
        own = result[name]
        _lines(ax, [row[x] for row in own], {"steered": [row["accuracy"] for row in own]})
        ax.axhline(result["unsteered"], color="0.5", linestyle=":", label="unsteered")
        ax.set(xlabel=label, ylabel="mean accuracy", ylim=(0, 1.02))
        ax.legend()
    betas = result["betas"]
    if len(betas["plus"]) > 1 and len(betas["minus"]) > 1:
        extent = (
            betas["minus"][0] + 0.25,
            betas["minus"][-1] - 0.25,
            betas["plus"][0] - 0.25,
            betas["plus"][-1] + 0.25,
        )
        image = axes[2].imshow(
            betas["accuracy"],
            cmap="Greys_r",
            vmin=0,
            vmax=1,
            aspect="auto",
            origin="lower",
            extent=extent,
        )
        axes[2].set(xlabel="beta of the - heads", ylabel="beta of the + heads")
        figure.colorbar(image, ax=axes[2], label="mean accuracy")
    else:
        sign = "minus" if len(betas["minus"]) > 1 else "plus"
        values = betas["accuracy"][0] if sign == "minus" else [row[0] for row in betas["accuracy"]]
        _lines(axes[2], betas[sign], {"steered": values})
        axes[2].set(
            xlabel=f"beta of the {'-' if sign == 'minus' else '+'} heads",
            ylabel="mean accuracy",
            ylim=(0, 1.02),
        )
    return figure


def stability(result: Mapping[str, Any], target: str) -> Any:  # noqa: ARG001
    """Draw the overlap of resampled head sets over |D|, and how often each head is chosen."""
    figure, axes = _axes(2)
    sizes = result["sizes"]
    series = {
        "+ heads": [own["overlap"]["plus"] for own in sizes.values()],
        "- heads": [own["overlap"]["minus"] for own in sizes.values()],
        "by chance": [own["by_chance"] for own in sizes.values()],
    }
    _lines(axes[0], list(sizes), series)
    axes[0].set(xlabel="examples |D|", ylabel="mean overlap (Jaccard)", ylim=(0, 1.02))
    axes[0].legend()
    size = "4" if "4" in sizes else list(sizes)[-1]
    often = sizes[size]["frequency"][:12][::-1]
    names = [f"{row['sign']} L{row['head'][0]}H{row['head'][1]}" for row in often]
    axes[1].barh(
        names,
        [row["share"] for row in often],
        color=["dimgrey" if row["sign"] == "+" else "silver" for row in often],
        edgecolor="k",
    )
    axes[1].set(xlabel=f"share of draws of {size} examples that choose it", xlim=(0, 1))
    return figure


def methods(tables: Mapping[str, Any], target: str) -> Any:
    """Draw the average accuracy by method, a bar with its interval per conflict type."""
    figure, axes = _axes(1, width=7.5)
    types = list(next(iter(tables.values()))["average"])
    width = 0.8 / len(types)
    for j, conflict_type in enumerate(types):
        cells = [table["average"].get(conflict_type) for table in tables.values()]
        x = [i + (j - (len(types) - 1) / 2) * width for i in range(len(cells))]
        values = [c["accuracy"] if c else 0.0 for c in cells]
        axes[0].bar(
            x,
            values,
            width,
            label=conflict_type,
            color=str(0.25 + 0.3 * j),
            edgecolor="black",
            linewidth=0.5,
        )
        for at, c in zip(x, cells, strict=True):
            if c and c["interval"]:
                axes[0].plot([at, at], c["interval"], color="black", linewidth=1)
    axes[0].set_xticks(
        range(len(tables)), [words(name) for name in tables], rotation=40, ha="right"
    )
    axes[0].set(ylabel=f"accuracy ({target} answer)", ylim=(0, 1.02))
    axes[0].legend(ncols=len(types), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def checkpoints(result: Mapping[str, Any]) -> Any:
    """Draw accuracies, context reliance and attention over a series of checkpoints."""
    rows = result["checkpoints"]
    figure, axes = _axes(3)
    x = list(range(len(rows)))
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
    for ax, (columns, label) in zip(axes, shown, strict=True):
        _lines(ax, x, {name: [row[column] for row in rows] for name, column in columns.items()})
        ax.set(xlabel="checkpoint", ylabel=label)
        ax.set_ylim(0, 1.02 if ax is not axes[2] else None)
        ax.set_xticks(x, [row["name"] for row in rows], rotation=60, fontsize=7)
        ax.legend(fontsize=8)
    return figure
