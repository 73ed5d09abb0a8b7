"""What the bundled model knows and what steering does to it.

    python -m benchmarks.quality [--limit N] [--third-party FOLDER] [--json FILE]

Our own prompts are about facts that neither identification nor tuning saw, in the four forms of
`lab.examples`: the prompts that the model was trained to continue, wordings that it never saw, and
messages in a chat. Accuracy is the paper's: an accepted answer within the first five words of 15
greedy tokens. `--third-party` is a folder with ParaConflict's `world_capital` and
`official_language` files, which are measured as they are. Intervals are Wilson's, 95 %.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import juice
from benchmarks import rig
from juice.data.example import ConflictExample, context_end, examples_sha256
from juice.data.judging import MAX_TOKENS, normalise
from juice.engine.steer import Steer
from juice.formula import CONFLICTS, ConflictType, Target
from juice.identification.examples import (
    N_TUNED_ON,
    known_share,
    usable_examples,
    validation_share,
)
from juice.identification.options import IdentificationOptions
from juice.identification.outcomes import share_interval
from juice.steered_model import SteeredModel
from lab.examples import FORMS, Form, conflict_examples, prompts
from lab.relations import RELATIONS, Fact, fill

TYPES: tuple[ConflictType, ...] = ("clean", "substitution", "coherent")
THIRD_PARTY = ("world_capital", "official_language")
Share = tuple[int, int]  # right answers, of how many
TITLES: dict[Form, str] = {
    "canonical": "The prompts of the shipped examples",
    "trained": "Wordings of the training",
    "kept_out": "Wordings kept out of training",
    "chat": "Chat",
}
# What is counted, under which steering, and whose answer where both are.
ROWS = (
    ("memory's answer, unsteered", "unsteered", "parametric"),
    ("context's answer, unsteered", "unsteered", "context"),
    ("memory's answer, `steer=parametric`", "steer_parametric", None),
    ("the same, `gate: auto`", "gated_parametric", "joined"),
    ("the same, the context apart", "gated_parametric", "apart"),
    ("memory's answer in one run (JuNe)", "run_once_parametric", None),
    ("context's answer, `steer=context`", "steer_context", "context"),
    ("the same, `gate: auto`", "gated_context", "context"),
    ("right without a context, `steer=context`", "steer_context", "parametric"),
    ("the same, `gate: auto`", "gated_context", "parametric"),
    ("true context, unsteered", "true_context", "none"),
    ("true context, `steer=context`", "true_context", "context"),
    ("invented subject, unsteered", "invented_subject", "none"),
    ("invented subject, `steer=parametric`", "invented_subject", "parametric"),
    ("the same, `gate: auto`", "invented_subject", "joined"),
    ("the same, the context apart", "invented_subject", "apart"),
)


def unseen_subjects(model: SteeredModel, limit: int | None = None) -> list[tuple[str | None, str]]:
    """Return relation and subject of what the shipped sets were neither found nor tuned on.

    With a limit, of so many drawn from them.
    """
    pool, seen = juice.read_examples("mini"), set()
    for target in ("parametric", "context"):
        found = model.head_sets.get(target).identification
        assert found is not None, "the shipped sets come from `juice identify`"
        options = IdentificationOptions(
            method=found.method, n_examples=found.n_examples, seed=found.seed
        )
        drawn, rest = usable_examples(model, pool, options)
        if examples_sha256(drawn) != found.examples_sha256:
            raise SystemExit(
                f"the {target} set was not found on the {found.n_examples} examples of mini that "
                f"seed {found.seed} draws; identify it anew"
            )
        seen |= {id(e) for e in [*drawn, *validation_share(rest, found.seed, n=N_TUNED_ON)]}
        if found.method != "probe":  # older versions tuned these sets on the others, too
            seen |= {id(e) for e in known_share(model, rest, found.seed)}
    unseen = [(e.relation, e.subject) for e in pool if id(e) not in seen]
    return unseen if limit is None else Random(0).sample(unseen, limit)


def in_form(subjects: Sequence[tuple[str | None, str]], form: Form) -> list[ConflictExample]:
    """Return the examples about these subjects, written in a form."""
    wanted = set(subjects)
    rows = conflict_examples(form=form)
    return [ConflictExample(**row) for row in rows if (row["relation"], row["subject"]) in wanted]


def told_the_truth(examples: Sequence[ConflictExample], form: Form) -> list[ConflictExample]:
    """Return the same facts with true contexts."""
    rng, relations = Random(0), {relation.name: relation for relation in RELATIONS}
    asked = [
        prompts(
            relations[e.relation or ""],
            Fact(e.subject, e.parametric_answer[0]),
            e.parametric_answer[0],
            rng,
            form,
        )
        for e in examples
    ]
    return [e.model_copy(update={"prompts": p}) for e, p in zip(examples, asked, strict=True)]


def invented(n: int, form: Form) -> list[ConflictExample]:
    """Return subjects that do not exist; only the context of each has its answer."""
    rng, made = Random(1), []
    for i in range(n):
        relation = RELATIONS[i % len(RELATIONS)]
        fact = relation.invent(rng)
        made.append(
            ConflictExample(
                subject=fact.subject,
                parametric_answer=fact.answer,
                context_answer=relation.other_answer(fact, rng),
                prompts=prompts(relation, fact, fact.answer, rng, form),
            )
        )
    return made


def answers(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    steer: Steer,
    types: tuple[ConflictType, ...] = TYPES,
    *,
    apart: bool = False,
) -> dict[ConflictType, list[str]]:
    """Return what is answered to each example, by conflict type.

    With `apart`, contexts are given apart from their prompts.
    """
    asked = [
        (e.prompts[t], context_end(e, t) or 0 if apart else 0) for t in types for e in examples
    ]
    given = model.generate(
        [text[end:] for text, end in asked],
        context=[text[:end] if end else None for text, end in asked],
        steer=steer,
        max_tokens=MAX_TOKENS,
    )
    texts, n = [done.text for done in given], len(examples)
    return {t: texts[i * n : (i + 1) * n] for i, t in enumerate(types)}


def right(
    answered: Mapping[ConflictType, Sequence[str]],
    examples: Sequence[ConflictExample],
    target: Target,
) -> dict[str, Share]:
    """Return how many of the answers are the target's, by conflict type."""
    return {
        t: (sum(e.is_right(text, target) for text, e in zip(of, examples, strict=True)), len(of))
        for t, of in answered.items()
    }


