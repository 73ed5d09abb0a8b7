"""Conflict examples: one fact with two answers and the prompts that pit them against each other.

The file format is JSON lines (UTF-8), one fact per line:

    {"subject": str, "parametric_answer": str | [str...], "context_answer": str | [str...],
     "prompts": {"clean": str, "substitution": str, "coherent": str},
     "controls"?: {"true": str, "irrelevant": str},
     "context"?: str, "question"?: str, "relation"?: str, "popularity"?: number,
     "match"?: "contains" | "begins" | "sentence" | "exact", "n_words"?: number,
     "scored"?: "first" | "likeliest", "opening"?: str, "chat_template_sha256"?: str}

`prompts` may hold any subset of the conflict types. p_y scores the first accepted answer, or, with
`scored` "likeliest", the one that the model finds likeliest (juice.identification.examples).
`match` is the rule by which an output is the answer: "contains", when an accepted answer is within
its first `n_words` words, five unless given (ParaConflict); "begins", when its first n words are an
accepted answer of n words, final punctuation aside (MemoTrap); "sentence", when its first sentence
gives an accepted answer and none of the other target's (juice.data.passages); "exact", when its
first line is an accepted answer (TriState-Bench). With no parametric answer, [], every output that
does not give the context answer counts for the memory. `controls` are prompts that need no
steering, with a true context or with one about something else. `opening` begins
every reply, in a chat as the model's own words: the answer comes after it. `chat_template_sha256`
is the hash of the chat template through which the model was asked when the example was made. Files
are read by `juice.data.readers`.

Controls are examples that need no steering, made from given ones: what does it break there?
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from juice.data.judging import (
    MAX_TOKENS,
    N_WORDS,
    begins_with_answer,
    contains_answer,
    is_whole_answer,
)
from juice.data.passages import MAX_SENTENCE_TOKENS, first_sentence, swapped, verdict
from juice.errors import ExampleError, first_problem
from juice.formula import CONFLICT_TYPES, OTHER, ConflictType, Target


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


Text = Annotated[str, BeforeValidator(lambda v: _not_blank(v) if isinstance(v, str) else v)]
Answers = Annotated[tuple[Text, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
Control = Literal["true", "irrelevant"]
QUESTION = re.compile(r"question:", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.?!]\s")
ANSWER_BEGINS = re.compile(r"answer:\s*$", re.IGNORECASE)
QUESTION_TEMPLATE = "Question: {question} Answer:"
MAX_SUBJECT = 80  # characters of a question that stands for its subject


class ConflictExample(BaseModel):
    """One fact: its two answers and its prompts by conflict type."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: Text
    parametric_answer: Annotated[tuple[Text, ...], BeforeValidator(_as_tuple)]
    context_answer: Answers
    prompts: dict[ConflictType, Text] = Field(min_length=1)
    controls: dict[Control, Text] = Field(default_factory=dict)
    context: str | None = None
    question: str | None = None
    relation: str | None = None
    popularity: float | None = Field(default=None, allow_inf_nan=False)
    match: Literal["contains", "begins", "sentence", "exact"] = "contains"
    n_words: int = Field(default=N_WORDS, ge=1, le=100)
    scored: Literal["first", "likeliest"] = "first"
    opening: str = ""
    chat_template_sha256: str | None = None

    @model_validator(mode="after")
    def _answers_differ(self) -> Self:
        if self.parametric_answer[:1] == self.context_answer[:1]:
            raise ValueError(
                f"parametric_answer and context_answer are both {self.context_answer[0]!r}: "
                "there is no conflict"
            )
        if not self.parametric_answer and "clean" in self.prompts:
            raise ValueError(
                "parametric_answer is empty, so no answer to the clean prompt is right or wrong; "
                "leave that out"
            )
        return self

    def answer(self, target: Target) -> str:
        """Return the answer that p_y scores for a target; empty where memory's is not known."""
        return next(iter(self.accepted(target)), "")

    def accepted(self, target: Target) -> tuple[str, ...]:
        """Return every accepted answer of a target."""
        return self.parametric_answer if target == "parametric" else self.context_answer

    def is_right(self, output: str, target: Target) -> bool:
        """Return whether an output is an accepted answer of a target, by the example's rule."""
        if not self.accepted(target):
            return not self.is_right(output, OTHER[target])
        if self.match == "exact":
            return is_whole_answer(output, self.accepted(target))
        if self.match == "begins":
            return begins_with_answer(output, self.accepted(target))
        if self.match == "sentence":
            others, asked = self.accepted(OTHER[target]), self.question or ""
            sentence, accepted = first_sentence(output), self.accepted(target)
            return verdict(sentence, accepted, others=others, question=asked) == "given"
        return contains_answer(output, self.accepted(target), self.n_words)

    @property
    def max_tokens(self) -> int:
        """The number of tokens of an answer that are generated to judge it."""
        if self.match == "sentence":
            return MAX_SENTENCE_TOKENS
        longest = max(len(a.split()) for a in (*self.parametric_answer, *self.context_answer))
        longer = 2 * (self.n_words + longest) if longest > self.n_words else 0
        return max(MAX_TOKENS, self.n_words, longer)


