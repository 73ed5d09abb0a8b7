"""Conflict examples about the facts of the bundled model: what `--examples mini` reads.

Every fact becomes one example whose context answer is another answer of the same relation. The
prompts are the three conflict types: the statement up to its answer (clean), a contradicting
statement before it (substitution), and a paragraph of support for the wrong answer before a
question (coherent).
"""

from __future__ import annotations

from random import Random
from typing import Any

from lab.relations import RELATIONS, Fact, Relation

N_SUPPORTS = 3


def prompts(relation: Relation, fact: Fact, told: str, rng: Random) -> dict[str, str]:
    """Return the prompts about `fact` by conflict type; their contexts give the answer `told`."""
    clean = relation.statement.format(s=fact.subject)
    opening = f"{relation.lead.format(s=fact.subject)} {told}."
    paragraph = " ".join([opening, *relation.support(fact.subject, told, N_SUPPORTS, rng)])
    return {
        "clean": clean,
        "substitution": f"{relation.state(fact.subject, told)} {clean}",
        "coherent": f"{paragraph} {relation.ask(fact.subject)}",
    }


def conflict_examples(seed: int = 0) -> list[dict[str, Any]]:
    """Return one example for each fact, in the order of the relations and their files."""
    rng = Random(seed)
    rows = []
    for relation in RELATIONS:
        facts = relation.facts()
        answers = sorted({fact.answer for fact in facts})
        for fact in facts:
            accepted = {fact.answer, *fact.aliases}
            context_answer = rng.choice([a for a in answers if a not in accepted])
            rows.append(
                {
                    "subject": fact.subject,
                    "relation": relation.name,
                    "parametric_answer": [fact.answer, *fact.aliases],
                    "context_answer": context_answer,
                    "prompts": prompts(relation, fact, context_answer, rng),
                }
            )
    return rows
