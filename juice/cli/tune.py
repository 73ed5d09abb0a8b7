"""`juice tune`: choose the betas of a saved head set on a validation file."""

from __future__ import annotations

from typing import Annotated

import typer

from juice.cli import console, options
from juice.methods import Method
from juice.options import LoadOptions


@options.spelled_out
def run(
    head_set: options.HeadSetArgument,
    validation: Annotated[str, typer.Option(help=options.SOURCES)],
    loading: LoadOptions,
    model: options.Model = "mini",
    method: Annotated[Method, typer.Option(help="The dual run, or the single run.")] = "juice",
    chat_template: options.ChatTemplate = None,
    head_sets: options.HeadSets = None,
    json: options.Json = False,
) -> None:
    """Choose the betas of a head set on a validation file and save them in it.

    A set that was found through the tokenizer's chat template is tuned through it; for another
    template, give the file.
    """
    from juice.data.readers import read_examples
    from juice.head_set.lookup import find_head_set
    from juice.head_set.writing import check_writable
    from juice.identification import tune
    from juice.identification.form import in_form_of_examples
    from juice.identification.scored_prompt import with_scored_answers

    folder, chosen = find_head_set(head_set, head_sets)
    check_writable(folder.resolve(), overwrite=True)
    examples = read_examples(validation, split="validation")
    loaded = options.load(model, loading)
    loaded.check_fits(chosen)
    loaded = options.in_chat(loaded, chat_template).in_form_of(chosen)
    in_form_of_examples(loaded, examples, is_chosen=True)  # warns where they differ
    tuned = tune(
        loaded,
        chosen,
        with_scored_answers(loaded, examples),
        method=method,
        progress=console.progress,
    )
    tuned.save(folder, overwrite=True)
    betas, gate = tuned.betas(method), tuned.gate(method)
    metrics = tuned.metrics[f"validation_{method}"]
    assert betas is not None, "tune sets the betas"
    if json:
        console.answer_json(
            {
                "path": str(folder),
                "method": method,
                "beta": betas.model_dump(),
                "gate": gate.model_dump() if gate else None,
                "metrics": metrics,
            }
        )
        return
    console.answer(f"{folder}: {method} betas {betas}")
    for conflict_type, value in metrics["accuracy"].items():
        console.answer(
            f"  {conflict_type:13}{metrics['accuracy_unsteered'][conflict_type]:.2f} -> {value:.2f}"
        )
    for rule in gate.rules if gate else ("none: no signal tells well when to steer",):
        console.answer(f"  gate         {rule}")
