"""What head sets do to a real model, on facts, prose and chats that were not used to find them.

    python -m integration.real.measure MODEL --head-sets FOLDER --data PATH [--data PATH ...]
        [--prose text.txt] [--limit 100] [--out FILE.json] [--threads N] [--chat-template ...]
        [--allow-unverified] [--parts parametric,context,prose,chat] [--strengths 0.5,1,2]

prints a table and writes one JSON document. Of a large model the parts may be measured one by one:
those that are in FILE.json, of the same sets, stay there, and `parts` has the command, the machine
and the sets of each. Answers about facts are kept in FILE.answers, and what was read of prose in
FILE.prose, until it is done: the same command goes on where it was cut off.

MODEL is what `juice.load` takes, and PATH what `juice.read_examples` takes, such as a folder with
ParaConflict's files. The sets are those of FOLDER that are called `parametric` and `context`, as
`juice identify` makes them. Prompts take the form in which a set was found, plain or in a chat,
unless a template is given. The rows are described in `facts`, `prose` and `chat`; nothing has a
gate unless its way says so.

Facts are left out that a set was found on, or that it was to leave alone (`facts.others_than`). A
set that does not say on which it was found is warned of: give data without them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import juice
from benchmarks import rig
from integration.real import chat, facts, prose
from integration.real.answers import Answers, Row, ways_of
from juice.cli import console
from juice.cli.options import quiet_libraries
from juice.data.example import ConflictExample
from juice.errors import HeadSetNotFoundError, JuiceError
from juice.formula import TARGETS, Target
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import HARM_STRENGTHS
from juice.identification.task import Unfinished, UnfinishedFile
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel
from juice.version import versions

PARTS = (*TARGETS, "prose", "chat")
DATA_HELP = "examples: a file, a folder, or another name that juice.read_examples takes; repeatable"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Args:
        data: The sources of facts.
        text: Prose; None: no harm is measured.
        limit: The most known facts, and the most conflict prompts of a kind.
        chat_template: `default`, `none`, a file, or None for the form of each set.
        n_prose: How many of the text's tokens are read.
        parts: What of PARTS is measured.
        strengths: Those at which prose is read.
        chat_prompts: The chat prompts; None: all forty.
        kept_in: A file that keeps the answers about facts, beside one (.prose) for what was read,
            so that a run that is cut off goes on.
    """

    data: Sequence[str]
    text: str | None = None
    limit: int = 100
    chat_template: str | None = None
    n_prose: int = prose.N_TOKENS
    parts: Sequence[str] = PARTS
    strengths: Sequence[float] = HARM_STRENGTHS
    chat_prompts: Sequence[chat.ChatPrompt] | None = None
    kept_in: Path | None = None


def measure(model: SteeredModel, plan: Plan, progress: Progress = silent) -> dict[str, Any]:
    """Return the rows of all measurements, and what they are of."""
    head_sets = sets_of(model)
    chosen = _chosen(model, plan.chat_template)
    formed = {t: chosen or model.in_form_of(one) for t, one in head_sets.items()}
    read = facts.read_facts(plan.data)
    for head_set in head_sets.values():
        if not head_set.facts:
            warnings.warn(
                f"head set {head_set.name!r} does not say which facts it was found on; the data "
                "may have them",
                stacklevel=2,
            )
    fresh = facts.others_than(head_sets.values(), read)
    result: dict[str, Any] = {"facts": {"n": len(read), "n_excluded": len(read) - len(fresh)}}
    rows: list[Row] = []
    by_form = {
        one.chat_template_sha256: Answers(one, progress, plan.kept_in) for one in formed.values()
    }
    for target, head_set in head_sets.items():
        if target not in plan.parts:
            continue
        form = formed[target].chat_template_sha256
        in_form = fresh if form is None else [*map(facts.in_chat, fresh)]
        rows += _on_facts(by_form[form], head_set, in_form, plan.limit)
    if plan.text is not None and "prose" in plan.parts:
        chunks = prose.chunks_of(model, plan.text, plan.n_prose)
        kept = Unfinished()
        if plan.kept_in is not None:
            kept = UnfinishedFile(plan.kept_in.with_suffix(".prose"), _identity(model))
        for head_set in head_sets.values():
            rows += prose.harm(model, chunks, ways_of(head_set), plan.strengths, progress, kept)
    if "chat" in plan.parts and (chatting := _chatting(model, chosen)) is not None:
        prompts = chat.chat_prompts() if plan.chat_prompts is None else plan.chat_prompts
        ways = [way for head_set in head_sets.values() for way in ways_of(head_set)]
        rows += chat.in_chat(chatting, ways, prompts, progress)
    described = {
        target: _described(head_set, formed[target]) for target, head_set in head_sets.items()
    }
    return {"model": _identity(model), "head_sets": described, **result, "rows": rows}


