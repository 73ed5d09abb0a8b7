"""The examples that heads are found on, and those that betas are tuned on.

Heads are found on examples that are drawn, with a seed, from those that can be scored: p_y looks at
the first token of each answer (docs/method.md, "Notation"). The paper's probes take any; the other
methods take those that the model knows, spread over the relations. Betas are tuned on others that
the model knows and has room to answer.

ParaConflict's rows on the hub list all accepted answers in no order: there the one whose first
token the model finds most probable on the clean prompt is scored ("Datasets and scoring").
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, cycle, zip_longest
from random import Random

from juice.data.example import (
    ConflictExample,
    draw,
    fact_key,
    fact_keys,
    judged_types,
    to_json_line,
)
from juice.errors import ExampleError, UsageError
from juice.formula import METHODS, ConflictType, Target
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import short
from juice.identification.options import IdentificationOptions
from juice.identification.outcomes import answer, answer_tokens
from juice.model.prompts import PromptForm, sha256_of
from juice.steered_model import SteeredModel

N_LEAST, N_FEW = 4, 20  # fewer than these find heads badly, or tune betas badly
VALIDATION_SHARE = 0.15
N_TUNED_ON = 48


def unseen(
    examples: Iterable[ConflictExample], head_sets: Iterable[HeadSet]
) -> list[ConflictExample]:
    """Return the examples of facts that none of the head sets was found or tuned on.

    A set without facts does not say on which it was. Where an example's relation has a name that
    a set does not know, or none, a fact of the same subject is taken for its own, whichever of the
    set's relations it has.
    """
    left = list(examples)
    for head_set in head_sets:
        seen, known = set(head_set.facts), _relations_of(head_set)
        left = [e for e in left if seen.isdisjoint(_possible_keys(e, known))]
    return left


def _possible_keys(example: ConflictExample, known: Set[str]) -> Iterator[str]:
    """Yield the keys that a fact may have in a set that knows some relations."""
    relation, subject = example.relation, example.subject
    is_known = relation is not None and relation.casefold() in known
    for name in {relation, None} if is_known else {relation, None, *known}:
        yield fact_key(name, subject)


def _relations_of(head_set: HeadSet) -> set[str]:
    """Return the relations, in one case, of the facts that chose a set's betas, as far as known."""
    found = (head_set.validation(method) for method in METHODS)
    return {name.casefold() for one in found if one is not None for name in one.by_relation}


