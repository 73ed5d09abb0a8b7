"""The known formats of rows, each recognised by its columns.

JuICE's own is described in juice.data.example. Each of the others belongs to a data set; its
function below makes a row the fields of an example, or finds that the row holds no conflict.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeGuard

from juice.data.example import MAX_SUBJECT, ConflictExample, parse_example, question_prompt
from juice.data.judging import is_among, normalise
from juice.data.readers.rows import Row, list_or_text, texts_of
from juice.errors import ExampleError

PROMPTS = ("Clean Prompt", "Substitution Conflict", "Coherent Conflict")
DOMAINS = (
    "athlete_sport",
    "book_author",
    "company_founder",
    "company_headquarter",
    "official_language",
    "world_capital",
)
NQSWAP_WORDS = 20  # as the authors of JuICE judge it
TAG = re.compile(r"</?[A-Za-z][^<>]*>")

Fields = dict[str, Any]
"""The values of a row by column, or those of an example by field."""


class NoConflictError(Exception):
    """The reason why the two answers of a row are not in conflict."""


@dataclass(frozen=True)
class Format:
    """A format: the columns that every row has, and the function that makes a row an example.

    That takes the row's values and its file's name up to the first dot, and returns the example's
    fields. It raises NoConflictError, or ExampleError without the row's place. Where several rows
    make one example, `gather` makes one row of them, whatever the files that they are in.
    """

    name: str
    columns: tuple[str, ...]
    read: Callable[[Fields, str], Fields]
    gather: Callable[[Sequence[Row]], list[Row]] | None = None


def examples_of(files: Iterable[tuple[str, list[Row]]], source: str) -> list[ConflictExample]:
    """Make examples from the rows of named files, each in the format of its first row.

    Warns of rows that hold no conflict, which are left out. Raises ExampleError for a malformed
    row, and when no row is left.
    """
    examples, reasons = [], []
    for known, name, rows in _by_format(files):
        for where, values in rows:
            try:
                fields = known.read(values, name)
            except NoConflictError as reason:
                reasons.append(f"{where}: {reason}: there is no conflict")
            except ExampleError as error:
                raise ExampleError(f"{where}: {error}") from error
            else:
                examples.append(parse_example(fields, where))
    if not examples:
        raise ExampleError(f"{source} holds no example that can be used; first: {reasons[0]}")
    if reasons:
        warnings.warn(
            f"{source}: {len(reasons)} rows are left out; first: {reasons[0]}", stacklevel=3
        )
    return examples


def _by_format(
    files: Iterable[tuple[str, list[Row]]],
) -> Iterator[tuple[Format, str, list[Row]]]:
    """Yield the rows of each file with its format and name, those to be gathered together, last.

    Raises ExampleError for a file without rows, or a row that lacks a column.
    """
    together: dict[str, list[Row]] = {}
    for name, rows in files:
        if not rows:
            raise ExampleError(f"{name} are empty; expected one example per row")
        known = format_of(rows[0])
        for where, values in rows:
            if lacking := [column for column in known.columns if column not in values]:
                raise ExampleError(
                    f"{where}: {lacking[0]} is missing; expected the columns of {known.name}: "
                    f"{', '.join(known.columns)}; got {', '.join(map(str, values)) or 'none'}"
                )
        if known.gather is None:
            yield known, name, rows
        else:
            together.setdefault(known.name, []).extend(rows)
    for known in FORMATS:
        if known.gather is not None and (found := together.get(known.name)):
            yield known, known.name, known.gather(found)


def format_of(row: Row) -> Format:
    """Return the format whose columns a row has; raises ExampleError that lists the known ones."""
    found = row.values.keys()
    for known in FORMATS:
        if found >= set(known.columns):
            return known
    if found & set(OURS.columns[1:]):
        return OURS  # what is missing is named
    expected = "; ".join(f"{known.name} ({', '.join(known.columns)})" for known in FORMATS)
    raise ExampleError(
        f"{row.where}: the columns {', '.join(map(str, found)) or 'none'} are of no known format; "
        f"expected those of one of {expected}"
    )


def read_ours(row: Fields, _name: str) -> Fields:
    """Read a row of JuICE's format; an optional field that is empty, as in CSV, is missing."""
    return {name: value for name, value in row.items() if value != "" or name in OURS.columns}