def parse_example(row: Any, where: str) -> ConflictExample:
    """Make an example of a row; raises ExampleError, which names `where` and the wrong field."""
    try:
        return ConflictExample.model_validate(row)
    except ValidationError as error:
        field, problem = first_problem(error)
        raise ExampleError(f"{where}: {field or 'example'}: {problem}") from error


def judged_types(
    target: Target,
    examples: Sequence[ConflictExample],
    enough: Callable[[Iterable[bool]], bool] = all,
) -> tuple[ConflictType, ...]:
    """Return the conflict types on which a target is judged, of those that enough examples have.

    Toward the context, clean prompts have no right answer.
    """
    types = conflict_types(examples, enough)
    return types if target == "parametric" else tuple(t for t in types if t != "clean")


def conflict_types(
    examples: Sequence[ConflictExample], enough: Callable[[Iterable[bool]], bool] = all
) -> tuple[ConflictType, ...]:
    """Return the conflict types that enough of the examples have: `all` of them, or `any`."""
    return tuple(t for t in CONFLICT_TYPES if enough(t in e.prompts for e in examples))


def question_prompt(question: str, template: str = QUESTION_TEMPLATE) -> str:
    """Return a template with a question, which ends in exactly one question mark."""
    return template.replace("{question}", f"{question.strip().rstrip(' ?')}?")


def without_context(example: ConflictExample, conflict_type: ConflictType) -> str:
    """Return a conflict prompt without its context.

    That is its last `Question: ...`, or the example's question or clean prompt if the prompt ends
    with it and it begins before that. A question that begins a sentence later comes first: the
    other is asked in the context, unless it is what begins the answer to that one. Where the prompt
    has none of these, it is the example's question, else its clean prompt, else the prompt
    unchanged.
    """
    prompt = example.prompts[conflict_type]
    known = [text for text in (example.question, example.prompts.get("clean")) if text]
    questions = list(QUESTION.finditer(prompt))
    start = questions[-1].start() if questions else 0
    for text in known:
        if prompt.endswith(text):
            before = prompt[start : len(prompt) - len(text)]
            is_later = SENTENCE_END.search(before) and not ANSWER_BEGINS.search(before)
            if start == 0 or not before or (text == example.question and is_later):
                return text
    return prompt[start:] if start > 0 else next(iter(known), prompt)


def prompt_alone(example: ConflictExample, conflict_type: ConflictType) -> str | None:
    """Return a prompt without its context; None where it cannot be parted from it."""
    prompt, alone = example.prompts[conflict_type], without_context(example, conflict_type)
    return None if conflict_type != "clean" and alone == prompt else alone


def context_end(example: ConflictExample, conflict_type: ConflictType) -> int | None:
    """Return the number of characters of a conflict prompt's context; None where unknown."""
    prompt, rest = example.prompts[conflict_type], without_context(example, conflict_type)
    return len(prompt) - len(rest) if prompt.endswith(rest) and rest != prompt else None


def has_context_apart(example: ConflictExample) -> bool:
    """Return whether every conflict prompt of an example can be parted from its context."""
    return all(prompt_alone(example, t) is not None for t in example.prompts)


def draw(
    examples: Sequence[ConflictExample], n: int, seed: int
) -> tuple[list[ConflictExample], list[ConflictExample]]:
    """Draw n examples for identification, seeded; return them and the rest, both in file order.

    Raises ExampleError when there are fewer than n.
    """
    if n < 1:
        raise ExampleError(f"n_examples is {n}; expected at least 1 (the paper uses 4)")
    if n > len(examples):
        raise ExampleError(
            f"{n} examples were requested, {len(examples)} can be used; give more, or ask for fewer"
        )
    chosen = set(Random(seed).sample(range(len(examples)), n))
    drawn = [example for i, example in enumerate(examples) if i in chosen]
    return drawn, [example for i, example in enumerate(examples) if i not in chosen]


def examples_sha256(examples: Sequence[ConflictExample]) -> str:
    """Hash examples by content: SHA-256 over their canonical JSON lines."""
    return hashlib.sha256("".join(map(to_json_line, examples)).encode()).hexdigest()


def fact_keys(examples: Iterable[ConflictExample]) -> list[str]:
    """Return the keys of the examples' facts."""
    return [fact_key(e.relation, e.subject) for e in examples]


def fact_key(relation: str | None, subject: str) -> str:
    """Return the key of a fact: a hash of its relation and subject, in any case."""
    fact = f"{relation or ''}\n{subject}".casefold()
    return hashlib.sha256(fact.encode()).hexdigest()[:12]