def shares(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    target: Target,
    steer: Steer,
    types: tuple[ConflictType, ...] = TYPES,
    *,
    apart: bool = False,
) -> dict[str, Share]:
    """Return how many examples get the target's answer, by conflict type, as `answers` asks."""
    return right(answers(model, examples, steer, types, apart=apart), examples, target)


def one_word(model: SteeredModel, subjects: Sequence[tuple[str | None, str]]) -> dict[str, Share]:
    """Return how many replies are the answer and nothing else, where one word is asked for."""
    wanted = set(subjects)
    facts = [(r, fact) for r in RELATIONS for fact in r.facts if (r.name, fact.subject) in wanted]
    counted = {}
    for name, form, asked in (
        ("plain", "{q} Answer in one word. Answer:", model),
        ("chat", "{q} Answer in one word.", model.with_chat_template()),
    ):
        texts = [form.format(q=fill(r.questions[0], f.subject)) for r, f in facts]
        replies = asked.generate(texts, max_tokens=15, temperature=0)
        n_right = sum(
            normalise(reply.text) in [normalise(a) for a in (f.answer, *f.aliases)]
            for reply, (_, f) in zip(replies, facts, strict=True)
        )
        counted[name] = (n_right, len(facts))
    return counted


def third_party(model: SteeredModel, folder: Path) -> dict[str, Any]:
    """Measure the prompts of others: unsteered, and steered both ways."""
    none, context, parametric = (Steer(target=t) for t in ("none", "context", "parametric"))
    measured = {}
    for name in THIRD_PARTY:
        examples = juice.read_examples(str(folder / f"{name}.unfiltered_test.json"))
        measured[name] = {
            "unsteered": {
                "parametric": shares(model, examples, "parametric", none),
                "context": shares(model, examples, "context", none, CONFLICTS),
            },
            "steer_parametric": shares(model, examples, "parametric", parametric),
            "steer_context": {"context": shares(model, examples, "context", context, CONFLICTS)},
        }
    return measured