def sets_of(model: SteeredModel) -> dict[Target, HeadSet]:
    """Return a model's sets that are called like a target; raises HeadSetNotFoundError."""
    library = model.head_sets
    found = {t: library.by_name[t] for t in TARGETS if t in library.by_name}
    if not found:
        unfit = "".join(f"; {key}: {why}" for key, why in library.unfit.items())
        raise HeadSetNotFoundError(
            f"{library.folder} has no head set parametric or context for {model.id}{unfit}; find "
            "them with `juice identify`"
        )
    return found


def _chosen(model: SteeredModel, template: str | None) -> SteeredModel | None:
    """Return the model in the form that a template says; None where none is given."""
    if template is None:
        return None
    if template in ("default", "none"):
        return model.with_chat_template(None if template == "none" else template)
    return model.with_chat_template(Path(template))


def _chatting(model: SteeredModel, chosen: SteeredModel | None) -> SteeredModel | None:
    """Return the model in a chat; None where it has no template."""
    if chosen is not None and chosen.chat_template_sha256 is not None:
        return chosen
    return None if model.own_chat_template is None else model.with_chat_template()


def _on_facts(
    answers: Answers, head_set: HeadSet, examples: Sequence[ConflictExample], limit: int
) -> list[Row]:
    known = facts.known_facts(answers, examples, limit)
    if head_set.target == "parametric":
        return list(facts.toward_memory(answers, head_set, known))
    return list(facts.toward_context(answers, head_set, examples, known, limit))


def _identity(model: SteeredModel) -> dict[str, Any]:
    description = model.description
    identity = description.identity
    return {
        "id": identity.id,
        "fingerprint": identity.fingerprint,
        "quantisation": identity.weights.quantisation if identity.weights else None,
        "dtype": description.dtype,
        "device": str(description.device),
    }


def _described(head_set: HeadSet, asked: SteeredModel) -> dict[str, Any]:
    found = head_set.identification
    return {
        "seal": head_set.seal,
        "method": head_set.method,
        "methods": [way.name for way in ways_of(head_set)],
        "found_by": None if found is None else found.method,
        "seed": None if found is None else found.seed,
        "says_its_facts": bool(head_set.facts),
        "chat_template_sha256": asked.chat_template_sha256,
    }