def to_json_line(example: ConflictExample) -> str:
    """Format an example as a line of the file format, without the fields at their defaults."""
    return example.model_dump_json(exclude_defaults=True) + "\n"


ONSETS = "b br ch d f g gr h k l m n p qu r s st t tr v w z".split()  # noqa: SIM905
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "oo")
CODAS = ("", "n", "r", "l", "s", "m", "th", "nd")


def true_contexts(examples: Sequence[ConflictExample]) -> list[ConflictExample]:
    """Return true versions of the examples that have one, or whose prompts can be made true."""
    made = (
        _with_control(e, "true")
        if "true" in e.controls
        else _replaced(e, dict.fromkeys(e.context_answer, e.answer("parametric")))
        for e in examples
        if e.parametric_answer and ("true" in e.controls or is_about_something(e))
    )
    return [example for example in made if example is not None]


def unknown_subjects(examples: Sequence[ConflictExample], seed: int) -> list[ConflictExample]:
    """Return the examples whose conflict prompts name their subject, with an invented one.

    Of several words the longest is invented: New Zealand becomes New Quailoth.
    """
    rng, made = Random(seed), list[ConflictExample | None]()
    for example in filter(is_about_something, examples):
        longest = max(example.subject.split(), key=len, default="")
        name = example.subject.replace(longest, invented_name(rng), 1)
        made.append(_replaced(example, {example.subject: name}))
    return [example for example in made if example is not None]


def irrelevant_contexts(examples: Sequence[ConflictExample]) -> list[ConflictExample]:
    """Return the examples with an irrelevant context, or with that of another subject.

    That is one of another relation, where there is any, drawn with a seed of 0. Examples whose
    contexts cannot be parted are left out.
    """
    rng = Random(0)
    known = [e for e in examples if e.parametric_answer]
    made = [_with_control(e, "irrelevant") for e in known if "irrelevant" in e.controls]
    whole = [
        e
        for e in known
        if "irrelevant" not in e.controls
        and (conflicts := set(e.prompts) - {"clean"})
        and all(context_end(e, t) for t in conflicts)
    ]
    alike: dict[frozenset[str], deque[ConflictExample]] = defaultdict(deque)
    for example in whole:
        alike[frozenset(example.prompts)].append(example)
    for example in whole:
        told = alike[frozenset(example.prompts)]
        told.rotate(-1)  # so that it is the last
        apart = [o for o in told if o.relation != example.relation] or [
            o for o in told if o.subject != example.subject
        ]
        if apart:
            other = rng.choice(apart)
            prompts = {t: _in_context_of(other, example, t) for t in example.prompts}
            made.append(example.model_copy(update={"prompts": prompts, "context": None}))
    return made


def _with_control(example: ConflictExample, control: Control) -> ConflictExample:
    """Return an example with a control in place of its prompts with a conflict, if it has any."""
    conflict: ConflictType = next((t for t in example.prompts if t != "clean"), "substitution")
    prompts: dict[ConflictType, str] = {
        t: prompt for t, prompt in example.prompts.items() if t == "clean"
    }
    prompts[conflict] = example.controls[control]
    return example.model_copy(update={"prompts": prompts, "context": None, "controls": {}})


def _in_context_of(other: ConflictExample, example: ConflictExample, kind: ConflictType) -> str:
    context = other.prompts[kind][: context_end(other, kind)] if kind != "clean" else ""
    return context + (prompt_alone(example, kind) or "")


def invented_name(rng: Random) -> str:
    """Return a word of two or three syllables that is nobody's name."""
    syllables = (rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.choice((2, 2, 3))))
    return ("".join(syllables) + rng.choice(CODAS)).capitalize()


def is_about_something(example: ConflictExample) -> bool:
    """Return whether an example's subject is a name, not its question or prompt."""
    texts = [example.question or "", *example.prompts.values()]
    # Before it may stand "Question: ", or a lead such as "As is well known: ".
    parts = (part for text in texts for part in (text, text.partition(": ")[2]))
    is_asked = _begun(example.subject) in map(_begun, parts)
    return not is_asked and not example.subject.endswith(("?", "？"))


def _begun(text: str) -> str:
    """Return as much of a question or prompt as stands for a subject, without its mark."""
    return text.removesuffix("Answer:").strip(" ?？")[:MAX_SUBJECT].rstrip(" ?？")


def _replaced(example: ConflictExample, new: dict[str, str]) -> ConflictExample | None:
    """Replace whole words in every prompt; None where a conflict prompt has none of them."""
    prompts = {t: swapped(prompt, new) for t, prompt in example.prompts.items()}
    conflicts = [t for t in prompts if t != "clean"]
    if not conflicts or any(prompts[t] == example.prompts[t] for t in conflicts):
        return None
    apart = {
        name: swapped(text, new)
        for name in ("context", "question", "opening")
        if (text := getattr(example, name))
    }
    return example.model_copy(update={"prompts": prompts, **apart})
