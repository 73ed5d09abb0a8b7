"""`juice select` and `juice tune`: the heads of a saved head set from its scores, and its betas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from juice.cli import console, options
from juice.engine.load_options import LoadOptions
from juice.formula import Method

if TYPE_CHECKING:
    from juice.head_set.head_set import HeadSet


def select(
    head_set: options.HeadSetArgument,
    top_k: Annotated[int, typer.Option(help="Heads of each sign.")] = 5,
    head_sets: options.HeadSets = None,
    json: options.Json = False,
) -> None:
    """Choose the top K consistent heads of each sign from saved scores."""
    from juice.head_set.library import find_scores
    from juice.head_set.scores import MEANINGS
    from juice.identification.find import chosen_heads

    saved = find_scores(head_set, head_sets)
    heads = chosen_heads(saved, top_k)
    if json:
        document = {"target": saved.target, "conflict_types": saved.conflict_types}
        console.answer_json({**document, "heads": heads.model_dump(mode="json")})
        return
    console.answer(f"sign head    score (sum over conflict types: {MEANINGS[saved.kind]})")
    for sign, table, chosen in (("+", saved.plus, heads.plus), ("-", saved.minus, heads.minus)):
        for head in chosen:
            console.answer(f"{sign:5}{head!s:8}{float(table[:, head.layer, head.index].sum()):.4f}")
        if len(chosen) < top_k:
            console.note(f"{len(chosen)} {sign} heads are consistent, {top_k} were requested")


@options.spelled_out
def run(
    head_set: options.HeadSetArgument,
    validation: Annotated[str, typer.Option(help=options.SOURCES)],
    loading: LoadOptions,
    model: options.Model = "mini",
    method: Annotated[
        Method | None,
        typer.Option(help="The dual run, or the single run; else the head set's default."),
    ] = None,
    chat_template: options.ChatTemplate = None,
    head_sets: options.HeadSets = None,
    json: options.Json = False,
) -> None:
    """Choose the betas of a head set on a validation file and save them in it.

    A set that was found through the tokenizer's chat template is tuned through it; for another
    template, give the file.
    """
    from juice.data.readers.sources import read_examples
    from juice.head_set.library import find_head_set
    from juice.head_set.storage import check_writable
    from juice.identification.tune import tune

    folder, chosen = find_head_set(head_set, head_sets)
    check_writable(folder.resolve(), overwrite=True)
    examples = read_examples(validation, split="validation")
    loaded = options.in_chat(options.load(model, loading), chat_template)
    tuned = tune(loaded, chosen, examples, method=method, progress=console.progress)
    tuned.save(folder, overwrite=True)
    method = method or tuned.method
    betas, gate = tuned.betas(method), tuned.gate(method)
    assert betas is not None, "tune sets the betas"
    if json:
        console.answer_json(
            {
                "path": str(folder),
                "method": method,
                "beta": betas.model_dump(),
                "gate": gate.model_dump() if gate else None,
                "metrics": tuned.metrics[f"validation_{method}"],
            }
        )
        return
    console.answer(f"{folder}: {method} betas {betas}")
    answer_effect(tuned, method)


def answer_effect(head_set: HeadSet, method: Method) -> None:
    """Print the effect of the betas on the validation examples, their gain, and their gate."""
    measured, gate = head_set.validation(method), head_set.gate(method)
    if measured is None:
        return
    for conflict_type, value in measured.accuracy.items():
        before = measured.accuracy_unsteered[conflict_type]
        console.answer(f"  {conflict_type:13}{before:.2f} -> {value:.2f}")
    for kind, (before, after) in measured.side_effects.items():
        if kind not in measured.accuracy:
            console.answer(f"  {kind:13}{before:.2f} -> {after:.2f}  (should not change)")
    if measured.gain is not None and measured.gain_interval is not None:
        low, high = measured.gain_interval
        console.answer(
            f"  gain         {measured.gain:+.2f} [{low:+.2f}, {high:+.2f}]  ({head_set.target} "
            f"answers to {measured.n_examples} validation facts in conflict)"
            f"{': weak' if measured.is_weak else ''}"
        )
    if measured.coverage:
        console.answer(f"  covers       {measured.coverage}")
    for line in measured.harm_lines:
        console.answer(f"  harm         {line}")
    if beyond := measured.beyond:
        console.answer(
            f"  beyond       {beyond.won:.2f} of the conflicts would be won at "
            f"{beyond.divergence:.3f} nats a token (--max-divergence)"
        )
    for rule in gate.rules if gate else ("none: no signal tells well when to steer",):
        console.answer(f"  gate         {rule}")
