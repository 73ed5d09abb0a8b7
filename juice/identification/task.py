"""A task: what finding one head set is given, and what an interrupted one had computed.

A result is plain data under a key. In memory it serves the run alone; in a file, which names all
that the results depend on, a later run of the same command finds it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, NamedTuple

from juice.data.example import ConflictExample, examples_sha256, fact_keys, judged_types
from juice.data.memory import open_prompts
from juice.data.passages import followed
from juice.errors import ExampleError, OutputError
from juice.files import write_lines
from juice.formula import CONFLICTS, ConflictType, Method, Target
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Identification, Methods
from juice.head_set.scores import HeadScores
from juice.identification.examples import taking_turns, usable_validation
from juice.identification.options import IdentificationOptions
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel
from juice.version import versions

# Tokens after an answer, those of which what is said next is read, and examples.
N_SAID, N_READ, MOST_REPLIES = 40, 20, 72


class Unfinished:
    """The results of an identification, in memory."""

    def __init__(self) -> None:
        self._results: dict[str, Any] = {}
        self._computed: set[str] = set()
        self.n_found = 0  # of an earlier run

    def get(self, key: str) -> Any:
        """Return a result; None where there is none."""
        if key in self._results and key not in self._computed:
            self.n_found += 1
        return self._results.get(key)

    def put(self, key: str, result: Any) -> None:
        """Keep a result."""
        self._results[key] = result
        self._computed.add(key)

    def remove(self) -> None:
        """Forget the results: the identification is done."""
        self._results.clear()


class UnfinishedFile(Unfinished):
    """The results of an identification in a file, which replaces that of another run.

    `identity` is all that they depend on, as plain data.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        super().__init__()
        self._path, self._identity = path, json.loads(json.dumps(identity))
        self._can_write = True
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["identity"] == self._identity:
                self._results = dict(found["results"])
        except (OSError, ValueError, KeyError, TypeError):  # none, or not one of ours
            pass

    def put(self, key: str, result: Any) -> None:
        """Keep a result and write the file; warn once where it cannot be written."""
        super().put(key, result)
        if not self._can_write:
            return
        content = {"identity": self._identity, "results": self._results}
        try:
            write_lines(self._path, [json.dumps(content)], overwrite=True)
        except OutputError as error:
            self._can_write = False
            warnings.warn(f"an interrupted run would begin anew: {error}", stacklevel=2)

    def remove(self) -> None:
        """Remove the file, where that may be done: the identification is over."""
        with suppress(OSError):
            self._path.unlink()


class Reply(NamedTuple):
    """An answer to a prompt, and what the unsteered model says next.

    Args:
        ids: The tokens from the prompt on, but for the last that is said.
        n_said: How many tokens the model says, with the last.
        ends: Whether that one ends the reply.
    """

    ids: tuple[int, ...]
    n_said: int
    ends: bool

    @property
    def places(self) -> range:
        """The positions after each of which the model says a token."""
        return range(len(self.ids) - self.n_said, len(self.ids))

    def some(self, rng: Random) -> list[int]:
        """Return N_READ of these positions, the last one among them, or all of fewer."""
        *others, last = self.places
        return [*rng.sample(others, min(N_READ - 1, len(others))), last]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A head set that is to be found, or tuned.

    The model takes prompts in the form in which the heads are found, on examples that all have the
    same conflict types. Betas are chosen on the validation examples.
    """

    model: SteeredModel
    target: Target
    examples: Sequence[ConflictExample] = ()
    validation: Sequence[ConflictExample] = ()
    options: IdentificationOptions = field(default_factory=IdentificationOptions)
    progress: Progress = silent
    unfinished: Unfinished = field(default_factory=Unfinished)
    deadline: float | None = None  # on the monotonic clock

    @property
    def is_late(self) -> bool:
        """Whether the time that is given is over, but for what measuring takes."""
        return self.deadline is not None and monotonic() > self.deadline

    @property
    def name(self) -> str:
        """The name of the head set."""
        return self.options.names[self.target]

    @cached_property
    def conflict_types(self) -> tuple[ConflictType, ...]:
        """The conflict types that heads are judged on. Raises ExampleError without a conflict."""
        types = judged_types(self.target, self.examples)
        if not set(types) - {"clean"}:
            raise ExampleError(
                f"the examples hold no conflict for the {self.target} target; give each a "
                "substitution or a coherent prompt in addition to the clean one"
            )
        return types

    def left_open(self, *, held_out: bool = False) -> list[tuple[int, ...]]:
        """Return the tokens of prompts that leave open what is said; none if they may break.

        `held_out` takes others, to measure on (`juice.data.memory.open_prompts`).
        """
        if "clean" not in self.options.protect:
            return []
        form, seed = self.model.prompts, self.options.seed
        made = open_prompts(is_chat=form.sha256 is not None, seed=seed, held_out=held_out)
        every = (form.tokens(one.prompt, one.opening) for one in made)
        return [ids for ids in every if self.model.fits(ids, max_tokens=1)]

    def replies(self, *, held_out: bool = False) -> list[Reply]:
        """Return what follows the target's answer to a conflict of each example, types in turn.

        The model says it unsteered. There is none if clean prompts may break. `held_out` takes the
        validation examples, to measure on.
        """
        if "clean" not in self.options.protect:
            return []
        key = f"what follows {self.target} answers{', held out' if held_out else ''}"
        if (kept := self.unfinished.get(key)) is None:
            model, examples = self.model, self.held_out if held_out else self.examples
            asked = (
                model.prompts.joined(
                    e.prompts[t], followed(e.opening, e.answer(self.target)).lstrip()
                )[0]
                for e in taking_turns(examples[:MOST_REPLIES], self.target)
                for t in CONFLICTS
                if t in e.prompts
            )
            requests = [
                model.request(ids, max_tokens=N_SAID)
                for ids in asked
                if model.fits(ids, max_tokens=N_SAID)
            ]
            done = model.engine.generate(
                requests, progress=self.progress, description=f"asking {key}"
            )
            kept = [
                (one.prompt_ids + said.token_ids[:-1], len(said.tokens), said.finish_reason)
                for one, said in zip(requests, done, strict=True)
            ]
            self.unfinished.put(key, kept)
        return [Reply(tuple(ids), n_said, why == "stop") for ids, n_said, why in kept]

    @cached_property
    def held_out(self) -> list[ConflictExample]:
        """The validation examples that can be used. Raises ExampleError where there are none."""
        return usable_validation(self.model, self.validation, self.target)

    def head_set(
        self,
        methods: Methods,
        scores: HeadScores,
        top_k: int | None = None,
        method: Method = "juice",
    ) -> HeadSet:
        """Return the head set with its origin, in enough detail to find the heads again.

        `top_k` is the number of heads of each sign; None where all are taken that were found.
        `method` is the set's default.
        """
        options = self.options
        probes = options.method == "probe"
        origin = Identification(
            method=scores.kind,
            alphas_plus=options.alphas_plus if probes else (),
            alphas_minus=options.alphas_minus if probes else (),
            n_examples=len(self.examples),
            seed=options.seed,
            examples_sha256=examples_sha256(self.examples),
            facts=tuple(sorted({*fact_keys(self.examples), *fact_keys(self.validation)})),
            conflict_types=self.conflict_types,
            top_k=top_k,
            chat_template_sha256=self.model.prompts.sha256,
            versions=versions(),
        )
        return HeadSet(
            name=self.name,
            target=self.target,
            model=self.model.description.identity,
            method=method,
            methods=methods,
            identification=origin,
            scores=scores,
            scores_sha256=scores.sha256(),
        )