def read_paraconflict(row: Fields, name: str) -> Fields:
    """Read a row of ParaConflict ("Taming Knowledge Conflicts in Language Models").

    Six domains of facts; `Distracted Token` is the context answer. Files may have more accepted
    answers in `Answer_ns`. On the hub (`gaotang/ParaConfilct`, sic) `Answer` lists all of them and
    `Category` is the domain: their order is kept, and the model decides which answer is scored.
    """
    prompts = [row[column] for column in PROMPTS]
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ExampleError(f"{', '.join(PROMPTS)} are not all text; expected a prompt in each")
    clean, substitution, coherent = (prompt.rstrip() for prompt in prompts)
    distracted = row["Distracted Token"]
    given = [*_listed(row["Answer"]), *_listed(row.get("Answer_ns"))]
    accepted = [answer for i, answer in enumerate(given) if answer not in given[:i]]
    texts = [answer for answer in accepted if isinstance(answer, str)]
    if isinstance(distracted, str) and is_among(distracted, texts):
        raise NoConflictError(
            f"the context answer {distracted!r} of {row['Subject']!r} is also an accepted answer"
        )
    is_apart = substitution.endswith(clean) and substitution != clean
    is_listed = isinstance(row["Answer"], list) and row.get("Answer_ns") is None
    return {
        "subject": row["Subject"],
        "parametric_answer": accepted,
        "context_answer": distracted,
        "prompts": {"clean": clean, "substitution": substitution, "coherent": coherent},
        "context": substitution.removesuffix(clean).strip() if is_apart else None,
        "question": clean if is_apart else None,
        "relation": domain_of(str(row.get("Category") or name)),
        "scored": "likeliest" if is_listed else "first",
    }


def domain_of(text: str) -> str:
    """Return a domain's name as in `DOMAINS`, however the data spells it."""
    name = text.strip().lower().replace(" ", "_").replace("-", "_")
    return name.removesuffix("s") if name.removesuffix("s") in DOMAINS else name


def read_nqswap(row: Fields, _name: str) -> Fields:
    """Read a row of NQ-Swap (Longpre et al., 2021), Natural Questions with swapped answers.

    The swapped answer is the context answer, looked for in the first 20 words. HTML tags in the
    passages (`<P>`, `<Td>`) are dropped. An answer is text or a list of texts.
    """
    question, passage = text_columns(row, "question", "sub_context")
    original, swapped = row["org_answer"], row["sub_answer"]
    _check_differ(question, _listed(original), _listed(swapped))
    return {
        **passage_fields(question, without_tags(passage), original, swapped),
        "relation": "nq_swap",
        "n_words": NQSWAP_WORDS,
    }


def without_tags(text: str) -> str:
    """Drop HTML-like tags and fold white space."""
    return " ".join(TAG.sub(" ", text).split())


def read_memotrap(row: Fields, name: str) -> Fields:
    """Read a row of MemoTrap (Liu and Liu, 2023): "end this proverb with that word".

    `classes` are the endings, as text, and `answer_index` is the one that the instruction wants:
    the context answer. The others are the parametric answers, all without final punctuation; an
    output is right when it begins with the ending. There is only a substitution prompt: without the
    instruction there is nothing to ask. The relation is the file's name (`1-proverb-ending`).
    """
    endings = [ending.strip().rstrip(".!?") for ending in _classes(row["classes"])]
    index = row["answer_index"]
    if not re.fullmatch(r"\d{1,4}", str(index)) or int(index) >= len(endings):
        raise ExampleError(
            f"answer_index is {index!r}; expected a number from 0 to {len(endings) - 1}"
        )
    others = list(endings)
    wanted = others.pop(int(index))
    if is_among(wanted, others):
        raise NoConflictError(f"the endings {endings} differ in case or punctuation alone")
    if not isinstance(row["prompt"], str) or not row["prompt"].strip():
        raise ExampleError(f"prompt is {row['prompt']!r}; expected text")
    prompt = row["prompt"].strip()
    context, question = _instruction_and_text(prompt)
    return {
        "subject": (question or prompt)[:MAX_SUBJECT],
        "parametric_answer": others,
        "context_answer": wanted,
        "prompts": {"substitution": prompt},
        "context": context,
        "question": question,
        "relation": re.sub(r"^\d+-", "", name).replace("-", "_").lower(),
        "match": "begins",
    }


