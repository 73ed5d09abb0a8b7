"""Conflict examples for tiny models, and the alphas that probe their heads."""

from __future__ import annotations

from juice.data.example import ConflictExample
from juice.formula import CONFLICTS

TOLERANCE = 1e-5  # fp32 probabilities
ALPHAS_PLUS, ALPHAS_MINUS = (1.0, 3.0, 30.0), (-1.0, -2.0)
TYPES = ("clean", "substitution", "coherent")


def conflicts() -> list[ConflictExample]:
    """Return the examples without clean prompts, so that no model is asked if it knows them."""
    return [
        e.model_copy(update={"prompts": {t: e.prompts[t] for t in CONFLICTS}}) for e in examples()
    ]


def examples() -> list[ConflictExample]:
    facts = [
        ("France", "Paris", "Rome"),
        ("Peru", "Lima", "Oslo"),
        ("Chad", "N'Djamena", "Bern"),
        ("Fiji", "Suva", "Kyiv"),
    ]
    return [
        ConflictExample(
            subject=s,
            parametric_answer=a,
            context_answer=c,
            prompts={
                "clean": f"Capital of {s}:",
                "substitution": f"{s}: {c}. Capital of {s}:",
                "coherent": f"{c} rules {s}. All of {s} loves {c}. Capital of {s}:",
            },
        )
        for s, a, c in facts
    ]
