"""Accuracy under other templates (the paper's table 7).

Every prompt of a fact is made from templates drawn at random, which are data, by relation:

    {"<relation>": {"stems": [...], "paragraphs": [...], "questions": [...]}}

with {subject} and {context_answer} in them. A stem ends just before the answer. A clean prompt is a
stem; substitution is a stem with the context answer, then the same stem; coherent is a paragraph, a
question and a stem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from juice.data.example import ConflictExample
from juice.errors import ExampleError
from juice.evaluation.analyses.inputs import AnalysisInputs
from juice.evaluation.answers import ask
from juice.evaluation.methods import MethodName, methods_for
from juice.evaluation.tables import table

PARTS = ("stems", "paragraphs", "questions")
COMPARED: tuple[MethodName, ...] = ("original", "served")


def measure(inputs: AnalysisInputs) -> dict[str, Any]:
    """Return {methods: {method: table}, n_examples, example: the prompts of the first fact}."""
    examples = paraphrased(inputs.splits.test, inputs.templates or {}, inputs.seed)
    if not examples:
        raise ExampleError(
            "there are no templates for these relations; give a file with --templates"
        )
    measured = {}
    for name in methods_for(inputs.target, COMPARED):
        if name == "served" and inputs.head_set is None:
            continue
        treatments = inputs.preparer.treatments(name, inputs.target, inputs.choice(name))
        answers = ask(
            inputs.model,
            examples,
            inputs.judged_types,
            treatments,
            inputs.target,
            progress=inputs.progress,
            description="paraphrases",
        )
        measured[name] = table(examples, answers)
    return {"methods": measured, "n_examples": len(examples), "example": dict(examples[0].prompts)}


def check_templates(templates: Any, where: str) -> None:
    """Raise ExampleError unless these are templates by relation."""
    if not isinstance(templates, dict) or not templates:
        raise ExampleError(
            f"{where}: expected an object with each relation's templates under its name"
        )
    for relation, own in templates.items():
        for part in PARTS:
            texts = own.get(part) if isinstance(own, dict) else None
            if (
                not isinstance(texts, list)
                or not texts
                or not all(isinstance(text, str) for text in texts)
            ):
                raise ExampleError(
                    f"{where}: {relation}.{part} is missing or not a list of texts; "
                    f"each relation needs {', '.join(PARTS)}"
                )
            for text in texts:
                try:
                    text.format(subject="", context_answer="")
                except (KeyError, IndexError, ValueError) as error:
                    raise ExampleError(
                        f"{where}: {relation}.{part}: {text!r} has other fields "
                        "than {subject} and {context_answer}"
                    ) from error


def paraphrased(
    examples: Sequence[ConflictExample], templates: Mapping[str, Any], seed: int
) -> list[ConflictExample]:
    """Return the examples whose relation has templates, with their prompts rephrased."""
    rng, made = Random(seed), []
    for example in examples:
        own = templates.get(example.relation or "")
        if own is None:
            continue
        names = {"subject": example.subject, "context_answer": example.context_answer[0]}
        stems = [rng.choice(own["stems"]).format(**names) for _ in range(3)]
        paragraph, question = (
            rng.choice(own[part]).format(**names) for part in ("paragraphs", "questions")
        )
        prompts = {
            "clean": stems[0],
            "substitution": f"{stems[1]} {names['context_answer']}. {stems[1]}",
            "coherent": f"{paragraph} Question: {question} Answer: {stems[2]}",
        }
        prompts = {t: prompt for t, prompt in prompts.items() if t in example.prompts}
        made.append(
            example.model_copy(
                update={"prompts": prompts, "context": None, "question": None, "opening": ""}
            )
        )
    return made
