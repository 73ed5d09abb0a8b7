"""The grammar of answers that call: what it lets through, and that what it lets through is read."""

from __future__ import annotations

import json
from random import Random

import jsonschema
import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from juice.engine.structure import Structure, Structures
from juice.errors import RequestError
from juice.files import MINI
from juice_server.tool_parser import (
    MAX_CALLS,
    Arguments,
    Call,
    CallReader,
    Part,
    ToolUse,
    Words,
    use_of,
    whole,
)
from juice_server.tools import FORMATS, Function, Offer

LOOK = Function(
    "look.up",
    parameters={
        "type": "object",
        "properties": {
            "place": {"$ref": "#/$defs/place"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["place", "days"],
        "$defs": {"place": {"enum": ["Lima", "Oslo"]}},
    },
    is_strict=True,
)
NOW = Function("now")
BOTH = (LOOK, NOW)
ARGUMENTS = '{"place": "Oslo", "days": 3}'
WRITTEN = {
    "hermes": '<tool_call>\n{{"name": "{0}", "arguments": {1}}}\n</tool_call>',
    "llama3": '{{"name": "{0}", "parameters": {1}}}',
    "mistral": '[TOOL_CALLS] [{{"name": "{0}", "arguments": {1}}}]',
    "mistral_args": "[TOOL_CALLS]{0}[ARGS]{1}",
    "json": '[{{"name": "{0}", "arguments": {1}}}]',
}
MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"]


@pytest.fixture(scope="module", params=["text", "tokens", "special tokens"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    """Make a tokenizer to which the markers are what the parameter says."""
    made = AutoTokenizer.from_pretrained(MINI)
    if request.param != "text":
        made.add_tokens(MARKERS, special_tokens=request.param == "special tokens")
        assert len(made("[ARGS]", add_special_tokens=False)["input_ids"]) == 1
    return made


def structures_of(tokenizer: PreTrainedTokenizerBase) -> Structures:
    return Structures(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))


class Follower:
    """Follows the grammar of an offer, token by token."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, name: str, offer: Offer, answer: object = None
    ) -> None:
        self.tokenizer, self.n_tokens = tokenizer, len(tokenizer)
        structures = structures_of(tokenizer)
        self.use = use_of(offer, FORMATS[name], structures, answer, "response_format")
        self.constraint = structures.start(self.use.structure)

    def allowed(self) -> set[int]:
        masks = np.zeros((1, -(-self.n_tokens // 32)), dtype=np.int32)
        self.constraint.write(masks, 0)
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits[: self.n_tokens]).tolist())

    def takes(self, text: str) -> bool:
        """Return whether a whole answer may be this text."""
        for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]:
            if token not in self.allowed():
                return False
            self.constraint.accept(token)
        return self.tokenizer.eos_token_id in self.allowed()


@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_that_must_call_is_a_call_of_what_was_offered(
    tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    write, offer = WRITTEN[name].format, Offer(BOTH, must_call=True)
    taken = {
        text: Follower(tokenizer, name, offer).takes(text)
        for text in (
            write("look.up", ARGUMENTS),
            write("now", "{}"),
            write("now", '{"a": 1}'),
            write("look.up", '{"place": "Rome", "days": 3}'),
            write("later", "{}"),
            "It is late.",
            "",
        )
    }
    assert list(taken.values()) == [True, True, *[False] * 5], taken


@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_that_may_call_is_text_or_ends_with_sound_calls(
    tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    write, offer = WRITTEN[name].format, Offer(BOTH)
    lead = "Let me < see [it].\n" if FORMATS[name].spelling.marker else ""
    taken = {
        text: Follower(tokenizer, name, offer).takes(text)
        for text in (
            "It is < late [now].",
            "",
            lead + write("look.up", ARGUMENTS),
            lead + write("look.up", '{"place": "Rome", "days": 3}'),
            lead + write("later", "{}"),
        )
    }
    assert list(taken.values()) == [True, True, True, False, False], taken


@pytest.mark.parametrize("name", WRITTEN)
def test_whatever_is_let_through_is_read_as_valid_calls(
    tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    rng = Random(f"{name} {len(tokenizer)}")
    for single in (True, False):
        offer = Offer(BOTH, must_call=True, is_single=single)
        one, drawn = Follower(tokenizer, name, offer), []
        for _ in range(400):
            allowed = one.allowed()
            may_end = tokenizer.eos_token_id in allowed
            if may_end and (len(allowed) == 1 or len(drawn) > 60):
                break
            drawn.append(rng.choice(sorted(allowed - {tokenizer.eos_token_id})))
            one.constraint.accept(drawn[-1])
        answer = tokenizer.decode(drawn)
        parts = whole(one.use.reader(""), answer)
        assert parts, drawn
        assert without_ids(parts) == without_ids(whole(CallReader(one.use.form, offer, ""), answer))
        check_pieces(one.use, answer)
        assert len(parts) == 1 or not single
        for part in parts:
            assert isinstance(part, Call), parts
            schema = {each.name: each.schema for each in BOTH}[part.name]
            jsonschema.validate(json.loads(part.arguments), schema)


def without_ids(parts: list[Part]) -> list[object]:
    return [(p.name, json.loads(p.arguments)) if isinstance(p, Call) else p.text for p in parts]


def check_pieces(use: ToolUse, answer: str) -> None:
    """Check that what a stream gives is at each moment a beginning of the whole."""
    names = [part.name for part in whole(use.reader(""), answer)]
    reader, pieces = use.reader(""), []
    for character in answer:
        pieces += reader.feed(character)
    pieces += reader.finish()
    assert [part.name for part in pieces if isinstance(part, Call)] == names
    assert all(isinstance(part, Call | Arguments) for part in pieces)
    assert sum(isinstance(part, Arguments) for part in pieces) >= 2 * len(names), "as they come"
    joined = "".join(part.text for part in pieces if isinstance(part, Arguments))
    assert joined == "".join(part.arguments for part in whole(use.reader(""), answer))


@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_that_is_cut_anywhere_shows_no_part_of_a_call_as_text(
    tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Where it must call, and where text may come before."""
    write = WRITTEN[name].format
    call = write("look.up", ARGUMENTS)
    marker = FORMATS[name].spelling.marker
    lead = "So < [1]" if marker else ""
    for offer, before in ((Offer(BOTH, must_call=True), ""), (Offer(BOTH), lead)):
        use = Follower(tokenizer, name, offer).use
        answer = f"{before}\n{call}" if before else call
        for end in range(len(answer) + 1):
            parts = whole(use.reader(""), answer[:end])
            text = "".join(part.text for part in parts if isinstance(part, Words))
            # Of a marker that may be text yet, the beginning is text where it ends there.
            limit = len(before) + 1 + len(marker) if before else 0
            assert text == (answer[:end] if end < limit else before), end
            for part in parts:
                if isinstance(part, Call):
                    assert part.name == "look.up"
                    assert ARGUMENTS.startswith(part.arguments)
        assert parts[-1].arguments == ARGUMENTS


def test_a_model_that_goes_on_makes_a_bounded_number_of_calls() -> None:
    mini = AutoTokenizer.from_pretrained(MINI)
    offer = Offer((NOW,), must_call=True)
    calls = [WRITTEN["json"].format("now", "{}")[1:-1]] * (MAX_CALLS + 1)
    assert Follower(mini, "json", offer).takes(f"[{', '.join(calls[:-1])}]")
    assert not Follower(mini, "json", offer).takes(f"[{', '.join(calls)}]")


def test_an_answer_may_be_json_or_a_call() -> None:
    mini = AutoTokenizer.from_pretrained(MINI)
    answer = Structure.json_schema({"enum": ["yes", "no"]})
    for text, is_taken in (
        ('"yes"', True),
        (WRITTEN["hermes"].format("now", "{}"), True),
        ("yes", False),
        ("It is late.", False),
    ):
        assert Follower(mini, "hermes", Offer((NOW,)), answer).takes(text) == is_taken, text
    with pytest.raises(RequestError, match="JSON"):
        Follower(mini, "hermes", Offer((NOW,)), Structure("regex", "a+"))


def test_a_form_without_a_grammar_is_enforced_as_json_or_refused() -> None:
    mini = AutoTokenizer.from_pretrained(MINI)
    offer = Offer((NOW,), must_call=True)
    assert Follower(mini, "qwen3_coder", offer).takes(WRITTEN["json"].format("now", "{}"))
    with pytest.raises(RequestError, match="strict"):
        Follower(mini, "qwen3_coder", Offer((LOOK,)))
    assert (
        use_of(Offer((NOW,)), FORMATS["qwen3_coder"], structures_of(mini), None, None).structure
        is None
    )
