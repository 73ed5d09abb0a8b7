"""The form that an answer must have: JSON of a schema, one of some texts, an expression, a grammar.

llguidance reads all of them and says at every token which may come next, on every engine the same.
Log-probabilities are those before anything is ruled out.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from juice.engine.structure_sandbox import StructureSandbox, compiled, problem_of, release_freed
from juice.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Form = Literal["json_schema", "regex", "choice", "grammar"]
# The longest texts: what one says in more takes seconds anyway.
MAX_CHARACTERS: Mapping[Form, int] = {
    "regex": 1 << 15,
    "grammar": 1 << 20,  # those of tools hold all their schemas
    "json_schema": 1 << 20,
    "choice": 1 << 20,
}
# How many compiled structures are kept, and their bytes; those of one that was checked elsewhere.
N_COMPILED, COMPILED_BYTES, UNKNOWN_BYTES = 64, 512 << 20, 32 << 20
WORD_BITS = 32
CANNOT_FOLLOW = "the structure cannot be followed to the end of the answer"


@dataclass(frozen=True)
class Structure:
    """The form of an answer.

    Args:
        form: The notation of the text.
        text: A JSON schema, a regular expression (that of Rust, of the whole answer), a JSON list
            of texts, or a grammar in Lark's or GBNF's notation.
    """

    form: Form
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | bool) -> Structure:
        """Return the form of JSON that is valid under a schema."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def json_object(cls) -> Structure:
        """Return the form of any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Structure:
        """Return the form of one of some texts."""
        return cls("choice", json.dumps(list(texts)))


class Structures:
    """The structures that one model's answers may have; compiled ones are kept.

    Any stop token ends an answer that is complete. Those that `are_checked` have passed the sandbox
    of another process.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary_size: int,
        stop_token_ids: frozenset[int],
        *,
        are_checked: bool = False,
    ) -> None:
        self._tokenizer, self._n_tokens = tokenizer, vocabulary_size
        self._stop_token_ids = sorted(stop_token_ids)
        self._are_checked = are_checked
        self._lock = Lock()
        # What was compiled, or why it could not be, and its bytes; the last used is the last.
        self._kept: OrderedDict[Structure, tuple[LLMatcher | str, int]] = OrderedDict()

    def prepare(self) -> None:
        """Do what the first structure would wait for; it may take seconds, and all threads wait.

        Raises RequestError where answers of the model can have no structure, and GenerationError
        where the sandbox does not start.
        """
        self.check(Structure("regex", "a"))

    def check(self, structure: Structure) -> None:
        """Raise RequestError for a structure that cannot be followed; it may take a second."""
        self._compiled(structure)

    def start(self, structure: Structure) -> Constraint:
        """Return the constraint of a new answer, which rules tokens out; raises RequestError.

        It may take a second where others have taken the structure's place; `start_kept` does not.
        """
        return Constraint(self._compiled(structure).deep_copy(), self._stop_token_ids)

    def start_kept(self, structure: Structure) -> Constraint | None:
        """Return what `start` does, or None for a structure that would be compiled again."""
        outcome = self._find(structure)
        if outcome is None:
            return None
        return Constraint(_matcher(structure, outcome).deep_copy(), self._stop_token_ids)

    def are_whole(self, structure: Structure, token_ids: Sequence[int]) -> bool:
        """Return whether tokens, the stop token at their end, are an answer of a structure."""
        matcher = self._compiled(structure).deep_copy()
        return bool(matcher.consume_tokens(list(token_ids)))

    def special_tokens(self) -> dict[str, int]:
        """Return the tokens that are no text to a grammar, by their names; it may take a second.

        Raises RequestError where answers of the model can have no structure.
        """
        added = self._tokenizer.added_tokens_decoder.items()
        return {str(token): i for i, token in added if self._vocabulary.is_special_token(i)}

    def _compiled(self, structure: Structure) -> LLMatcher:
        outcome = self._find(structure)
        if outcome is None:
            outcome, n_bytes = self._compile(structure)
            with self._lock:
                self._kept[structure] = outcome, n_bytes
                while len(self._kept) > N_COMPILED or (
                    len(self._kept) > 1 and sum(n for _, n in self._kept.values()) > COMPILED_BYTES
                ):
                    self._kept.popitem(last=False)
        return _matcher(structure, outcome)

    def _find(self, structure: Structure) -> LLMatcher | str | None:
        with self._lock:
            if kept := self._kept.get(structure):
                self._kept.move_to_end(structure)
        return kept[0] if kept else None

    def _compile(self, structure: Structure) -> tuple[LLMatcher | str, int]:
        """Return a matcher before its first token, or why there is none, and its bytes."""
        form, text = structure.form, structure.text
        most, n_bytes = MAX_CHARACTERS[form], UNKNOWN_BYTES
        if len(text) > most:
            return f"has {len(text):,} characters; expected at most {most:,}", 0
        if (sandbox := self.sandbox) is not None:
            problem, n_bytes = sandbox(form, text)
            if problem:
                return problem, 0
        return compiled(self._vocabulary, form, text), n_bytes

    def end_sandbox(self) -> None:
        """End the process in which forms are checked, if there is one."""
        if "_readers" in vars(self) and self.sandbox is not None:
            self.sandbox.end()

    @property
    def sandbox(self) -> StructureSandbox | None:
        """The process in which forms are checked; None: they were, elsewhere."""
        return self._readers[1]

    @property
    def _vocabulary(self) -> LLTokenizer:
        return self._readers[0]

    @cached_property
    def _readers(self) -> tuple[LLTokenizer, StructureSandbox | None]:
        """What reads the tokenizer's JSON, which takes seconds where there are many tokens."""
        n_tokens, stops, sandbox = self._n_tokens, self._stop_token_ids, None
        try:
            if not stops:
                raise ValueError("the model has no token that ends an answer")
            tokenizer = tokenizer_json(self._tokenizer)
            if not self._are_checked:
                sandbox = StructureSandbox(tokenizer, n_tokens, stops)
                sandbox.start()  # which reads while this process does
            vocabulary = LLTokenizer(tokenizer, n_vocab=n_tokens, eos_token=stops)
        except ValueError as error:
            problem = f"answers cannot have a form: {error}"
            raise RequestError(problem, param="structure") from error
        release_freed()
        return vocabulary, sandbox


