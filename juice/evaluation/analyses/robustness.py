"""How far accuracy holds: over the number of examples, the heads, the betas, runs and templates.

The paper's figure 5 and table 2 vary one thing at a time; its table 7 has other templates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import torch

from juice.data.example import ConflictExample
from juice.engine.steer import Steer
from juice.errors import ExampleError
from juice.evaluation.analyses.inputs import (
    N_EXAMPLES,
    AnalysisInputs,
    pool_of,
    score_each,
    scores_of,
)
from juice.evaluation.analyses.single_heads import knock_out_scores
from juice.evaluation.answers import accuracy_of, ask, mean
from juice.evaluation.methods import UNSTEERED, Treatment
from juice.evaluation.options import MethodName
from juice.evaluation.results import table
from juice.evaluation.splits import limited
from juice.formula import METHODS, ConflictType, Method
from juice.head_set.schema import Betas, Head
from juice.identification.find import select_heads

SIZES = range(1, 11)
TOP_KS = (1, 2, 3, 5, 7, 10, 15, 20, 30)
BETAS_PLUS = tuple(0.5 * i for i in range(11))
BETAS_MINUS = tuple(-0.5 * i for i in range(11))
N_GRID_EXAMPLES = 20
N_HEADS = 10


def measure_robustness(inputs: AnalysisInputs) -> dict[str, Any]:
    """Return the accuracy for each |D|, each K and each pair of betas.

    {examples: [{n, accuracy}], heads: [{k, accuracy}], betas: {plus, minus, accuracy:
    [plus][minus], n_examples}, unsteered, beta, n_examples}
    """
    if inputs.head_set is None:
        raise ExampleError("there is no head set to vary")
    tuned = inputs.head_set.betas()
    betas = Betas(plus=1.0, minus=-1.0) if tuned is None or tuned.is_per_head else tuned
    scored = score_each(inputs, pool_of(inputs, max(SIZES)))
    few, top_k = inputs.few, inputs.options.top_ks[0]
    n_drawn = min(len(inputs.splits.identification[inputs.target]), len(scored))

    def accuracy_of(n: int, k: int) -> float:
        scores = scores_of(scored[:n])
        plus, minus = select_heads(scores.plus, scores.minus, top_k=k)
        return accuracy(inputs, few, plus, minus, betas)

    sizes = [n for n in SIZES if n <= len(scored)]
    return {
        "examples": [{"n": n, "accuracy": accuracy_of(n, top_k)} for n in sizes],
        "heads": [{"k": k, "accuracy": accuracy_of(n_drawn, k)} for k in TOP_KS],
        "betas": _grid(inputs, limited(few, N_GRID_EXAMPLES, inputs.options.seed)),
        "unsteered": accuracy(inputs, few, [], [], betas),
        "beta": betas.model_dump(),
        "n_examples": len(few),
    }


def _grid(inputs: AnalysisInputs, examples: Sequence[ConflictExample]) -> dict[str, Any]:
    assert inputs.head_set is not None, "checked above"
    heads = inputs.head_set.heads
    # A sign without heads changes nothing, so one value is enough.
    plus, minus = BETAS_PLUS if heads.plus else (0.0,), BETAS_MINUS if heads.minus else (0.0,)
    rows: list[list[float]] = []
    with inputs.progress("varying the betas", len(plus) * len(minus)) as advance:
        for beta_plus in plus:
            rows.append([])
            for beta_minus in minus:
                betas = Betas(plus=beta_plus, minus=beta_minus)
                rows[-1].append(accuracy(inputs, examples, heads.plus, heads.minus, betas))
                advance(1)
    return {"plus": list(plus), "minus": list(minus), "accuracy": rows, "n_examples": len(examples)}


def accuracy(
    inputs: AnalysisInputs,
    examples: Sequence[ConflictExample],
    plus: Sequence[Head],
    minus: Sequence[Head],
    betas: Betas,
) -> float:
    """Return the mean accuracy over the target's conflict types; without heads nothing steers."""
    steer = UNSTEERED
    if plus or minus:
        head_set = inputs.model.make_head_set(
            name="varied",
            target=inputs.target,
            plus=plus,
            minus=minus,
            beta_plus=betas.plus,
            beta_minus=betas.minus,
        )
        steer = Steer(target=inputs.target, head_set=head_set)
    answers = inputs.ask(examples, inputs.judged_types, steer)
    return mean([accuracy_of(given) for given in answers.values()])