def _classes(value: Any) -> list[str]:
    endings = list_or_text(value) if isinstance(value, str) else value
    if not _are_texts(endings) or len(endings) < 2:
        raise ExampleError(
            f"classes is {str(value)[:40]!r}; expected a list of two or more texts, the endings, "
            "such as [' one.', ' other.']"
        )
    return endings


def _instruction_and_text(prompt: str) -> tuple[str | None, str | None]:
    """Split a prompt into both: at the first line's end, else at the first colon."""
    if "\n" in prompt:
        context, _, question = prompt.partition("\n")
        return context.strip(), question.strip()
    context, colon, question = prompt.partition(": ")
    return (f"{context}:", question.strip()) if colon else (None, None)


def read_confiqa(row: Fields, name: str) -> Fields:
    """Read a row of ConFiQA (Bi et al., 2024), whose passages state another answer.

    Its three files ask for one fact (QA), for a chain of facts of which one is changed (MR), or
    several (MC). The changed answer is the context answer; aliases are accepted too. The subject is
    where the chain of facts begins (`orig_path_labeled`), the relation the file's name.
    """
    question, passage = text_columns(row, "question", "cf_context")
    original, changed = (_with_aliases(row, kind) for kind in ("orig", "cf"))
    _check_differ(question, original, changed)
    fields = passage_fields(question, passage, original, changed)
    match row.get("orig_path_labeled"):
        case [[str(subject), *_], *_] if subject:
            fields["subject"] = subject
    return {**fields, "relation": name.replace("-", "_").lower()}


def _with_aliases(row: Fields, kind: str) -> list[str]:
    answer, aliases = row[f"{kind}_answer"], row[f"{kind}_alias"] or []
    if not isinstance(answer, str) or not _are_texts(aliases):
        raise ExampleError(
            f"{kind}_answer or {kind}_alias is not text or a list of texts; expected the "
            "answer and its other names"
        )
    return list(dict.fromkeys([answer, *(alias for alias in aliases if alias.strip())]))


def read_faitheval(row: Fields, _name: str) -> Fields:
    """Read a row of FaithEval, counterfactual (Ming et al., 2024): multiple choice with a passage.

    `choices` is {"label": [...], "text": [...]}. The choice of the key is the context answer. The
    rows do not say which of the others was right before the passage changed, so all of them are
    accepted as parametric answers, and clean prompts say little. The question is asked openly,
    without its choices.
    """
    question, passage = text_columns(row, "question", "context")
    choices, key = row["choices"], row["answerKey"]
    is_object = isinstance(choices, dict)
    labels, texts = (choices.get(name) if is_object else None for name in ("label", "text"))
    if not (_are_texts(labels) and _are_texts(texts) and len(labels) == len(texts)):
        raise ExampleError(
            "choices is not an object of labels and texts; expected "
            '{"label": ["A", ...], "text": ["...", ...]}'
        )
    by_label = dict(zip(labels, texts, strict=True))
    if key not in by_label:
        raise ExampleError(f"answerKey is {key!r}; expected one of {', '.join(by_label)}")
    others = [text for label, text in by_label.items() if label != key]
    if not others or is_among(by_label[key], others):
        raise NoConflictError(f"{question!r} has no other choice than {by_label[key]!r}")
    return {
        **passage_fields(question, passage, others, by_label[key]),
        "relation": "faitheval",
        "scored": "likeliest",
    }


