"""Single answers: every prompt of every test fact, what is expected, and what each method said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from juice.data.contexts import context_end
from juice.data.example import ConflictExample
from juice.evaluation.report.parts import Item, Section, number, words
from juice.methods import Target

# More would make a page that a browser opens slowly.
N_SHOWN = 1500


def items_section(results: Mapping[str, Any], target: Target) -> Section | None:
    """Return the single answers toward a target; None where there are none."""
    methods = {
        name: method["answers"]
        for name, method in results["targets"][target].get("methods", {}).items()
        if method.get("answers")
    }
    items = _items(results, target, methods)
    if not items:
        return None
    text = [
        f"{len(items)} prompts, each with its context, its question, what is expected and what "
        "every method answered. All answers are also in `answers.csv`."
    ]
    if len(items) > N_SHOWN:
        text.append(f"This page shows the first {N_SHOWN:,} prompts.")
    return Section(f"Single answers, toward the {target} answer", text=text, items=items[:N_SHOWN])


def _items(
    results: Mapping[str, Any], target: Target, methods: Mapping[str, Mapping[str, Any]]
) -> list[Item]:
    types = dict.fromkeys(t for answers in methods.values() for t in answers)
    made = []
    for i, row in enumerate(results["data"]["test"]):
        for conflict_type in types:
            said = {
                words(name): answer
                for name, answers in methods.items()
                if conflict_type in answers and (answer := answers[conflict_type][i])
            }
            if said:
                made.append(_item(ConflictExample.model_validate(row), conflict_type, target, said))
    return made


def _item(
    example: ConflictExample, conflict_type: Any, target: Target, said: Mapping[str, Any]
) -> Item:
    prompt, end = example.prompts[conflict_type], context_end(example, conflict_type) or 0
    other: Target = "context" if target == "parametric" else "parametric"
    return Item(
        subject=example.subject,
        relation=words(example.relation or ""),
        conflict_type=conflict_type,
        context=prompt[:end].strip(),
        question=prompt[end:],
        expected=", ".join(example.accepted(target)),
        other=f"the {other} answer: {', '.join(example.accepted(other))}",
        answers=[
            (name, output.strip(), is_right, number(p_parametric), number(p_context))
            for name, (output, is_right, p_parametric, p_context) in said.items()
        ],
    )