def in_form_of_examples(
    model: SteeredModel, examples: Iterable[ConflictExample], *, is_chosen: bool = False
) -> SteeredModel:
    """Return the same model, which takes prompts as it did when the examples were made.

    Examples without the hash of a template say nothing. A model that already takes prompts through
    one, or whose form was chosen, stays as it is, with a warning where the examples say otherwise.
    Raises UsageError where these were made through a template that is not the tokenizer's.
    """
    here, by_default = model.chat_template_sha256, sha256_of(model.own_chat_template)
    others = {e.chat_template_sha256 for e in examples} - {None, here}
    if not others:
        return model
    found = sorted(short(other) for other in others if other is not None)
    made = f"the examples were made through the chat template {' and '.join(found)}"
    if is_chosen or here is not None:
        ours = f"through {short(here)}" if here else "without one"
        warnings.warn(
            f"{made}, but prompts go {ours}: the model may answer them otherwise", stacklevel=2
        )
        return model
    if others != {by_default}:
        raise UsageError(
            f"{made}, and that of {model.id} is {short(by_default)}; "
            "give the file with --chat-template FILE, or --chat-template none for plain prompts"
        )
    return model.with_chat_template()


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt's tokens, and the first token of each target's answer.

    Where both answers begin alike, the tokens that they share, `n_shared`, are the prompt's.
    """

    ids: tuple[int, ...]
    answer_tokens: dict[Target, int]
    n_shared: int = 0


def scored_prompt(
    model: SteeredModel, example: ConflictExample, conflict_type: ConflictType
) -> ScoredPrompt:
    """Tokenise one prompt. Raises ExampleError with the reason when it cannot be scored."""
    answers = example.answer("parametric"), example.answer("context")
    prompt, limit = example.prompts[conflict_type], model.description.max_positions
    found = _scored(model.prompts, prompt, example.opening, answers)
    if isinstance(found, ScoredPrompt):
        n = len(found.ids) - found.n_shared
        if limit is None or n <= limit:
            return found
        found = f"the prompt has {n} tokens, the model's context {limit}"
    raise ExampleError(f"example {example.subject!r} ({conflict_type}): {found}")


@lru_cache(maxsize=16_384)  # the same examples are asked for several times, and take long
def _scored(
    form: PromptForm, prompt: str, opening: str, answers: tuple[str, str]
) -> ScoredPrompt | str:
    """Return a prompt with the tokens of its answers, from memory and context, or what it lacks."""
    ids = form.tokens(prompt, opening)
    if not ids:
        return "the prompt has no tokens"
    parametric, context = (form.first_token(prompt, given, opening) for given in answers)
    if parametric is None:
        return f"the parametric answer {answers[0]!r} has no tokens of its own"
    if context is None:
        return f"the context answer {answers[1]!r} has no tokens of its own"
    longer = ids
    if parametric == context:
        parted = form.parted(prompt, answers, opening)
        if parted is None:
            return "one answer begins with all tokens of the other; p_y cannot tell them apart"
        longer, (parametric, context) = parted
    tokens: dict[Target, int] = {"parametric": parametric, "context": context}
    return ScoredPrompt(longer, tokens, len(longer) - len(ids))


def with_scored_answers(
    model: SteeredModel, examples: Sequence[ConflictExample]
) -> list[ConflictExample]:
    """Put the scored answer first in the examples that leave the choice to the model."""
    asked = [e for e in examples if e.scored == "likeliest" and "clean" in e.prompts]
    requests, choices = [], []
    for example in asked:
        prompt, opening = example.prompts["clean"], example.opening
        tokens = {
            a: token
            for a in example.parametric_answer
            if (token := model.first_token(prompt, a, opening=opening)) is not None
        }
        choices.append(tokens)
        ids = model.tokenize(prompt, opening=opening)
        requests.append(model.request(ids, max_tokens=1, watch=tuple(tokens.values())))
    scored, completions = {}, model.engine.generate(requests)
    for example, tokens, completion in zip(asked, choices, completions, strict=True):
        if tokens:
            logprobs = dict(zip(tokens, completion.watched, strict=True))
            first = max(logprobs, key=logprobs.__getitem__)
            answers = (first, *(a for a in example.parametric_answer if a != first))
            scored[id(example)] = example.model_copy(
                update={"parametric_answer": answers, "scored": "first"}
            )
    return [scored.get(id(e), e) for e in examples]


def validation_share(
    examples: Sequence[ConflictExample], seed: int, n: int | None = None
) -> list[ConflictExample]:
    """Draw examples that tune betas, of those that did not find heads: at most n, or 15 %."""
    n = max(1, round(VALIDATION_SHARE * len(examples))) if n is None else min(n, len(examples))
    return draw(examples, n, seed)[0] if examples else []


def spread(candidates: Sequence[ConflictExample], seed: int) -> Iterator[ConflictExample]:
    """Yield the examples in a seeded order that takes the relations in turn."""
    rng, by_relation = Random(seed), dict[str | None, list[ConflictExample]]()
    for example in rng.sample(candidates, len(candidates)):
        by_relation.setdefault(example.relation, []).append(example)
    yield from filter(None, chain.from_iterable(zip_longest(*by_relation.values())))


def known_share(
    model: SteeredModel, examples: Sequence[ConflictExample], seed: int, n: int = N_TUNED_ON
) -> list[ConflictExample]:
    """Draw examples until n are there that the model knows and has room to answer."""
    order, known = list(spread(examples, seed)), list[ConflictExample]()
    while order and len(known) < n:
        asked, order = order[: 2 * n], order[2 * n :]
        known += known_examples(model, [e for e in asked if _fits(model, e, ("clean",))])
    return known[:n]


def known_examples(
    model: SteeredModel, examples: Sequence[ConflictExample]
) -> list[ConflictExample]:
    """Keep the examples whose clean prompt is answered right, unsteered, or that have none."""
    asked = [e for e in examples if "clean" in e.prompts]
    completions = answer(model, asked, ("clean",), "parametric")["clean"]
    pairs = zip(asked, completions, strict=True)
    wrong = {id(e) for e, c in pairs if not e.is_right(c.text, "parametric")}
    return [e for e in examples if id(e) not in wrong]


def usable_validation(
    model: SteeredModel, validation: Sequence[ConflictExample], target: Target
) -> list[ConflictExample]:
    """Return the validation examples that can be used.

    Warns of what is left out and of too few. Raises ExampleError when none is left.
    """
    if not validation:
        raise ExampleError(
            "no examples are left to tune the betas on; "
            "give more examples, or a file with --validation"
        )
    validation = with_prompts_that_most_have(validation)
    wanted = {t for e in validation for t in e.prompts}
    complete = [e for e in validation if wanted <= e.prompts.keys()]
    if n_partial := len(validation) - len(complete):
        warnings.warn(
            f"{n_partial} validation examples lack a prompt that others have and are left out",
            stacklevel=3,
        )
    examples = known_examples(model, [e for e in complete if _fits(model, e, e.prompts)])
    if not examples or not judged_types(target, examples):
        raise ExampleError(
            f"none of {len(validation)} validation examples can be used: "
            "the model answers none of their clean prompts, "
            f"or they share no conflict type for {target}; give others with --validation"
        )
    if len(examples) < N_FEW:
        warnings.warn(
            f"only {len(examples)} examples tune the betas, which may fit nothing else; "
            f"{N_FEW} or more are better",
            stacklevel=3,
        )
    return examples


def taking_turns(examples: Sequence[ConflictExample], target: Target) -> list[ConflictExample]:
    """Return the examples with one conflict prompt each, of the target's conflict types in turn.

    Two prompts about one fact say little more than one. Fewer than 20 examples are left as they
    are.
    """
    if len(examples) < N_FEW:
        return list(examples)
    types = [t for t in judged_types(target, examples) if t != "clean"]
    return [
        e.model_copy(update={"prompts": {t: e.prompts[t]}})
        for e, t in zip(examples, cycle(types), strict=False)
    ]


def with_prompts_that_most_have(examples: Sequence[ConflictExample]) -> list[ConflictExample]:
    """Leave out a kind of prompt that less than half of the examples have, and say so.

    Examples without a kind that others have cannot be used beside them. Clean prompts stay where
    there are enough: they alone tell what the model knows.
    """
    counts = Counter(kind for e in examples for kind in e.prompts)
    rare = {kind for kind, n in counts.items() if 2 * n < len(examples)}
    if counts["clean"] >= N_FEW:
        rare.discard("clean")
    if not rare or rare == counts.keys():
        return list(examples)
    kinds = " and ".join(f"{kind} ({counts[kind]})" for kind in sorted(rare))
    warnings.warn(
        f"few of {len(examples)} examples have a prompt that is {kinds}: it is left out",
        stacklevel=2,
    )
    kept = [{kind: p for kind, p in e.prompts.items() if kind not in rare} for e in examples]
    return [
        e.model_copy(update={"prompts": prompts})
        for e, prompts in zip(examples, kept, strict=True)
        if prompts
    ]


def comparable(
    model: SteeredModel, examples: Sequence[ConflictExample], target: Target
) -> list[ConflictExample]:
    """Return the examples on which ways of steering toward a target can be compared.

    Their judged prompts leave room for an answer and are of the same conflict types. Warns of what
    is left out. Raises ExampleError when none is left.
    """
    types = judged_types(target, examples, any)
    judged = [{t: e.prompts[t] for t in types if t in e.prompts} for e in examples]
    able = [
        e.model_copy(update={"prompts": prompts})
        for e, prompts in zip(examples, judged, strict=True)
        if prompts and _fits(model, e, prompts)
    ]
    if n_unfit := len(examples) - len(able):
        warnings.warn(
            f"{n_unfit} of {len(examples)} examples are left out: a prompt is too long for the "
            f"model, or none is judged toward {target}",
            stacklevel=2,
        )
    common = with_prompts_that_most_have(able)
    wanted = judged_types(target, common, any)
    alike = [e for e in common if e.prompts.keys() >= set(wanted)]
    if not alike:
        raise ExampleError(
            f"none of {len(examples)} examples can be compared on: they are too long for the "
            f"model, or share no conflict type for {target} ({', '.join(wanted) or 'none'} in "
            "all); give examples with the same conflict types"
        )
    if n_partial := len(able) - len(alike):
        warnings.warn(
            f"{n_partial} of {len(examples)} examples are left out: they lack a prompt that "
            "others have",
            stacklevel=2,
        )
    return alike


def usable_examples(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    options: IdentificationOptions,
    *,
    n_kept: int = N_TUNED_ON,
) -> tuple[list[ConflictExample], list[ConflictExample]]:
    """Draw the examples to identify on from those that can be scored.

    Returns them and all others, about other facts. With a `relation`, only its examples are drawn,
    and those whose answers begin alike only where the others are too few. Of few that the model
    knows, a share is drawn, unless nothing is to be kept to validate on (`n_kept`). Warns of
    examples that cannot be scored, with the first reason, and of few. Raises ExampleError when too
    few are left.
    """
    examples = list({to_json_line(e): e for e in examples}.values())
    candidates, apart, reasons = [], [], []
    pool = with_prompts_that_most_have(
        [e for e in examples if options.relation in (None, e.relation)]
    )
    wanted = {t for e in pool for t in e.prompts}
    for example in pool:
        try:
            if lacking := wanted - example.prompts.keys():
                raise ExampleError(
                    f"example {example.subject!r} has no {' and no '.join(sorted(lacking))} "
                    "prompt, but others have"
                )
            scored = [scored_prompt(model, example, t) for t in example.prompts]
            candidates.append(example)
            if not any(prompt.n_shared for prompt in scored):
                apart.append(example)
        except ExampleError as error:
            reasons.append(str(error))
    if reasons:
        warnings.warn(
            f"{len(reasons)} examples cannot be scored and are not drawn; first: {reasons[0]}",
            stacklevel=2,
        )
    if options.relation is not None and not pool:
        known = sorted({e.relation for e in examples if e.relation})
        raise ExampleError(
            f"no example has the relation {options.relation!r}; "
            f"the file has {', '.join(known) or 'none'}"
        )
    if len(apart) >= options.n_wanted(len(candidates)):
        candidates = apart
    if options.method == "probe":
        drawn, _ = draw(candidates, options.n_wanted(len(candidates)), options.seed)
    else:
        drawn = _draw_known(model, candidates, options, n_kept)
    keys, facts = fact_keys(examples), set(fact_keys(drawn))
    return drawn, [e for e, key in zip(examples, keys, strict=True) if key not in facts]


def _draw_known(
    model: SteeredModel,
    candidates: Sequence[ConflictExample],
    options: IdentificationOptions,
    n_kept: int,
) -> list[ConflictExample]:
    """Draw examples that the model answers right without a context, in file order."""
    n = options.n_wanted(len(candidates))
    draw(candidates, n, options.seed)  # complains of too few
    known = known_share(model, candidates, options.seed, n + n_kept)
    if not known:
        raise ExampleError(
            f"the model answers none of {len(candidates)} clean prompts right; "
            "give examples of facts that it knows"
        )
    if len(known) < min(n, N_LEAST):
        warnings.warn(
            f"the model knows only {len(known)} of {len(candidates)} examples: heads found on so "
            "few may be weak",
            stacklevel=3,
        )
    if n_kept:
        n = min(n, options.n_wanted(len(known)))
    chosen = set(map(id, known[:n]))
    return [e for e in candidates if id(e) in chosen]


def _fits(model: SteeredModel, example: ConflictExample, types: Iterable[ConflictType]) -> bool:
    """Return whether each prompt of these types leaves room for an answer."""
    given = (example.prompts[t] for t in types if t in example.prompts)
    asked = (model.tokenize(prompt, opening=example.opening) for prompt in given)
    n_tokens = answer_tokens(model, example)
    return all(model.fits(ids, max_tokens=n_tokens) for ids in asked)
