"""Chats of ten turns, each with a document: what steering does at the end beside the beginning.

    python -m integration.real.turns MODEL --head-sets FOLDER [--chats 20] [--out FILE.json]
        [--threads N]

All of a chat is steered again at each turn, so that steered keys and values pile up. The turns are
prompts of `chat`, each document before its question, and the replies are greedy and the chat's own.
Each chat begins with another prompt and goes on with every second one after it, so that with 20
chats the first turns are about the same prompts as the last. Of the first and of the last turn, the
rows give

    memory, context   the share of replies that hold the answer of memory, and of the document
    divergence        log p(unsteered) - log p(steered) of a reply that the unsteered model draws at
                      temperature 1 to the same chat, in nats: the mean over its tokens. That is
                      KL(unsteered || steered), estimated; its interval is Student's t over chats
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy import stats

import juice
from benchmarks import rig
from integration.real.answers import UNSTEERED, Row, Way, share_row, ways_of
from integration.real.chat import N_TOKENS, ChatPrompt, chat_prompts, holds
from integration.real.measure import as_command, sets_of
from juice.cli import console
from juice.cli.options import quiet_libraries
from juice.engine.steer import Steer
from juice.errors import UsageError
from juice.identification.outcomes import Interval
from juice.model.prompts import Message
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel
from juice.version import versions

N_CHATS, N_TURNS = 20, 10
PART = "ten turns"


@dataclass
class Talk:
    """A chat: its prompts, and its messages so far."""

    prompts: Sequence[ChatPrompt]
    messages: list[Message] = field(default_factory=list)

    def ask(self, model: SteeredModel, turn: int) -> None:
        """Add the user's words of a turn."""
        asked = self.prompts[turn]
        words = model.prompts.join_context(asked.document, asked.question)
        self.messages.append({"role": "user", "content": words})

    def told(self, model: SteeredModel) -> tuple[str, int]:
        """Return the chat as text, and the position of the first token of the last question."""
        text = model.prompts.rendered(self.messages)
        start = text.rindex(self.prompts[len(self.messages) // 2].question)
        return text, model.prompts.position_in(text, start)


def talks_of(prompts: Sequence[ChatPrompt], n: int) -> list[Talk]:
    """Return chats that begin with every second prompt."""
    n_prompts = len(prompts)
    return [
        Talk([prompts[2 * (i + turn) % n_prompts] for turn in range(N_TURNS)]) for i in range(n)
    ]


def in_turns(
    model: SteeredModel, way: Way, n_chats: int = N_CHATS, progress: Progress = silent
) -> Iterator[Row]:
    """Yield the rows of one way, on a model that takes a chat."""
    talks = talks_of(chat_prompts(), n_chats)
    for turn in range(N_TURNS):
        for talk in talks:
            talk.ask(model, turn)
        replies = _replies(model, talks, way, progress)
        if turn in (0, N_TURNS - 1):
            where = f"turn {turn + 1}, "
            asked = [talk.prompts[turn] for talk in talks]
            for kind in ("memory", "context"):
                hits = [holds(r, getattr(p, kind)) for r, p in zip(replies, asked, strict=True)]
                yield share_row(PART, where + kind, way.name, hits)
            if way is not UNSTEERED:
                yield _divergence_row(model, talks, way, where, progress)
        for talk, reply in zip(talks, replies, strict=True):
            talk.messages.append({"role": "assistant", "content": reply.strip()})


def _replies(model: SteeredModel, talks: Sequence[Talk], way: Way, progress: Progress) -> list[str]:
    told = [talk.told(model) for talk in talks]
    done = model.generate(
        [model.prompts.encode(text) for text, _ in told],
        steer=way.steer,
        question_at=[at for _, at in told],
        max_tokens=N_TOKENS,
        progress=progress,
    )
    return [completion.text for completion in done]


def _divergence_row(
    model: SteeredModel, talks: Sequence[Talk], way: Way, where: str, progress: Progress
) -> Row:
    """Return the row of how far the way's replies are from the unsteered ones to the same chats."""
    told = [talk.told(model) for talk in talks]
    asked = [model.prompts.encode(text) for text, _ in told]
    drawn = model.generate(
        asked, max_tokens=N_TOKENS, temperature=1.0, seed=[*range(len(asked))], progress=progress
    )
    whole = [
        (*ids, *(token.id for token in completion.tokens))
        for ids, completion in zip(asked, drawn, strict=True)
    ]
    scored = [
        model.generate(
            whole,
            steer=steer,
            question_at=[at for _, at in told],
            max_tokens=0,
            prompt_logprobs=True,
            progress=progress,
        )
        for steer in (UNSTEERED.steer, way.steer)
    ]
    nats = []
    for ids, plain, steered in zip(asked, *scored, strict=True):
        pairs = zip(plain.prompt_tokens[len(ids) :], steered.prompt_tokens[len(ids) :], strict=True)
        if gaps := [a.logprob - b.logprob for a, b in pairs]:
            nats.append(fmean(gaps))
    return {
        "part": PART,
        "measure": f"{where}divergence",
        "way": way.name,
        "n": len(nats),
        "divergence": fmean(nats) if nats else None,
        "interval": interval_over_chats(nats),
    }


def interval_over_chats(nats: Sequence[float]) -> Interval | None:
    """Return Student's t interval, of 95 %, of a mean of divergences; None for less than two."""
    if len(nats) < 2:
        return None
    half = float(stats.t.ppf(0.975, len(nats) - 1)) * stdev(nats) / math.sqrt(len(nats))
    return Interval(fmean(nats) - half, fmean(nats) + half)


def ways_in_turns(model: SteeredModel) -> list[Way]:
    """Return no steering, and the default method of each head set at both kinds of positions."""
    ways = [UNSTEERED]
    for target, head_set in sets_of(model).items():
        first = ways_of(head_set)[0]
        ways += [
            Way(f"{target}, {first.name}, {kind}", Steer.of(first.steer, positions=kind))
            for kind in ("all", "question")
        ]
    return ways


def main(arguments: Sequence[str]) -> None:
    """Measure what the arguments say."""
    parser = argparse.ArgumentParser(prog="integration.real.turns", description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--head-sets", required=True, metavar="FOLDER")
    parser.add_argument("--chats", type=int, default=N_CHATS, metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--threads", type=int, metavar="N")
    given = parser.parse_args(arguments)
    quiet_libraries()
    rows: list[Row] = []
    with juice.load(given.model, head_sets=given.head_sets, threads=given.threads) as model:
        if model.own_chat_template is None:
            raise UsageError(f"{model.id} has no chat template; give a model that takes a chat")
        chatting = model.with_chat_template()
        for way in ways_in_turns(model):
            rows += in_turns(chatting, way, given.chats, console.progress)
        command = shlex.join(["python", "-m", "integration.real.turns", *arguments])
        result: dict[str, Any] = {
            "command": command.replace(str(Path.home()), "~"),
            "versions": versions(),
            "machine": rig.machine(),
            "model": model.id,
            "head_sets": {target: one.seal for target, one in sets_of(model).items()},
            "rows": rows,
        }
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        value = row.get("share", row.get("divergence"))
        sys.stdout.write(f"{row['measure']:<20}{row['way']:<30}{row['n']:>4}  {value:.3f}\n")


if __name__ == "__main__":
    as_command(main)