# What FaithEval takes for an abstention, and for a conflict that is named. Of the first its authors
# also take "not", which is within "another".
ABSTENTIONS = ("unknown", "no answer", "no information", "unclear", "unanswerable")
CONFLICT_WORDS = (
    *("conflict", "multiple answers", "disagreement", "inconsistent", "contradictory"),
    *("contradiction", "inconsistency", "two answers", "2 answers"),
)
SAY_UNKNOWN = "If the passage does not tell, the answer is: unknown."
SAY_CONFLICT = "If the passage gives answers that contradict each other, the answer is: conflict."
FAITHEVAL_WORDS = 50
MRQA_COLUMNS = ("detected_answers", "context_tokens", "question_tokens")  # which FaithEval lacks


def read_faitheval_open(row: Fields, _name: str) -> Fields:
    """Read a row of FaithEval, unanswerable or inconsistent (Ming et al., 2024).

    The passage gives no answer, or two, and the prompt says what to answer then: that is the
    context answer, looked for in the first 50 words. `answers` of an unanswerable row are words
    for that, so what memory says is not known; those of an inconsistent row are the two answers.
    Rows of MRQA have the same columns and more, and are refused: theirs are names of one answer.
    """
    if more := [column for column in MRQA_COLUMNS if column in row]:
        raise ExampleError(
            f"the column {more[0]} is one of MRQA, whose answers are right ones and no conflict; "
            "`juice examples` makes conflicts of questions, contexts and right answers"
        )
    question, passage = text_columns(row, "question", "context")
    answers = texts_of(row["answers"])
    if not answers:
        raise ExampleError("answers is not a list of texts; expected words to abstain, or answers")
    is_open = all(any(w in normalise(a) for w in ABSTENTIONS) for a in answers)
    if not is_open and len({*map(normalise, answers)}) < 2:
        raise ExampleError(
            "answers holds one answer; expected the two of FaithEval's inconsistent rows. Of "
            "questions, contexts and right answers `juice examples` makes conflicts"
        )
    say, told = (SAY_UNKNOWN, ABSTENTIONS) if is_open else (SAY_CONFLICT, CONFLICT_WORDS)
    fields = passage_fields(question, f"{passage} {say}", () if is_open else answers, told)
    if is_open:
        del fields["prompts"]["clean"]
    relation = "faitheval_unanswerable" if is_open else "faitheval_inconsistent"
    return {**fields, "relation": relation, "n_words": FAITHEVAL_WORDS}


def read_mquake(row: Fields, _name: str) -> Fields:
    """Read a row of MQuAKE-CF (Zhong et al., 2023): a question over facts of which some are new.

    The context states the new facts, in the words of `requested_rewrite`; the answer that follows
    from them, with its aliases, is the context answer, the old one is memory's. Of the three
    wordings of the question the first is asked.
    """
    edits, questions = row["requested_rewrite"], row["questions"]
    try:
        told = [
            f"{edit['prompt'].replace('{}', edit['subject'])} {edit['target_new']['str']}."
            for edit in edits
        ]
        subject = edits[0]["subject"]
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ExampleError(
            "requested_rewrite is not a list of new facts; expected "
            '[{"prompt": "{} is ...", "subject": ..., "target_new": {"str": ...}}, ...]'
        ) from error
    if not _are_texts(questions) or not questions:
        raise ExampleError("questions is not a list of texts; expected the wordings of a question")
    old, new = (
        [*_listed(row[name]), *_listed(row.get(f"{name}_alias"))]
        for name in ("answer", "new_answer")
    )
    _check_differ(questions[0], old, new)
    fields = passage_fields(questions[0], " ".join(told), old, new)
    return {**fields, "subject": subject, "relation": "mquake"}


