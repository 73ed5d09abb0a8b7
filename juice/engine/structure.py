"""The form that an answer must have: JSON of a schema, one of some texts, an expression, a grammar.

llguidance reads all of them and says at every token which may come next, on every engine the same.
Log-probabilities are those before anything is ruled out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, grammar_from
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask  # that for PyTorch loads its compiler

from juice.errors import GenerationError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Form = Literal["json_schema", "regex", "choice", "grammar"]
N_COMPILED = 64
WORD_BITS = 32
# In a schema: keywords whose values are no schemas or must stay, those that hold schemas by name,
# and those beside which an object's properties are not all that it may have.
AS_THEY_ARE = frozenset({"const", "default", "enum", "examples", "not", "required"})
BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
OPEN = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "$ref"}
    | {"anyOf", "oneOf", "if", "propertyNames", "minProperties"}
)
# As Python writes JSON. Where any white space is allowed, small models write it to the end.
JSON: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


@dataclass(frozen=True)
class Structure:
    """The form of an answer.

    Args:
        form: How the text says it.
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

    Args:
        tokenizer: The model's.
        vocabulary_size: How many logits it has.
        stop_token_ids: Any of these ends an answer that is complete.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary_size: int,
        stop_token_ids: frozenset[int],
    ) -> None:
        self._tokenizer, self._n_tokens = tokenizer, vocabulary_size
        self._stop_token_ids = sorted(stop_token_ids)
        self._own: LLTokenizer | None = None
        self._compiled = lru_cache(N_COMPILED)(self._compile)

    def check(self, structure: Structure) -> None:
        """Raise RequestError for a structure that cannot be followed; it may take a second."""
        if isinstance(found := self._compiled(structure), str):
            raise RequestError(found, param="structure")

    def start(self, structure: Structure) -> Constraint:
        """Return what rules tokens out in a new answer; raises RequestError."""
        self.check(structure)
        found = self._compiled(structure)
        assert not isinstance(found, str)
        return Constraint(found.deep_copy())

    def special_tokens(self) -> dict[str, int]:
        """Return the tokens that are no text to a grammar, by their names; it may take a second.

        Raises RequestError where answers of the model can have no structure.
        """
        try:
            own = self._vocabulary()
        except ValueError as error:
            raise RequestError(f"answers cannot have a form: {error}", param="structure") from None
        added = self._tokenizer.added_tokens_decoder.items()
        return {str(token): i for i, token in added if own.is_special_token(i)}

    def _compile(self, structure: Structure) -> LLMatcher | str:
        """Return a matcher before its first token, or why there is none."""
        try:
            grammar = _grammar(structure)
            own = self._vocabulary()
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            return f"the {structure.form} cannot be read: {error}"
        if problem := LLMatcher.validate_grammar(grammar, own):
            return f"the {structure.form} cannot be followed: {problem}"
        matcher = LLMatcher(own, grammar, log_level=0)
        try:
            Constraint(matcher.deep_copy()).write(_masks(1, self._n_tokens), 0)
        except GenerationError as error:
            return f"the {structure.form} cannot be followed: {error}"
        return matcher

    def _vocabulary(self) -> LLTokenizer:
        if self._own is None:
            if not self._stop_token_ids:
                raise ValueError("the model has no token that ends an answer")
            self._own = from_tokenizer(
                self._tokenizer, n_vocab=self._n_tokens, eos_token=self._stop_token_ids
            )
        return self._own


class Constraint:
    """Says of one answer which tokens may come next."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> None:
        """Take the next token of the answer."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)

    def write(self, masks: np.ndarray, row: int) -> None:
        """Write a bit for each token that may come next into a row of int32 [rows, words].

        Raises GenerationError where the structure has become too complex to follow.
        """
        fill_next_token_bitmask(self._matcher, masks, row)
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise GenerationError(f"no token may follow ({reason}); make the structure simpler")


def json_rule(schema: Mapping[str, Any] | str) -> str:
    """Return what stands in a grammar in Lark's notation for JSON that is valid under a schema."""
    settled = _settled(json.loads(schema) if isinstance(schema, str) else schema)
    own = settled if isinstance(settled, dict) else {"allOf": [settled]}
    return f"%json {json.dumps({'x-guidance': JSON, **own})}"


def rule_out(logits: torch.Tensor, constraints: Mapping[int, Constraint]) -> None:
    """Set the logits of tokens that may not come next to minus infinity, in some rows.

    Nothing waits for a GPU.

    Args:
        logits: float32 [rows, vocabulary], which are changed.
        constraints: Those of each constrained row.

    Raises GenerationError.
    """
    n_tokens = logits.shape[-1]
    masks = _masks(len(constraints), n_tokens)
    for i, constraint in enumerate(constraints.values()):
        constraint.write(masks, i)
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    rows = torch.tensor([*constraints]).to(logits.device, non_blocking=True)
    allowed = torch.from_numpy(masks).to(logits.device, non_blocking=True)[:, :, None] >> bits & 1
    ruled_out = allowed.flatten(1)[:, :n_tokens] == 0
    logits[rows] = logits[rows].masked_fill(ruled_out, -torch.inf)


def _masks(n_rows: int, n_tokens: int) -> np.ndarray:
    """Return a bit for each token and row, int32 [rows, words]."""
    return np.zeros((n_rows, -(-n_tokens // WORD_BITS)), dtype=np.int32)


def _grammar(structure: Structure) -> str:
    """Return a structure in llguidance's own words, as vLLM writes them; raises ValueError."""
    if structure.form == "json_schema":
        settled = json.dumps(_settled(json.loads(structure.text)))
        return str(LLMatcher.grammar_from_json_schema(settled, defaults=JSON))
    if structure.form == "choice" and not json.loads(structure.text):
        raise ValueError("it has no texts to choose from")
    return str(grammar_from(structure.form, structure.text))


def _settled(schema: Any) -> Any:
    """Return a schema as it is followed."""
    # Parts that hold together stay open, or none could add to another.
    return schema if '"allOf"' in json.dumps(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have the properties that it names, where it leaves that open.

    Else most models go on with properties of their own. What is valid under the result is valid
    under the schema.
    """
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    own = {
        name: part
        if name in AS_THEY_ARE
        else {key: _closed(value) for key, value in part.items()}
        if name in BY_NAME and isinstance(part, dict)
        else _closed(part)
        for name, part in schema.items()
    }
    if isinstance(own.get("properties"), dict) and not own.keys() & OPEN:
        own["additionalProperties"] = False
    return own
