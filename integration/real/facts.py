"""What head sets do to facts that were not used to find them.

Toward memory, on facts that the model knows, which are those whose clean prompt it answers right
unsteered:

    clean, substitution, coherent   the share whose prompt of that type gets memory's answer
    kept clean, true, irrelevant    of the right answers that need no steering, the share that stays
    kept unknown                    the same about subjects that do not exist, by the context

`true` contexts say what the model remembers and `irrelevant` ones are about another subject
(juice.data.example); of each fact one such prompt is asked, of the conflict types in turn. Where a
set has both methods, one run is compared with two in pairs: the gain of each fact, by type and over
its conflicts.

Toward the context:

    won          of the conflict prompts that get memory's answer unsteered, the share that gets the
                 context's
    kept follow  of those that get the context's answer unsteered, the share that still does
    kept clean   of the known facts' clean prompts, the share that stays right
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import fmean

import juice
from integration.real.answers import (
    UNSTEERED,
    Answers,
    Row,
    Way,
    difference_row,
    parts_of,
    share_row,
    ways_of,
)
from juice.data.example import ConflictExample
from juice.data.memory import open_prompts
from juice.data.readers.sources import SPLIT_PARTS
from juice.formula import CONFLICT_TYPES, CONFLICTS, ConflictType
from juice.head_set.head_set import HeadSet
from juice.identification.examples import unseen
from juice.identification.first_tokens import Case, endangered_prompts

SEED = 0
GATED = "unknown"
Key = tuple[str, str]


def read_facts(sources: Sequence[str]) -> list[ConflictExample]:
    """Return one example a fact from all files of the sources, all splits of folders included."""
    facts: dict[Key, ConflictExample] = {}
    for source in sources:
        files = [
            str(file)
            for file in sorted(Path(source).glob("*"))
            if any(part in file.name for part in SPLIT_PARTS.values())
        ]
        for file in files or [source]:
            for example in juice.read_examples(file):
                facts.setdefault(key_of(example), example)
    return list(facts.values())


def key_of(example: ConflictExample) -> Key:
    """Return what a fact is known by: its relation and subject, whatever their case."""
    return (example.relation or "").casefold(), example.subject.casefold()


def others_than(
    head_sets: Iterable[HeadSet], examples: Iterable[ConflictExample]
) -> list[ConflictExample]:
    """Return the examples of facts that no set was found on, nor protected when it was found.

    The latter are subjects that the model was only asked about.
    """
    sets = list(head_sets)
    protected = {
        (one.relation, one.subject.casefold())
        for head_set in sets
        if head_set.identification is not None
        for held_out in (False, True)
        for one in open_prompts(is_chat=False, seed=head_set.identification.seed, held_out=held_out)
    }
    return [e for e in unseen(examples, sets) if key_of(e) not in protected]


def in_chat(example: ConflictExample) -> ConflictExample:
    """Return an example for a chat, where a clean prompt that ends within a sentence opens it.

    The answer then comes first, as where a plain prompt is continued.
    """
    lead = example.prompts.get("clean", "?")
    is_open = lead[-1].isalnum() and not example.opening
    return example.model_copy(update={"opening": lead}) if is_open else example


def known_facts(
    answers: Answers, examples: Sequence[ConflictExample], limit: int
) -> list[ConflictExample]:
    """Return facts whose clean prompt is answered right unsteered, in a seeded order."""
    with_clean = [e for e in examples if "clean" in e.prompts]
    order = Random(SEED).sample(with_clean, len(with_clean))
    cases = answers.fitting([Case(e.prompts["clean"], e, "parametric") for e in order])
    known: list[ConflictExample] = []
    for part in parts_of(cases, 2 * limit):
        right = answers.right(part, UNSTEERED)
        known += [case.example for case, is_right in zip(part, right, strict=True) if is_right]
        if len(known) >= limit:
            break
    return known[:limit]


def toward_memory(
    answers: Answers, head_set: HeadSet, known: Sequence[ConflictExample]
) -> Iterator[Row]:
    """Yield the rows of a set toward memory on known facts."""
    ways = ways_of(head_set)
    asked: dict[ConflictType, list[Case]] = {
        t: answers.fitting([Case(e.prompts[t], e, "parametric") for e in known if t in e.prompts])
        for t in CONFLICT_TYPES
    }
    for conflict_type, cases in asked.items():
        for way in (UNSTEERED, *ways):
            yield share_row("parametric", conflict_type, way.name, answers.right(cases, way))
    once, twice = (next((w for w in ways if w.name == m), None) for m in ("june", "juice"))
    if once is not None and twice is not None:
        yield from _compared(answers, asked, once, twice)
    for kind, cases in endangered_prompts("parametric", known).items():
        yield from _kept(answers, "parametric", kind, cases, ways, is_gated=kind == GATED)


def _compared(
    answers: Answers, asked: dict[ConflictType, list[Case]], once: Way, twice: Way
) -> Iterator[Row]:
    """Yield the paired differences of one run against two, by type and over a fact's conflicts."""
    of_fact: dict[int, list[float]] = {}
    name = f"{once.name} - {twice.name}"
    for conflict_type, cases in asked.items():
        pairs = zip(answers.right(cases, once), answers.right(cases, twice), strict=True)
        gains = [float(one) - float(other) for one, other in pairs]
        yield difference_row("parametric", conflict_type, name, gains)
        if conflict_type in CONFLICTS:
            for case, gain in zip(cases, gains, strict=True):
                of_fact.setdefault(id(case.example), []).append(gain)
    yield difference_row("parametric", "conflicts", name, [fmean(g) for g in of_fact.values()])