def gathered_cub(rows: Sequence[Row]) -> list[Row]:
    """Make one row of those of CUB about one fact: the edited one, with the others within."""
    facts: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        fact = tuple(str(row.values.get(name)) for name in ("subject", "template", "claim"))
        facts.setdefault(fact, {}).setdefault(str(row.values["context_type"]), row)
    made = []
    for kinds in facts.values():
        first = kinds.get("edited") or next(iter(kinds.values()))
        others = {kind: row.values for kind, row in kinds.items() if row is not first}
        made.append(Row(first.where, {**first.values, **others}))
    return made


def read_cub(row: Fields, _name: str) -> Fields:
    """Read the rows of CUB (Hagström et al., 2025) about one fact, of CounterFact or of DRUID.

    `context_type` is gold, edited or irrelevant. The edited context contradicts `target_true`, and
    what it claims, `target_new`, is the context answer; the others become controls. Of DRUID a
    claim is judged by its evidence. The set on Natural Questions has other columns.
    """
    if row["context_type"] != "edited":
        raise NoConflictError(f"there is only the {row['context_type']} context")
    told, asked = _cub_prompts(row)
    controls = {"true": row.get("gold"), "irrelevant": row.get("irrelevant")}
    return {
        "subject": str(row.get("subject") or row["claim"])[:MAX_SUBJECT],
        "parametric_answer": row["target_true"],
        "context_answer": row.get("target_new"),
        "prompts": {"clean": asked, "substitution": told},
        "controls": {name: _cub_prompts(other)[0] for name, other in controls.items() if other},
        "question": asked,
        "relation": "cub_druid" if "claim" in row else "cub_counterfact",
    }


def _cub_prompts(row: Fields) -> tuple[str, str]:
    """Return the prompt of a row with its context and without."""
    if "claim" in row:
        by = f" by {row['claimant']}" if row.get("claimant") else ""
        asked = f"Question: Is this claim{by} True, False or None: {row['claim']} Answer:"
        return f"Evidence: {row['evidence']} {asked}", asked
    claimed = row["target_true"] if row["context_type"] == "gold" else row.get("target_new", "")
    places = ("<subject-w-space>", f"{row['subject']} "), ("<subject>", row["subject"])
    texts = []
    for column in ("template_w_context", "template"):
        text = str(row[column])
        for place, words in (*places, ("<target>", claimed)):
            text = text.replace(place, str(words))
        texts.append(text.strip())
    told, asked = texts
    # Some templates end with the statement to go on from.
    return told if told.endswith(asked) else f"{told}\n{asked}", asked


def gathered_tristate(rows: Sequence[Row]) -> list[Row]:
    """Make one row of the two of TriState-Bench that ask with and without a passage.

    The agreeing passage about a fact goes with the one that contradicts it.
    """
    pairs: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        case = tuple(str(row.values.get(name)) for name in ("benchmark", "fact_id", "input_index"))
        pairs.setdefault(case, {})[str(row.values["assigned_process"])] = row
    cases: dict[str, list[Row]] = {}
    for (benchmark, *_), both in pairs.items():
        where, values = both.get("0") or next(iter(both.values()))
        if both.keys() >= {"0", "1"}:
            values = {**values, "alone": both["1"].values["context_string"]}
        cases.setdefault(benchmark, []).append(Row(where, values))
    agreeing = {str(row.values.get("alone")): row for row in cases.pop(AGREEMENT, [])}
    for row in cases.get(RESISTANCE, []):
        if (other := agreeing.pop(str(row.values.get("alone")), None)) is not None:
            row.values["agreeing"] = other.values["context_string"]
    return [*chain.from_iterable(cases.values()), *agreeing.values()]


CORRECTION, RESISTANCE, AGREEMENT = "C_right_P_wrong", "C_wrong_P_right", "C_right_P_right"
TRISTATE_TOKENS = 32


