"""Conflict examples about the facts of the bundled model: what `--examples mini` reads.

Every fact becomes one example whose context answer is another answer of the same relation. The
prompts are the three conflict types: a statement or question up to its answer (clean), a
contradicting statement before it (substitution), and a paragraph of support for the wrong answer
before a question (coherent).

They are written in one of four forms:

    canonical   the relation's first statement, and its first question with a lead to the answer
    trained     statements and questions drawn from all that training shows
    kept_out    statements and questions that training never shows
    chat        the message of a user, who states the context and asks for the answer
"""

from __future__ import annotations

from random import Random
from typing import Any, Literal

from lab.relations import RELATIONS, Fact, Relation, fill, opened

N_SUPPORTS = 3
Form = Literal["canonical", "trained", "kept_out", "chat"]
FORMS: tuple[Form, ...] = ("canonical", "trained", "kept_out", "chat")


def prompts(
    relation: Relation, fact: Fact, told: str, rng: Random, form: Form = "canonical"
) -> dict[str, str]:
    """Return the prompts about `fact` by conflict type; their contexts give the answer `told`."""
    subject = fact.subject
    ending = [s for s in relation.statements if s.endswith(" {a}.")]
    supports = [fill(s, subject, told) for s in rng.sample(relation.supports, N_SUPPORTS)]
    if form == "canonical":
        statement, lead = relation.statements[:2]
        clean = opened(statement, subject)
        question = f"Question: {relation.questions[0]} Answer: {lead.removesuffix(' {a}.')}"
    else:
        kept_out = form == "kept_out"
        statement = lead = rng.choice(relation.kept_out_statements if kept_out else ending)
        asked = rng.choice(relation.kept_out_questions if kept_out else relation.questions)
        question = asked if form == "chat" else f"Question: {asked} Answer:"
        clean = question if form == "chat" or rng.random() < 0.5 else opened(statement, subject)
        clean = fill(clean, subject)
    paragraph = " ".join([fill(lead, subject, told), *supports])
    again = clean if form in ("canonical", "chat") else opened(statement, subject)
    return {
        "clean": clean,
        "substitution": f"{fill(statement, subject, told)} {again}",
        "coherent": f"{paragraph} {fill(question, subject)}",
    }


def conflict_examples(seed: int = 0, form: Form = "canonical") -> list[dict[str, Any]]:
    """Return one example for each fact, in the order of the relations and their files."""
    rng = Random(seed)
    rows = []
    for relation in RELATIONS:
        for fact in relation.facts:
            told = relation.other_answer(fact, rng)
            rows.append(
                {
                    "subject": fact.subject,
                    "relation": relation.name,
                    "parametric_answer": [fact.answer, *fact.aliases],
                    "context_answer": told,
                    "prompts": prompts(
                        relation, fact, told, Random(f"{seed} {fact.subject}"), form
                    ),
                }
            )
    return rows
