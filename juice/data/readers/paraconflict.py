"""ParaConflict (of "Taming Knowledge Conflicts in Language Models"): six domains of facts.

    Subject, Answer, Distracted Token (the context answer), Clean Prompt, Substitution Conflict,
    Coherent Conflict, Answer_ns? (accepted answers; files only), Category? (the domain; hub only)

On the hub (`gaotang/ParaConfilct`, sic) `Answer` lists all accepted answers and there is no
`Answer_ns`. Their order is kept, and the examples are marked `scored: likeliest`: the model decides
which answer is scored.
"""

from __future__ import annotations

from typing import Any

from juice.data.example import ConflictExample, parse_example
from juice.data.judging import is_among
from juice.errors import ExampleError

HUB_ID = "gaotang/ParaConfilct"
PROMPTS = ("Clean Prompt", "Substitution Conflict", "Coherent Conflict")
COLUMNS = ("Subject", "Answer", "Distracted Token", *PROMPTS)
DOMAINS = (
    "athlete_sport",
    "book_author",
    "company_founder",
    "company_headquarter",
    "official_language",
    "world_capital",
)


def read_row(row: dict[str, Any], where: str, name: str) -> ConflictExample | str:
    """Make an example from a row, or return why it holds no conflict.

    `name` is the file's, up to its first dot.
    """
    prompts = [row[column] for column in PROMPTS]
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ExampleError(
            f"{where}: {', '.join(PROMPTS)} are not all text; expected a prompt in each"
        )
    clean, substitution, coherent = (str(prompt).rstrip() for prompt in prompts)
    given = [*_listed(row["Answer"]), *_listed(row.get("Answer_ns"))]
    accepted, distracted = (
        [a for i, a in enumerate(given) if a not in given[:i]],
        row["Distracted Token"],
    )
    if isinstance(distracted, str) and is_among(
        distracted, (a for a in accepted if isinstance(a, str))
    ):
        return (
            f"the context answer {distracted!r} of {row['Subject']!r} is also an accepted answer: "
            "there is no conflict"
        )
    apart = substitution.endswith(clean) and substitution != clean
    example = {
        "subject": row["Subject"],
        "parametric_answer": accepted,
        "context_answer": distracted,
        "prompts": {"clean": clean, "substitution": substitution, "coherent": coherent},
        "context": substitution.removesuffix(clean).strip() if apart else None,
        "question": clean if apart else None,
        "relation": domain_of(str(row.get("Category") or name)),
        "scored": (
            "likeliest"
            if isinstance(row["Answer"], list) and row.get("Answer_ns") is None
            else "first"
        ),
    }
    return parse_example(example, where)


def domain_of(text: str) -> str:
    """Return a domain's name as in `DOMAINS`, however the data spells it."""
    name = text.strip().lower().replace(" ", "_").replace("-", "_")
    return name.removesuffix("s") if name.removesuffix("s") in DOMAINS else name


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