def read_tristate(row: Fields, _name: str) -> Fields:
    """Read a case of TriState-Bench (Jiang et al., 2026), which knows what one model knows.

    Correction: the passage is right and the model's memory wrong, in words that the rows do not
    have; the gold answer is the context's. Resistance: the passage is wrong, and the gold answer is
    memory's. Agreement, both right, is the control of resistance. An answer is right when its first
    line is one of those accepted.
    """
    benchmark, told, asked = row["benchmark"], row["context_string"], row.get("alone")
    if not isinstance(told, str) or not isinstance(asked, str):
        raise ExampleError(
            "the case has no text in context_string with its passage (assigned_process 0) and "
            "without (1); expected a row of each"
        )
    question = asked[asked.find("Question:") :]
    if benchmark == AGREEMENT:
        raise NoConflictError(f"the passage and the memory agree on {question!r}")
    is_correction = benchmark == CORRECTION
    if not is_correction and "wrong_answer" not in row:
        raise ExampleError("wrong_answer is missing; expected what the passage claims")
    gold = row["gold_answers"]
    return {
        "subject": question.removeprefix("Question:").partition("?")[0].strip() + "?",
        "parametric_answer": () if is_correction else gold,
        "context_answer": gold if is_correction else row["wrong_answer"],
        "prompts": {"substitution": told} | ({} if is_correction else {"clean": asked}),
        "controls": {"true": row["agreeing"]} if "agreeing" in row else {},
        "relation": "correction" if is_correction else "resistance",
        "match": "exact",
        "n_words": TRISTATE_TOKENS,
    }


def text_columns(row: Fields, question: str, passage: str) -> tuple[str, str]:
    """Return the question and the passage of a row; raises ExampleError without a question."""
    asked, told = row[question], row[passage]
    if not isinstance(asked, str) or not isinstance(told, str) or not asked.strip():
        raise ExampleError(
            f"{question} or {passage} is not text; expected a question and a passage"
        )
    return asked.strip(), told.strip()


def passage_fields(question: str, passage: str, parametric: Any, context: Any) -> Fields:
    """Return the fields of an example whose question follows its passage, from its two answers."""
    asked = question_prompt(question)
    return {
        "subject": question,
        "parametric_answer": parametric,
        "context_answer": context,
        "prompts": {"clean": asked, "substitution": f"{passage} {asked}"},
        "context": passage,
        "question": asked,
    }


def _check_differ(question: str, original: Sequence[Any], changed: Sequence[Any]) -> None:
    """Raise NoConflictError where a changed answer is an original one; leave others to parsing."""
    if _are_texts([*original, *changed]) and any(is_among(one, original) for one in changed):
        raise NoConflictError(f"{question!r} has the same answer in both contexts, {changed[0]!r}")


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


OURS = Format("JuICE", ("subject", "parametric_answer", "context_answer", "prompts"), read_ours)
FORMATS = (
    OURS,
    Format("ParaConflict", ("Subject", "Answer", "Distracted Token", *PROMPTS), read_paraconflict),
    Format(
        "NQ-Swap",
        ("question", "org_context", "org_answer", "sub_context", "sub_answer"),
        read_nqswap,
    ),
    Format("MemoTrap", ("prompt", "classes", "answer_index"), read_memotrap),
    Format(
        "ConFiQA",
        ("question", "cf_context", "orig_answer", "orig_alias", "cf_answer", "cf_alias"),
        read_confiqa,
    ),
    Format("FaithEval", ("question", "context", "choices", "answerKey"), read_faitheval),
    Format(
        "FaithEval, unanswerable or inconsistent",
        ("qid", "question", "context", "answers"),
        read_faitheval_open,
    ),
    Format("MQuAKE", ("requested_rewrite", "questions", "answer", "new_answer"), read_mquake),
    Format(
        "CUB, CounterFact",
        ("subject", "template", "template_w_context", "target_true", "context_type"),
        read_cub,
        gathered_cub,
    ),
    Format(
        "CUB, DRUID", ("claim", "evidence", "target_true", "context_type"), read_cub, gathered_cub
    ),
    Format(
        "TriState-Bench",
        ("benchmark", "fact_id", "gold_answers", "assigned_process", "context_string"),
        read_tristate,
        gathered_tristate,
    ),
)
