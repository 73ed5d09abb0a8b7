"""`juice compare`: which of two head sets is better, on the same examples."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from juice.cli import console, options
from juice.engine.load_options import EngineOptions, LoadOptions
from juice.errors import ExampleError, UsageError

if TYPE_CHECKING:
    from juice.head_set.head_set import HeadSet
    from juice.identification.outcomes import Outcome
    from juice.steered_model import SteeredModel

NAMES = ("unsteered", "a", "b")


@options.spelled_out
def run(
    set_a: options.HeadSetArgument,
    set_b: options.HeadSetArgument,
    data: Annotated[str, typer.Option(help=options.SOURCES)],
    loading: LoadOptions,
    running: EngineOptions,
    model: options.Model = "mini",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Examples, spread over the relations; else all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of which examples.")] = 0,
    chat_template: options.ChatTemplate = None,
    head_sets: options.HeadSets = None,
    json: options.Json = False,
) -> None:
    """Say which of two head sets gives their target's answer more often, on the same examples.

    Each steers as it is served by default, without a gate, at strength 1. Examples of facts that
    one of them was found on are left out, and those that are too long or lack a prompt of most.
    """
    from juice.data.readers.sources import read_examples
    from juice.engine.steer import Steer, unsteered
    from juice.evaluation.splits import limited
    from juice.identification.examples import comparable, unseen
    from juice.identification.outcomes import Trials, difference_interval

    read = read_examples(data, split="test")
    loaded = options.in_chat(options.load(model, loading, head_sets, running), chat_template, read)
    sides = {"a": _side(loaded, set_a), "b": _side(loaded, set_b)}
    target = sides["a"].target
    if target != sides["b"].target:
        raise UsageError(
            f"{set_a} steers toward {target}, {set_b} toward {sides['b'].target}; name two of one "
            "target"
        )
    left = unseen(read, sides.values())
    if not left:
        raise ExampleError(f"the sets were found or tuned on all examples of {data}; give others")
    for name in sorted({one.name for one in sides.values() if not one.facts}):
        console.note(f"{name} does not say which facts found it: this data may have them")
    if len(left) < len(read):
        n = len(read) - len(left)
        console.note(f"{n} of {len(read)} examples found or tuned one of the sets: left out")
    usable = comparable(loaded, left, target)
    examples = limited(usable, limit, seed)
    steerings = {
        "unsteered": unsteered(),
        **{
            name: loaded.resolve(Steer(target=target, head_set=head_set))
            for name, head_set in sides.items()
        },
    }
    trials = Trials(loaded, examples, target, steerings, "comparing", console.progress)
    outcomes = {name: trials.outcome(name) for name in NAMES}
    gains = trials.gains("a", "b")
    interval = difference_interval(gains)
    assert interval is not None, "there are examples"
    found = {
        "target": target,
        "n_examples": len(examples),
        "n_left_out": len(read) - len(usable),
        "sets": {name: steerings[name].report.head_set for name in sides},
        "accuracy": {name: each.accuracy for name, each in outcomes.items()},
        "difference": fmean(gains),
        "interval": list(interval),
    }
    named = {"unsteered": "unsteered", "a": set_a, "b": set_b}
    lines = [*_table(named, outcomes), _verdict(found, set_a, set_b)]
    console.answer_either("\n".join(lines), found, as_json=json)


def _side(model: SteeredModel, given: str) -> HeadSet:
    """Return the set that a name, folder or file stands for."""
    from juice.head_set.head_set import HeadSet

    found = options.head_set_for(model, given)
    return found if isinstance(found, HeadSet) else model.head_sets.get(given)


def _table(named: dict[str, str], outcomes: dict[str, Outcome]) -> list[str]:
    types = list(outcomes["a"].accuracy)
    width = max(map(len, named.values())) + 2
    lines = [f"{'':{width}}" + "".join(f"{t:>14}" for t in types)]
    for name, title in named.items():
        shares = (outcomes[name].accuracy[t] for t in types)
        lines.append(f"{title:{width}}" + "".join(f"{share:>14.2f}" for share in shares))
    return lines


def _verdict(found: dict[str, Any], set_a: str, set_b: str) -> str:
    low, high = found["interval"]
    difference = found["difference"]
    within = f"{abs(difference):.2f} more of the conflicts of {found['n_examples']} examples"
    bounds = sorted((low, high) if difference >= 0 else (-high, -low))
    within += f", 95 % interval {bounds[0]:+.2f} to {bounds[1]:+.2f}"
    if low <= 0 <= high:
        return f"neither is certainly better: {set_a if difference >= 0 else set_b} wins {within}"
    better = set_a if difference > 0 else set_b
    return f"{better} is better: it wins {within}"
