"""The one door to identification: from examples to tuned head sets, whichever way they are found.

Heads are scored on some examples, and candidates compete on others, which tune their betas and
measure the gate.

Scores select heads by the consistency filter and the top K (method.md, stage 1, steps 2 and 3): a
head is kept for a sign only if its score is above zero under every conflict type; kept heads are
ranked by the sum of their scores over the types; ties go to the lower (layer, head).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from time import monotonic
from typing import Any, Unpack

import torch

from juice.data.example import ConflictExample, examples_sha256, fact_keys
from juice.data.memory import N_REMEMBERED, examples_of_prompts, remembered_examples
from juice.data.readers.sources import Examples, prompts_without_answers, read_examples
from juice.engine.contract import Capability
from juice.errors import JuiceError, NoConsistentHeadError, UsageError
from juice.formula import ConflictType, Target
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import NAME_PATTERN, Head, HeadLists, Methods
from juice.head_set.scores import HeadScores
from juice.identification.attribution import attribute_heads
from juice.identification.auto import best_way, decided, learned_ways
from juice.identification.examples import (
    N_TUNED_ON,
    in_form_of_examples,
    known_share,
    spread,
    usable_examples,
    validation_share,
    with_scored_answers,
)
from juice.identification.options import (
    N_DIFFERENTIATED,
    TOP_K,
    IdentificationFields,
    IdentificationOptions,
)
from juice.identification.probes import score_heads
from juice.identification.task import Task, Unfinished, UnfinishedFile
from juice.identification.tune import choose_and_tune
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel
from juice.version import versions

MEMORY = "memory"
LEARNING_SHARE = 0.7  # of the time that is given


@dataclass(frozen=True, kw_only=True)
class Found:
    """What an identification found: the head set of each target, or why it has none.

    `unfinished` has what was computed, for `remove` once the head sets are saved.
    """

    head_sets: dict[Target, HeadSet]
    unreached: dict[Target, NoConsistentHeadError]
    unfinished: Unfinished


def identify(
    model: SteeredModel,
    examples: Examples | None = None,
    *,
    target: Target,
    validation: Examples | None = None,
    chat_template: str | Path | None = None,
    progress: Progress = silent,
    **options: Unpack[IdentificationFields],
) -> HeadSet:
    """Find the heads that push toward a target, and tune them (docs/method.md, "Stage 1").

    Args:
        model: The model, on an engine that gives access to its activations.
        examples: Facts that the model knows, each with a wrong answer: examples, rows, a data set
            of `datasets`, or what `juice.read_examples` takes. None: what the model remembers of
            the subjects that come with JuICE; the bundled model's own facts for that one.
        target: `parametric` or `context`.
        validation: Examples to choose heads and tune betas on, as `examples`; None: 48 of those
            that the model knows and that are not drawn to find heads.
        chat_template: Make every prompt a user's message in a chat, where answers begin the
            assistant's turn: `default` for the tokenizer's own template, a file, or a template's
            text; `none` for plain prompts; None: as the examples were made.
        progress: Reports how far each piece of work is.
        options: As those of `juice identify`, with its defaults:
            name: The head set's name; None: the target.
            method: `attribution`, by gradients; `learned`, with a beta for each head; `auto`,
                whichever validates best, in one run or in two; `probe`, the paper's way.
            n_examples: How many of the examples are drawn; None: 72, at most 0.6 of what there
                is, to learn from, 16 for attribution, and the paper's 4 for probes.
            relation: Draw examples of this relation only.
            seed: Seed of the draw.
            top_k: Heads of each sign; None: 3, 5 and 10 compete, or the paper's 5 for probes.
            alphas_plus, alphas_minus: Probing scales of the + heads, above 0, and of the - heads.
            penalty: What a learned beta of 1 costs, in nats; None: 0.01.
            max_divergence: How far ordinary text, and prompts that leave open what is said, may
                diverge, in nats a token; None: 0.05, or 0.1 where learned betas win little within.
            budget: Seconds, or a text such as `5m`, after which the best so far is taken.
            protect: Which prompts steering is kept from breaking: `unknown`, `clean`, `true` and
                `irrelevant`.
            accepted_loss: The share of these that may break at no cost.
            tune: Whether to tune betas and measure a gate; learned heads come with betas anyhow.
            june: Whether to tune the betas of the single run, too.

    Returns:
        The head set with its scores, its betas, what they did to the validation examples, and its
        gate. Where no validation example can be used, it warns, and the set is untuned.

    Raises:
        ExampleError: Too few examples can be used.
        NoConsistentHeadError: No head of either sign helps under every conflict type.
        UsageError: An option is out of range, or there is no such template.
        UnsupportedModelError: Gradients do not pass through the model.
        MissingCapabilityError: The engine does not give access to activations.
    """
    model.engine.require(Capability.ACTIVATIONS)
    how = IdentificationOptions.of(target=target, **options)
    if chat_template is not None:
        model = model.with_chat_template(None if chat_template == "none" else chat_template)
    held_out = None if validation is None else read_examples(validation, split="validation")
    began = monotonic()
    pool = pool_of(model, examples, how, progress)
    model = in_form_of_examples(model, pool, is_chosen=chat_template is not None)
    found = find(model, pool, how, validation=held_out, progress=progress, began=began)
    return found.head_sets[target]


def pool_of(
    model: SteeredModel,
    examples: Examples | None,
    options: IdentificationOptions,
    progress: Progress = silent,
) -> list[ConflictExample]:
    """Return the examples to draw from: those given, or what the model remembers.

    `memory` names the latter; it is what there is where none are given, but for the bundled model.
    Of prompts without answers, it is what the model remembers about these. It warns where that is
    less than is wanted. Raises ExampleError.
    """
    if examples is None:
        examples = "mini" if model.id == "mini" else MEMORY
    wanted = max(N_REMEMBERED, (options.n_examples or 0) + N_TUNED_ON)
    asked: dict[str, Any] = {"n": wanted, "seed": options.seed, "progress": progress}
    if examples == MEMORY:
        found = remembered_examples(model, relation=options.relation, **asked)
    elif prompts := prompts_without_answers(examples):
        wanted = min(wanted, len(prompts))
        found = examples_of_prompts(model, prompts, **asked)
    else:
        return read_examples(examples, split="identification")
    if len(found) < wanted:
        warnings.warn(
            f"the model remembers {len(found)} facts with confidence, of {wanted} wanted",
            stacklevel=2,
        )
    return found


def find(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    options: IdentificationOptions,
    *,
    validation: Sequence[ConflictExample] | None = None,
    progress: Progress = silent,
    kept_in: Path | None = None,
    began: float | None = None,
) -> Found:
    """Find a head set toward each target that is asked for, all on the same drawn examples.

    Betas are tuned on the validation examples; None: on 48 of those that are not drawn. A file
    `kept_in` keeps what is computed, for a later call with the same words. The time that the
    options give began at `began`, on the monotonic clock; None: now.

    Raises:
        ExampleError: Too few examples can be used, or they have no conflict for a target.
        JuiceError: Scaled heads overflow.
        NoConsistentHeadError: No target has heads.
        UnsupportedModelError: Gradients do not pass through the model.
        UsageError: A name cannot be a head set's.
    """
    began = monotonic() if began is None else began
    for name in options.names.values():
        check_name(name)
    scored, n_kept = with_scored_answers(model, examples), 0 if validation else N_TUNED_ON
    drawn, rest = usable_examples(model, scored, options, n_kept=n_kept)
    if validation is not None:
        held_out = with_scored_answers(model, validation)
        found_on = set(fact_keys(drawn))
        if n_alike := sum(key in found_on for key in fact_keys(held_out)):
            warnings.warn(
                f"{n_alike} of {len(held_out)} validation examples are about facts that find the "
                "heads, too: what is measured on these says little of others",
                stacklevel=2,
            )
    elif options.method == "probe":
        held_out = validation_share(rest, options.seed, n=N_TUNED_ON)
    else:
        held_out = known_share(model, rest, options.seed)
    unfinished = Unfinished()
    if kept_in is not None:
        unfinished = UnfinishedFile(kept_in, _identity(model, drawn, held_out, options))
    tasks = [
        Task(
            model=model,
            target=target,
            examples=drawn,
            validation=held_out,
            options=options,
            progress=progress,
            unfinished=unfinished,
        )
        for target in options.names
    ]
    return _found(tasks, began, options.seconds)


def _identity(
    model: SteeredModel,
    drawn: Sequence[ConflictExample],
    held_out: Sequence[ConflictExample],
    options: IdentificationOptions,
) -> dict[str, Any]:
    """Return all that the results of an identification depend on, as plain data."""
    description = model.description
    return {
        "model": description.identity.model_dump(mode="json"),
        "dtype": description.dtype,
        "quantization": description.quantization,
        "exact": description.exact,
        "chat_template": model.prompts.sha256,
        "drawn": examples_sha256(drawn),
        "validation": examples_sha256(held_out),
        "options": options.model_dump(mode="json"),
        "versions": versions(),
    }


def _found(tasks: Sequence[Task], began: float, budget: float | None) -> Found:
    head_sets, unreached = dict[Target, HeadSet](), dict[Target, NoConsistentHeadError]()
    types = {task.target: task.conflict_types for task in tasks}
    scores, asked_until = cache(lambda: _scores(tasks[0], types)), monotonic()
    for i, task in enumerate(tasks):
        if budget is not None:
            # What is left of a target's share goes to measuring.
            left = max(0.0, began + budget - asked_until)
            task = replace(task, deadline=asked_until + left * (i + LEARNING_SHARE) / len(tasks))
        try:
            head_sets[task.target] = _found_toward(task, scores)
        except NoConsistentHeadError as error:
            unreached[task.target] = error
    if not head_sets:
        raise next(iter(unreached.values()))
    return Found(head_sets=head_sets, unreached=unreached, unfinished=tasks[0].unfinished)


def _found_toward(task: Task, scores: Callable[[], dict[Target, HeadScores]]) -> HeadSet:
    """Return the head set of a task; `scores` gives those of every target, where it needs them."""

    def competing() -> list[HeadSet]:
        return candidates(task, scores()[task.target])

    if task.options.method in ("attribution", "probe"):
        return choose_and_tune(task, competing()) if task.options.tune else competing()[0]
    if task.options.method == "learned":
        return decided(task, learned_ways(task, task.options.methods))
    return best_way(task, competing)


def _scores(
    task: Task, targets: dict[Target, tuple[ConflictType, ...]]
) -> dict[Target, HeadScores]:
    """Return the scores of every head for each target, from one pass over a task's examples."""
    options, examples = task.options, task.examples
    if options.method == "auto":  # a few compete with coefficients that are learned from all
        examples = list(spread(examples, options.seed))[:N_DIFFERENTIATED]
    score = partial(attribute_heads, task.model, examples)
    if options.method == "probe":
        score = partial(
            score_heads,
            task.model,
            task.examples,
            alphas_plus=options.alphas_plus,
            alphas_minus=options.alphas_minus,
        )
    scores = score(targets=targets, progress=task.progress, unfinished=task.unfinished)
    if not all(one.plus.isfinite().all() and one.minus.isfinite().all() for one in scores.values()):
        remedy = "give smaller alphas, or " if options.method == "probe" else ""
        raise JuiceError(
            f"some scores are not finite: the model's activations overflow; {remedy}load with "
            "--dtype float32"
        )
    return scores


