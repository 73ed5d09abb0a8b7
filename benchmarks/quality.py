"""What steering does to the bundled model: `python -m benchmarks.quality [--limit N]`.

Everything is measured on facts that neither identification nor tuning saw. Accuracy is the paper's:
an accepted answer within the first five words of 15 greedy tokens.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from random import Random
from typing import Any

import juice
from benchmarks import machine
from juice.data.example import ConflictExample, ConflictType
from juice.engine import Steer
from juice.identification import IdentificationOptions
from juice.identification.drawing import usable_examples
from juice.identification.trials import answer, outcome
from juice.identification.validation import validation_share
from juice.methods import Target
from juice.steered_model import SteeredModel
from lab.examples import prompts
from lab.relations import RELATIONS, Fact

TYPES: tuple[ConflictType, ...] = ("clean", "substitution", "coherent")


def unseen_examples(model: SteeredModel) -> list[ConflictExample]:
    """Return the facts that the shipped head sets were neither identified nor tuned on."""
    pool, seen = juice.read_examples("mini"), set()
    for target in ("parametric", "context"):
        found = model.head_sets.get(target).identification
        assert found is not None, "the shipped sets come from `juice identify`"
        drawn, rest = usable_examples(
            model,
            pool,
            IdentificationOptions(
                n_examples=found.n_examples, seed=found.seed, relation="world_capital"
            ),
        )
        seen |= {id(e) for e in [*drawn, *validation_share(rest, found.seed)]}
    return [e for e in pool if id(e) not in seen]


def accuracy(
    model: SteeredModel, examples: list[ConflictExample], target: Target, steer: Steer
) -> dict[str, float]:
    """Return the share of examples that get the target's answer, by conflict type."""
    answers = answer(model, examples, TYPES, target, model.resolve(steer))
    return {str(t): round(v, 4) for t, v in outcome(examples, answers, target).accuracy.items()}


def true_contexts(examples: list[ConflictExample]) -> list[ConflictExample]:
    """Return the same facts with true contexts."""
    rng, relations = Random(0), {relation.name: relation for relation in RELATIONS}
    fact = {id(e): Fact(e.subject, e.parametric_answer[0]) for e in examples}
    told = {
        id(e): prompts(relations[e.relation or ""], fact[id(e)], e.parametric_answer[0], rng)
        for e in examples
    }
    return [e.model_copy(update={"prompts": told[id(e)]}) for e in examples]


def invented_subjects(n: int) -> list[ConflictExample]:
    """Return subjects that do not exist; only the context of each has its answer."""
    rng, made = Random(1), []
    for i in range(n):
        relation = RELATIONS[i % len(RELATIONS)]
        right, other = rng.sample(relation.answers, 2)
        fact = replace(relation.invent(rng), answer=right)
        own = prompts(relation, fact, right, rng)
        made.append(
            ConflictExample(
                subject=fact.subject, parametric_answer=right, context_answer=other, prompts=own
            )
        )
    return made


def measure(limit: int | None, seed: int = 0) -> dict[str, Any]:
    """Run every measurement."""
    model = juice.load("mini")
    examples = unseen_examples(model)
    if limit is not None:
        examples = Random(seed).sample(examples, limit)
    none, context, parametric = (Steer(target=t) for t in ("none", "context", "parametric"))
    once = Steer(target="parametric", method="june")
    by_relation = {}
    for relation in RELATIONS:
        own = [e for e in examples if e.relation == relation.name]
        by_relation[relation.name] = {
            "n": len(own),
            "parametric": accuracy(model, own, "parametric", parametric),
            "context": accuracy(model, own, "context", context),
        }
    truth, unknown = true_contexts(examples), invented_subjects(len(examples))
    return {
        "n_facts": len(examples),
        "unsteered": {
            "parametric": accuracy(model, examples, "parametric", none),
            "context": accuracy(model, examples, "context", none),
        },
        "steer_parametric": {"parametric": accuracy(model, examples, "parametric", parametric)},
        "steer_context": {
            "parametric": accuracy(model, examples, "parametric", context),
            "context": accuracy(model, examples, "context", context),
        },
        "run_once_parametric": {"parametric": accuracy(model, examples, "parametric", once)},
        "true_context": {
            name: accuracy(model, truth, "parametric", s)
            for name, s in (("none", none), ("context", context))
        },
        "invented_subject": {
            name: accuracy(model, unknown, "parametric", s)
            for name, s in (("none", none), ("parametric", parametric))
        },
        "by_relation": by_relation,
        "betas": {
            t: model.head_sets.get(t).model_dump(mode="json")["beta"]
            for t in ("parametric", "context")
        },
        "machine": machine.describe(),
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown tables."""

    def row(name: str, values: dict[str, float], types: tuple[str, ...] = TYPES) -> str:
        return (
            f"| {name} | "
            + " | ".join(f"{values[t]:.3f}" if t in types else "" for t in TYPES)
            + " |"
        )

    conflict = ("substitution", "coherent")
    lines = [
        f"{result['n_facts']} facts of six relations, none of them used to find heads or to tune.",
        "",
        "| what is counted | clean | substitution | coherent |",
        "|---|---|---|---|",
        row("parametric answer, unsteered", result["unsteered"]["parametric"]),
        row("parametric answer, `steer=parametric`", result["steer_parametric"]["parametric"]),
        row(
            "parametric answer, run once (JuNe) with the same heads",
            result["run_once_parametric"]["parametric"],
        ),
        row("context answer, unsteered", result["unsteered"]["context"], conflict),
        row("context answer, `steer=context`", result["steer_context"]["context"], conflict),
        "",
        "What it costs where it is not needed (share of right answers):",
        "",
        "| situation | clean | short context | paragraph |",
        "|---|---|---|---|",
        row("no context, unsteered", result["unsteered"]["parametric"], ("clean",)),
        row("no context, `steer=context`", result["steer_context"]["parametric"], ("clean",)),
        row("true context, unsteered", result["true_context"]["none"], conflict),
        row("true context, `steer=context`", result["true_context"]["context"], conflict),
        row(
            "invented subject with its context, unsteered",
            result["invented_subject"]["none"],
            conflict,
        ),
        row(
            "invented subject with its context, `steer=parametric`",
            result["invented_subject"]["parametric"],
            conflict,
        ),
        "",
        "By relation (heads come from four world capitals):",
        "",
        (
            "| relation | n | parametric: clean / substitution / coherent | context: "
            "substitution / coherent |"
        ),
        "|---|---|---|---|",
    ]
    for name, own in result["by_relation"].items():
        p, c = own["parametric"], own["context"]
        numbers = (
            f"{p['clean']:.3f} / {p['substitution']:.3f} / {p['coherent']:.3f} | "
            f"{c['substitution']:.3f} / {c['coherent']:.3f}"
        )
        lines.append(f"| {name.replace('_', ' ')} | {own['n']} | {numbers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, help="measure on this many facts")
    measured = measure(parser.parse_args().limit)
    print(table(measured))
    print(json.dumps(measured))