def measure_running_once(inputs: AnalysisInputs) -> dict[str, Any]:
    """Return p of the target's answer, mean over examples, with 0 to 10 heads removed.

    {n_examples, n_finders, by_type: {conflict type: {heads, none: p, juice: [p with 1, 2 ... heads
    removed], june: [...]}}}
    """
    drawn = [*inputs.splits.finders_of(inputs.target), *inputs.splits.validation]
    finders = limited(drawn, N_EXAMPLES, inputs.options.seed)
    by_type: dict[ConflictType, Any] = {}
    for conflict_type in inputs.conflicts:
        finding = [e for e in finders if conflict_type in e.prompts]
        if not finding:
            continue
        changes = knock_out_scores(inputs.model, finding, (conflict_type,), inputs.progress)
        heads = best_heads(changes[inputs.target][0])
        by_type[conflict_type] = {
            "heads": [list(head) for head in heads],
            "none": mean_p(inputs, conflict_type, [], "juice"),
        }
        for method in METHODS:
            by_type[conflict_type][method] = [
                mean_p(inputs, conflict_type, heads[: i + 1], method) for i in range(len(heads))
            ]
    if not by_type:
        raise ExampleError(
            "no conflict type is in every test example and in an example that ranks heads"
        )
    return {"n_examples": len(inputs.few), "n_finders": len(finders), "by_type": by_type}


def best_heads(changes: torch.Tensor) -> list[Head]:
    """Return up to ten heads whose removal raises p, best first, by changes [layers, heads]."""
    heads = [Head(layer, index) for layer, index in (changes > 0).nonzero().tolist()]
    return sorted(heads, key=lambda head: (-float(changes[head]), head))[:N_HEADS]


def mean_p(
    inputs: AnalysisInputs, conflict_type: ConflictType, heads: Sequence[Head], method: Method
) -> float:
    """Return the mean p of the target's answer with these heads removed, in one run or in two."""
    model, target, steer = inputs.model, inputs.target, UNSTEERED
    if heads:
        head_set = model.make_head_set(
            name="removed", target=target, minus=heads, beta_minus=-1.0, method=method
        )
        steer = Steer(target=target, head_set=head_set, method=method)
    treatment = Treatment(target=target, steer=steer)
    requests = [treatment.request(model, e, conflict_type, max_tokens=1) for e in inputs.few]
    watched = [c.watched for c in model.engine.generate(requests)]
    at = 0 if target == "parametric" else 1
    return mean([math.exp(logprobs[at]) for logprobs in watched if logprobs])


PARTS = ("stems", "paragraphs", "questions")


def measure_paraphrases(inputs: AnalysisInputs) -> dict[str, Any]:
    """Return {methods: {method: table}, n_examples, example: the prompts of the first fact}."""
    examples = paraphrased(inputs.splits.test, inputs.templates or {}, inputs.options.seed)
    if not examples:
        raise ExampleError(
            "there are no templates for these relations; give a file with --templates"
        )
    measured = {}
    compared: list[MethodName] = ["original", "served"] if inputs.head_set else ["original"]
    for name in compared:
        answers = ask(
            inputs.model,
            examples,
            inputs.judged_types,
            inputs.treatments_of(name),
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
    for relation, parts in templates.items():
        for part in PARTS:
            texts = parts.get(part) if isinstance(parts, dict) else None
            is_list = isinstance(texts, list) and texts and all(isinstance(t, str) for t in texts)
            if not is_list:
                raise ExampleError(
                    f"{where}: {relation}.{part} is missing or not a list of texts; "
                    f"each relation needs {', '.join(PARTS)}"
                )
            for text in texts or ():
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
        parts = templates.get(example.relation or "")
        if parts is None:
            continue
        names = {"subject": example.subject, "context_answer": example.context_answer[0]}
        stems = [rng.choice(parts["stems"]).format(**names) for _ in range(3)]
        paragraph = rng.choice(parts["paragraphs"]).format(**names)
        question = rng.choice(parts["questions"]).format(**names)
        prompts = {
            "clean": stems[0],
            "substitution": f"{stems[1]} {names['context_answer']}. {stems[1]}",
            "coherent": f"{paragraph} Question: {question} Answer: {stems[2]}",
        }
        prompts = {t: prompt for t, prompt in prompts.items() if t in example.prompts}
        changes = {"prompts": prompts, "context": None, "question": None, "opening": ""}
        made.append(example.model_copy(update=changes))
    return made