def _matcher(structure: Structure, outcome: LLMatcher | str) -> LLMatcher:
    if isinstance(outcome, str):
        raise RequestError(f"the {structure.form} {outcome}", param="structure")
    return outcome


class Constraint:
    """Says of one answer which tokens may come next; without a matcher it may only stop."""

    def __init__(self, matcher: LLMatcher | None, stop_token_ids: Iterable[int]) -> None:
        self._matcher, self._stop_token_ids = matcher, stop_token_ids
        self.failure = ""  # why no token could follow, though the answer was not whole

    def accept(self, token_id: int) -> None:
        """Take the next token of the answer; it has failed if that one may not come."""
        if self._matcher is None or self._matcher.is_error() or self._matcher.is_stopped():
            return
        if not self._matcher.consume_token(token_id):
            self.failure = f"{CANNOT_FOLLOW}: {problem_of(self._matcher)}"

    def write(self, masks: np.ndarray, row: int) -> None:
        """Write a bit for each token that may come next into a row of int32 [rows, words].

        Where the structure has become too complex to follow, the answer may only stop; unless it
        could have anyway, it has failed.
        """
        reason, may_stop = "it was not compiled", False
        if self._matcher is not None:
            may_stop = self._matcher.is_accepting()
            fill_next_token_bitmask(self._matcher, masks, row)
            if not self._matcher.is_error():
                return
            reason = problem_of(self._matcher)
        masks[row] = 0
        for token in self._stop_token_ids:
            masks[row].view(np.uint32)[token // WORD_BITS] |= np.uint32(1 << token % WORD_BITS)
        if not may_stop:
            self.failure = f"{CANNOT_FOLLOW}: {reason}"


def tokenizer_json(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a tokenizer as JSON; raises RequestError for one that is written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError(
            "answers cannot have a form: the model has no fast tokenizer", param="structure"
        )
    if backend.padding or backend.truncation:  # a file or a caller may say so
        backend = copy(backend)  # which takes four times as long as the JSON
        backend.no_padding()
        backend.no_truncation()
    return str(backend.to_str())


def rule_out(logits: torch.Tensor, constraints: Mapping[int, Constraint]) -> None:
    """Set the logits of tokens that may not come next to minus infinity, in the constrained rows.

    Logits are float32 [rows, vocabulary], and are changed; nothing waits for a GPU.
    """
    n_tokens = logits.shape[-1]
    # A bit for each token and row, int32 [rows, words].
    masks = np.zeros((len(constraints), -(-n_tokens // WORD_BITS)), dtype=np.int32)
    for i, constraint in enumerate(constraints.values()):
        constraint.write(masks, i)
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    rows = torch.tensor([*constraints]).to(logits.device, non_blocking=True)
    allowed = torch.from_numpy(masks).to(logits.device, non_blocking=True)[:, :, None] >> bits & 1
    ruled_out = allowed.flatten(1)[:, :n_tokens] == 0
    logits[rows] = logits[rows].masked_fill(ruled_out, -torch.inf)