def joined(before: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with the rows of an earlier one that it lacks, where both are of one model.

    Rows of a set that has changed are left out. Each part keeps the header with which it was
    measured.
    """
    if any(before[part] != result[part] for part in ("model", "facts")):
        return result
    sets, old = result["head_sets"], before["head_sets"]
    new = {key(row) for row in result["rows"]}
    kept = [
        row
        for row in before["rows"]
        if key(row) not in new
        and all(
            sets[t]["seal"] == old.get(t, {}).get("seal")
            for t in sets
            if t == row["part"] or t in row["way"] or row["part"] == "chat"
        )
    ]
    left = set(map(_part, kept))
    parts = {part: header for part, header in before.get("parts", {}).items() if part in left}
    return {**result, "parts": {**parts, **result["parts"]}, "rows": [*kept, *result["rows"]]}


def headed(found: dict[str, Any], header: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """Return a result with the header of its run, which is also that of the parts measured."""
    of_part = {**header, "head_sets": found["head_sets"]}
    return {**header, "parts": dict.fromkeys(parts, of_part), **found}


def _part(row: Row) -> str:
    return "prose" if row["measure"] == prose.MEASURE else str(row["part"])


def key(row: Row) -> tuple[Any, ...]:
    """Return what tells a row from the others."""
    return tuple(row.get(name) for name in ("part", "measure", "way", "strength"))


def _parts(given: str) -> tuple[str, ...]:
    parts = tuple(given.split(","))
    if unknown := [part for part in parts if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no part; expected {', '.join(PARTS)}")
    return parts


def _numbers(given: str) -> tuple[float, ...]:
    return tuple(map(float, given.split(",")))


def table(rows: Sequence[Row]) -> str:
    """Return the rows as lines for people."""
    lines = []
    for row in rows:
        value = row.get("share", row.get("difference", row.get("divergence")))
        low, high = row["interval"] or (None, None)
        name = f"{row['part']:<11}{row['measure']:<17}{_way(row):<23}{row['n']:>5}"
        number = "-" if value is None else f"{value:.3f}"
        within = "" if low is None else f"  [{low:.3f}, {high:.3f}]"
        harm = f"  perplexity x {row['perplexity']:.3f}" if "perplexity" in row else ""
        lines.append(f"{name}{number:>8}{within}{harm}")
    return "\n".join(lines)


def _way(row: Row) -> str:
    return f"{row['way']} x {row['strength']:g}" if "strength" in row else str(row["way"])


def main(arguments: Sequence[str]) -> None:
    """Measure what the arguments say."""
    parser = argparse.ArgumentParser(prog="integration.real.measure", description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--head-sets", required=True, metavar="FOLDER")
    parser.add_argument("--data", required=True, action="append", metavar="PATH", help=DATA_HELP)
    parser.add_argument("--prose", type=Path, metavar="FILE", help="ordinary text")
    parser.add_argument("--prose-tokens", type=int, default=prose.N_TOKENS, metavar="N")
    parser.add_argument("--limit", type=int, default=100, metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--chat-template", metavar="default|none|FILE")
    parser.add_argument("--parts", type=_parts, default=PARTS, metavar=",".join(PARTS))
    parser.add_argument("--strengths", type=_numbers, default=HARM_STRENGTHS, metavar="S,S")
    parser.add_argument(
        "--allow-unverified",
        action="store_true",
        help="also measure sets that were made on another quantisation of the model",
    )
    given = parser.parse_args(arguments)
    plan = Plan(
        data=given.data,
        text=None if given.prose is None else given.prose.read_text(encoding="utf-8"),
        limit=given.limit,
        chat_template=given.chat_template,
        n_prose=given.prose_tokens,
        parts=given.parts,
        strengths=given.strengths,
        kept_in=None if given.out is None else given.out.with_suffix(".answers"),
    )
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
    quiet_libraries()
    with juice.load(
        given.model,
        head_sets=given.head_sets,
        threads=given.threads,
        dtype=given.dtype,
        allow_unverified=given.allow_unverified,
    ) as model:
        found = measure(model, plan, console.progress)
        command = shlex.join(["python", "-m", "integration.real.measure", *arguments])
        shown = command.replace(str(Path.home()), "~")
        header = {"command": shown, "versions": versions(), "machine": rig.machine()}
        result = headed(found, header, plan.parts)
    if given.out is not None:
        if given.out.exists():
            result = joined(json.loads(given.out.read_text()), result)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
        for kept in (".answers", ".prose"):
            given.out.with_suffix(kept).unlink(missing_ok=True)
    sys.stdout.write(f"{table(result['rows'])}\n")


def as_command(run: Callable[[Sequence[str]], None]) -> None:
    """Run with the words of the command line; what goes wrong is said in one line."""
    warnings.showwarning = console.show_warning
    try:
        run(sys.argv[1:])
    except JuiceError as error:
        console.error(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    as_command(main)