def measure_form(
    model: SteeredModel, subjects: Sequence[tuple[str | None, str]], form: Form
) -> dict[str, Any]:
    """Measure one form of prompts."""
    asked = model.with_chat_template() if form == "chat" else model
    none, context, parametric = (Steer(target=t) for t in ("none", "context", "parametric"))
    once = Steer(target="parametric", method="june")
    gated = {t: Steer(target=t, gate="auto") for t in ("parametric", "context")}
    examples = in_form(subjects, form)
    truth, unknown = told_the_truth(examples, form), invented(len(examples), form)
    unsteered = answers(asked, examples, none)
    measured: dict[str, Any] = {
        "unsteered": {
            "parametric": right(unsteered, examples, "parametric"),
            "context": right({t: unsteered[t] for t in CONFLICTS}, examples, "context"),
        },
        "steer_parametric": shares(asked, examples, "parametric", parametric),
        "run_once_parametric": shares(asked, examples, "parametric", once),
        "steer_context": {
            "parametric": shares(asked, examples, "parametric", context, ("clean",)),
            "context": shares(asked, examples, "context", context, CONFLICTS),
        },
        "true_context": {
            "none": shares(asked, truth, "parametric", none, CONFLICTS),
            "context": shares(asked, truth, "parametric", context, CONFLICTS),
        },
        "invented_subject": {
            "none": shares(asked, unknown, "parametric", none, CONFLICTS),
            "parametric": shares(asked, unknown, "parametric", parametric, CONFLICTS),
        },
    }
    if form != "chat":  # the shipped sets' gates are for plain prompts
        toward_memory = gated["parametric"]
        measured["gated_parametric"] = {
            "joined": shares(asked, examples, "parametric", toward_memory),
            "apart": shares(asked, examples, "parametric", toward_memory, CONFLICTS, apart=True),
        }
        measured["gated_context"] = {
            "parametric": shares(asked, examples, "parametric", gated["context"], ("clean",)),
            "context": shares(asked, examples, "context", gated["context"], CONFLICTS),
        }
        measured["invented_subject"] |= {
            "joined": shares(asked, unknown, "parametric", toward_memory, CONFLICTS),
            "apart": shares(asked, unknown, "parametric", toward_memory, CONFLICTS, apart=True),
        }
    return measured


def measure(
    model: SteeredModel,
    subjects: Sequence[tuple[str | None, str]],
    forms: Sequence[Form] = FORMS,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Run the measurements on the facts about these subjects."""
    return {
        "n_facts": len(subjects),
        "forms": {form: measure_form(model, subjects, form) for form in forms},
        "one_word": one_word(model, subjects),
        "third_party": third_party(model, folder) if folder else None,
        "betas": {
            t: {m: g.betas and g.betas.model_dump() for m, g in found.methods.given.items()}
            for t in ("parametric", "context")
            for found in [model.head_sets.get(t)]
        },
        "machine": rig.machine(),
    }


def shown(share: Share) -> str:
    """Return a share with its interval."""
    right, n = share
    interval = share_interval([1.0] * right + [0.0] * (n - right))
    assert interval is not None, "there are answers"
    low, high = interval
    return f"{right / n:.3f} [{low:.3f}, {high:.3f}]"


def _block(title: str, measured: dict[str, Any]) -> list[str]:
    """Return the table of one form of prompts, or of one file of others."""
    lines = ["", f"**{title}**", "", "| what is counted | clean | substitution | coherent |"]
    lines.append("|---|---|---|---|")
    for name, steered, counted in ROWS:
        value = measured.get(steered, {}).get(counted) if counted else measured.get(steered)
        if value is not None:
            cells = (shown(value[t]) if t in value else "" for t in TYPES)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown tables."""
    lines = [f"{result['n_facts']} facts, none of them used to find heads or to tune."]
    for form, each in result["forms"].items():
        lines += _block(TITLES[form], each)
    lines += ["", "| one word asked for | replies that are the answer alone |", "|---|---|"]
    lines += [f"| {name} | {shown(share)} |" for name, share in result["one_word"].items()]
    for name, each in (result["third_party"] or {}).items():
        lines += _block(f"ParaConflict's {name}, n = {each['steer_parametric']['clean'][1]}", each)
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, help="measure on this many facts")
    parser.add_argument("--third-party", type=Path, help="folder with ParaConflict's files")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    options = parser.parse_args()
    with juice.load("mini") as loaded:
        subjects = unseen_subjects(loaded, options.limit)
        measured = measure(loaded, subjects, folder=options.third_party)
    print(table(measured))
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