def candidates(task: Task, scores: HeadScores) -> list[HeadSet]:
    """Return a head set without betas for each number of heads to try, where these differ.

    Raises NoConsistentHeadError where the scores choose no head of either sign.
    """
    sets: list[HeadSet] = []
    for top_k in task.options.top_ks:
        heads = chosen_heads(scores, top_k)
        if all(heads != other.heads for other in sets):
            sets.append(task.head_set(Methods.sharing(heads), scores, top_k))
    return sets


def select_heads(
    plus: torch.Tensor, minus: torch.Tensor, *, top_k: int
) -> tuple[list[Head], list[Head]]:
    """Return the + heads and the - heads, best first.

    `plus` and `minus` are scores [n_conflict_types, n_layers, n_heads]. Raises UsageError for a
    `top_k` below 1.
    """
    if top_k < 1:
        raise UsageError(f"top_k is {top_k}; {TOP_K}")
    return _best(plus, top_k), _best(minus, top_k)


def chosen_heads(scores: HeadScores, top_k: int) -> HeadLists:
    """Return the heads that scores choose; raises NoConsistentHeadError where there are none."""
    plus, minus = select_heads(scores.plus, scores.minus, top_k=top_k)
    if not plus and not minus:
        gentler = (
            "gentler alphas (--alphas-plus 0.5,1,2,3 --alphas-minus=-0.5,-1), "
            if scores.kind == "probe"
            else ""
        )
        raise NoConsistentHeadError(
            f"no head raises the probability of the {scores.target} answer under all of "
            f"{', '.join(scores.conflict_types)}; try {gentler}more examples (--n-examples) or "
            "another --seed"
        )
    return HeadLists(plus=tuple(plus), minus=tuple(minus))


def _best(scores: torch.Tensor, top_k: int) -> list[Head]:
    consistent = (scores > 0).all(0)  # [n_layers, n_heads]
    total = scores.double().sum(0)
    heads = [Head(layer, index) for layer, index in consistent.nonzero().tolist()]
    return sorted(heads, key=lambda head: (-float(total[head]), head))[:top_k]


def check_name(name: str) -> None:
    """Raise UsageError for a name that a head set cannot have."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(
            f"the name {name!r} cannot be a head set's; "
            "expected up to 64 letters, digits, dots, dashes and underscores"
        )