def _kept(
    answers: Answers,
    part: str,
    kind: str,
    cases: Sequence[Case],
    ways: Sequence[Way],
    *,
    is_gated: bool = False,
) -> Iterator[Row]:
    """Yield the shares of the cases answered right unsteered that stay so."""
    fitting = answers.fitting(cases)
    unsteered = answers.right(fitting, UNSTEERED)
    before = [case for case, is_right in zip(fitting, unsteered, strict=True) if is_right]
    yield share_row(part, f"right {kind}", UNSTEERED.name, unsteered)
    for way in ways:
        yield share_row(part, f"kept {kind}", way.name, answers.right(before, way))
        if is_gated:
            gated = way.gated
            hits = answers.right(before, gated) if answers.has_gate(way, before) else None
            yield share_row(part, f"kept {kind}", gated.name, hits)


def toward_context(
    answers: Answers,
    head_set: HeadSet,
    examples: Sequence[ConflictExample],
    known: Sequence[ConflictExample],
    limit: int,
) -> Iterator[Row]:
    """Yield the rows of a set toward the context, on prompts of all examples and known facts."""
    ways = ways_of(head_set)
    stuck, following = by_answer(answers, examples, limit)
    for measure, cases in (("won", stuck), ("kept follow", following)):
        for way in ways:
            yield share_row("context", measure, way.name, answers.right(cases, way))
    clean = [Case(e.prompts["clean"], e, "parametric") for e in known]
    yield from _kept(answers, "context", "clean", clean, ways)


def by_answer(
    answers: Answers, examples: Sequence[ConflictExample], limit: int
) -> tuple[list[Case], list[Case]]:
    """Return conflict prompts that get memory's answer unsteered, and those that get the context's.

    They are asked in a seeded order until there are enough of the first. An answer that gives both
    or none is neither.
    """
    conflicts = [
        Case(e.prompts[t], e, "context") for e in examples for t in CONFLICTS if t in e.prompts
    ]
    cases = answers.fitting(Random(SEED).sample(conflicts, len(conflicts)))
    stuck: list[Case] = []
    following: list[Case] = []
    for part in parts_of(cases, 2 * limit):
        for case, text in zip(part, answers.texts(part, UNSTEERED), strict=True):
            by_context, by_memory = (
                case.example.is_right(text, t) for t in ("context", "parametric")
            )
            if by_context != by_memory:
                (following if by_context else stuck).append(case)
        if len(stuck) >= limit:
            break
    return stuck[:limit], following[:limit]
