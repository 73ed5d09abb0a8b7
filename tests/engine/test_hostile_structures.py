"""Structures that would take minutes or gigabytes: each is refused, or followed, in little time."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from juice.engine.request import Request
from juice.engine.structure import MAX_CHARACTERS, Structure, Structures
from juice.engine.structure_sandbox import SANDBOX_S
from juice.errors import GenerationError, RequestError
from juice.files import MINI
from tests.support.running import loaded
from tests.support.schemas import chained

# What compiling takes in this process, once a trial took less than its bound in its own.
OWN_S = SANDBOX_S + 0.2


def schema(given: dict[str, Any]) -> Structure:
    return Structure.json_schema(given)


def array(n: int, items: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"type": "array", "maxItems": n, "items": items, **options}


def doubled(name: str, rule: str, last: str, n: int = 30) -> Structure:
    """Return a grammar in which each rule has the next one twice."""
    rules = [f"{name}{i}: {rule.format(f'{name}{i + 1}')}" for i in range(n)]
    return Structure("grammar", "\n".join([f"start: {name}0", *rules, f"{name}{n}: {last}"]))


INTEGER = {"type": "integer"}
# Those that are refused, the worst of each kind; without the bounds they take up to minutes.
REFUSED = {
    "more than fits": Structure("regex", "(ab|cd)?" * 60_000),
    "optional words": Structure("regex", r"\w?" * 5400),
    "nested repeats": Structure("regex", "(a{1000}){1000}"),
    "too many items": schema(array(10**6, INTEGER)),
    "a large multiple": schema({**INTEGER, "multipleOf": 99_999_989}),
    "a large multiple after a chain": schema(chained({**INTEGER, "multipleOf": 99_999_989})),
}
MORE_REFUSED = {
    "optional texts": Structure("regex", "(ab|cd)?" * 4000),
    "optional letters": Structure("regex", "a?" * 16_000),
    "optional letters of any script": Structure("regex", r"\p{L}?" * 5000),
    "three nested repeats": Structure("regex", "((a{1,100}){1,100}){1,100}"),
    "groups": Structure("regex", "(" * 5000 + "a" + ")" * 5000),
    "two multiples": schema({"allOf": [{"multipleOf": 7919, **INTEGER}, {"multipleOf": 7907}]}),
    "many multiples": schema(
        {
            "type": "object",
            "properties": {f"p{i}": {**INTEGER, "multipleOf": 49_999 - i} for i in range(99)},
        }
    ),
    "arrays in arrays": schema(array(30_000, array(30_000, array(30_000, INTEGER)))),
    "a pattern": schema({"type": "string", "pattern": "^" + "a?" * 16_000 + "$"}),
    "a pattern of a length": schema(
        {"type": "string", "pattern": "^" + "a?" * 8000 + "$", "minLength": 10}
    ),
    "patterns together": schema(
        {"allOf": [{"type": "string", "pattern": f"[a-z]*{c}[a-z]*"} for c in "abcdefghijkl"]}
    ),
    "white space": schema(
        {"x-guidance": {"whitespace_pattern": "a?" * 8000}, "type": "object", "minProperties": 3}
    ),
    "any of many": schema(
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(8)]} for i in range(8)]}
    ),
    "references": schema(
        {
            "$ref": "#/$defs/0",
            "$defs": {
                str(i): {"anyOf": [{"$ref": f"#/$defs/{j}"} for j in range(60)]} for i in range(60)
            },
        }
    ),
    "deep": Structure("json_schema", '{"type":"array","items":' * 10_000 + "{}" + "}" * 10_000),
    "JSON in a grammar": Structure(
        "grammar", 'start: %json {"type": "integer", "multipleOf": 99999989}'
    ),
    "doubled rules": doubled("a", "{0} {0}", '"x"'),
    "doubled terminals": doubled("A", "{0} {0}", "/a|bc/"),
    "optional symbols": Structure("grammar", "start: " + '"a"? ' * 2500),
    "optional symbols in GBNF": Structure("grammar", "root ::= " + '("a" | "b")? ' * 9000),
    "parentheses in GBNF": Structure("grammar", "root ::= " + "(" * 9000 + '"a"' + ")" * 9000),
    "terminals and others": Structure(
        "grammar", "start: A\nA: " + " & ".join(f"/(.|\\n)*{c}(.|\\n)*/" for c in "abcdefghijkl")
    ),
}
# Those that look as bad, and can be followed.
FOLLOWED = {
    "a long string": schema({"type": "string", "minLength": 10**6}),
    "many choices": Structure.choice([f"option number {i}" for i in range(10_000)]),
    "a large enum": schema({"enum": [f"option number {i}" for i in range(10_000)]}),
    "a chain of definitions": schema(chained(INTEGER)),
    "long repeats": Structure("regex", r"(\w+ ){1,1000}"),
    "repeated rules": Structure("grammar", 'start: ("a" | "b"){1,1000000000}'),
}
MORE_FOLLOWED = {
    "many states": Structure("regex", r"(.|\n)*[ab](.|\n){30}"),
    "many properties": schema(
        {
            "type": "object",
            "properties": {f"p{i}": {"type": "string"} for i in range(2000)},
            "required": [f"p{i}" for i in range(2000)],
        }
    ),
    "many kinds": schema(
        {"anyOf": [{"type": "object", "properties": {f"p{i}": INTEGER}} for i in range(200)]}
    ),
    "long choices": Structure.choice([f"{i} {'x' * 1000}" for i in range(500)]),
    "many formats": schema(
        {
            "type": "object",
            "properties": {
                f"p{i}": {"type": "string", "format": f}
                for i in range(20)
                for f in ("date-time", "email", "ipv6", "uri")
            },
        }
    ),
}


@pytest.fixture(scope="module")
def structures() -> Structures:
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    made = Structures(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    made.check(Structure("regex", "a"))  # starts what tries out
    return made


def trial_s(structures: Structures) -> float:
    """Return the processor's time of the process that tries out, and of those that it started."""
    fields = Path(f"/proc/{structures.sandbox.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def checked(structures: Structures, structure: Structure) -> RequestError | None:
    """Check one, which must take little of the processor's time and little memory."""
    before, other = time.process_time(), trial_s(structures)
    error = None
    try:
        structures.check(structure)
        structures.start(structure)
    except RequestError as caught:
        error = caught
    assert time.process_time() - before < OWN_S
    assert trial_s(structures) - other < SANDBOX_S + 0.3
    return error


@pytest.mark.parametrize(
    "name",
    [*REFUSED, *(pytest.param(each, marks=pytest.mark.torture) for each in MORE_REFUSED)],
)
def test_what_would_take_too_much_is_refused_in_time(structures: Structures, name: str) -> None:
    error = checked(structures, (REFUSED | MORE_REFUSED)[name])
    assert error is not None
    assert error.param == "structure"
    assert "\n" not in str(error)
    assert len(str(error)) < 500


@pytest.mark.parametrize(
    "name",
    [*FOLLOWED, *(pytest.param(each, marks=pytest.mark.torture) for each in MORE_FOLLOWED)],
)
def test_what_only_looks_so_is_followed(structures: Structures, name: str) -> None:
    assert checked(structures, (FOLLOWED | MORE_FOLLOWED)[name]) is None


def test_a_refusal_says_what_helps(structures: Structures) -> None:
    with pytest.raises(RequestError, match=r"more than 1 s or 256 MB.*make it simpler"):
        structures.check(REFUSED["a large multiple"])
    most = f"{MAX_CHARACTERS['regex']:,}"
    with pytest.raises(RequestError, match=f"480,000 characters; expected at most {most}"):
        structures.check(REFUSED["more than fits"])


def test_the_process_is_started_again_where_it_was_lost(structures: Structures) -> None:
    lost = structures.sandbox.pid
    os.kill(lost, 9)
    with suppress(GenerationError):  # where it was not lost yet
        structures.check(Structure("regex", "aa"))
    structures.check(Structure("regex", "ab"))
    assert structures.sandbox.pid != lost


def test_the_process_ends_with_the_structures() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    made = Structures(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    made.check(Structure("regex", "a"))
    process = made.sandbox.pid
    del made
    assert not Path(f"/proc/{process}").exists()


def test_the_process_ends_when_the_engine_is_closed() -> None:
    engine = loaded().engine
    engine.check(Request.of(prompt_ids=(1,), structure=Structure("regex", "a")))
    process = engine.structures.sandbox.pid
    assert Path(f"/proc/{process}").exists()
    engine.close()
    assert not Path(f"/proc/{process}").exists()


def test_a_process_that_ends_as_it_starts_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kills: a zombie for each form that is tried while memory lacks."""
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    made = Structures(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    ends, started = tmp_path / "ends", tmp_path / "started"
    ends.write_text(f"#!/bin/sh\necho $$ > {started}\n")
    ends.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(ends))
    with pytest.raises(GenerationError, match="the process that tries structures out"):
        made.check(Structure("regex", "a"))
    assert not Path(f"/proc/{started.read_text().strip()}").exists()


def test_a_process_that_cannot_start_is_a_clean_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    made = Structures(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    with monkeypatch.context() as without:
        without.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(GenerationError, match="the process that tries structures out"):
            made.check(Structure("regex", "a"))
    made.check(Structure("regex", "a"))


def test_a_schema_is_compiled_once(structures: Structures) -> None:
    large = schema({"enum": [json.dumps(i) for i in range(5000)]})
    structures.check(large)
    begun = trial_s(structures)
    for _ in range(50):
        structures.start(large)
    assert trial_s(structures) == begun
