"""Answers of a given form, on each engine that is installed here: valid, steered, and exact."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from threading import Event, current_thread
from typing import Any

import jsonschema
import llguidance
import pytest
import torch
from llguidance.hf import from_tokenizer
from transformers import PreTrainedModel

from juice.engine import structure as forms
from juice.engine.answer import Completion, Update
from juice.engine.contract import Engine
from juice.engine.own.thread import BatchingEngine
from juice.engine.request import Request
from juice.engine.sampling_options import SamplingOptions
from juice.engine.steer import Steering
from juice.engine.structure import Structure
from juice.errors import CancelledError, EngineStoppedError, GenerationError, RequestError
from tests.support import oracle
from tests.support.mixed import steering
from tests.support.running import Collector, loaded
from tests.support.schemas import judge, random_schema

PROMPT = tuple(range(3, 20))
HEADS = {(1, 2): 2.0, (3, 0): -2.0}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMAR = 'start: "yes" | "no" [" because " /[a-z]{1,5}/]'


def asked(structure: Structure, **options: object) -> Request:
    return Request.of(prompt_ids=PROMPT, max_tokens=100, structure=structure, **options)


def sampled(seed: int) -> SamplingOptions:
    return SamplingOptions(temperature=1.0, seed=seed)


def plain(steered: bool) -> dict[str, Steering]:
    return {"steering": steering(HEADS)} if steered else {}


@pytest.mark.parametrize("steered", [False, True])
def test_each_token_is_the_likeliest_that_may_come_and_its_score_is_the_models(
    engine: Engine, network: PreTrainedModel, steered: bool
) -> None:
    """The oracle: two uncached runs of transformers' model, and llguidance's matcher by itself."""
    completion = engine.generate(
        [asked(Structure.json_schema(PERSON), top_logprobs=3, **plain(steered))]
    )
    description = engine.description
    vocabulary = from_tokenizer(
        description.tokenizer,
        n_vocab=description.vocabulary_size,
        eos_token=sorted(description.stop_token_ids),
    )
    separators = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(PERSON), separators)
    matcher = llguidance.LLMatcher(vocabulary, grammar)
    ids = list(PROMPT)
    n_ruled_out = 0
    for token in completion[0].tokens:
        logits = oracle.steered_logits(network, ids, HEADS if steered else {})[-1]
        scores = logits.log_softmax(-1)
        assert token.logprob == pytest.approx(float(scores[token.id]), abs=1e-3)
        assert [i for i, _ in token.top] == scores.topk(3).indices.tolist()
        ranked = scores.argsort(descending=True).tolist()
        likeliest = next(i for i in ranked if matcher.deep_copy().consume_token(i))
        assert float(scores[likeliest]) - float(scores[token.id]) < 1e-4
        n_ruled_out += likeliest != ranked[0]
        assert matcher.consume_token(token.id)
        ids.append(token.id)
    assert n_ruled_out, "the structure changed something"
    assert completion[0].finish_reason == "stop"
    jsonschema.validate(json.loads(completion[0].text), PERSON)


def test_requests_with_and_without_a_structure_share_batches(engine: Engine) -> None:
    """Kills: a mask in another row, a matcher that is behind after rows moved."""
    structures = [
        Structure.json_schema(PERSON),
        None,
        Structure.choice(["red", "green", "blue"]),
        Structure("regex", r"[a-f]{3}\d"),
        None,
        Structure("grammar", GRAMMAR),
        Structure.json_object(),
    ]
    requests = [
        Request.of(
            prompt_ids=PROMPT[: 3 + i % 9],
            max_tokens=100 if i % 5 else 4,
            structure=structures[i % len(structures)],
            **dict(sampled(i)),
            **plain(i % 3 == 0),
        )
        for i in range(28)
    ]
    together = engine.generate(requests)
    for i, (request, got) in enumerate(zip(requests, together, strict=True)):
        assert got.token_ids == engine.generate([request])[0].token_ids, i
        if got.finish_reason == "stop" and request.options.structure is not None:
            check(request.options.structure, got)


def check(structure: Structure, got: Completion) -> None:
    match structure.form:
        case "json_schema":
            jsonschema.validate(json.loads(got.text), json.loads(structure.text))
        case "choice":
            assert got.text in json.loads(structure.text)
        case "regex":
            assert re.fullmatch(structure.text, got.text)
        case "grammar":
            assert re.fullmatch(r"yes|no( because [a-z]{1,5})?", got.text)


@pytest.mark.parametrize(
    "n", [40, pytest.param(1000, marks=pytest.mark.torture)], ids="{:,}".format
)
def test_answers_are_valid_under_random_schemas(engine: Engine, n: int) -> None:
    rng = Random(n)
    schemas = [random_schema(rng) for _ in range(n)]
    answers = engine.generate(
        [
            asked(Structure.json_schema(schema), **dict(sampled(i)), **plain(i % 2 == 0))
            for i, schema in enumerate(schemas)
        ]
    )
    n_whole = 0
    for schema, answer in zip(schemas, answers, strict=True):
        if answer.finish_reason == "stop":
            judge(schema).validate(json.loads(answer.text))
            n_whole += 1
    assert n_whole == n


def test_an_answer_that_is_cut_says_so(engine: Engine) -> None:
    request = Request.of(prompt_ids=PROMPT, max_tokens=3, structure=Structure.json_schema(PERSON))
    assert engine.generate([request])[0].finish_reason == "length"


@pytest.mark.parametrize(
    "structure",
    [
        Structure("regex", "(("),
        Structure.json_schema({"type": "wrong"}),
        Structure.json_schema({"type": "string", "not": {}}),
        Structure("json_schema", "{"),
        Structure("json_schema", "3"),
        Structure.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        Structure.choice([]),
        Structure("grammar", "start: missing"),
        Structure("grammar", ""),
    ],
    ids=lambda given: f"{given.form}: {given.text[:20]}",
)
def test_a_structure_that_cannot_be_followed_is_refused(
    engine: Engine, structure: Structure
) -> None:
    with pytest.raises(RequestError, match=structure.form) as caught:
        engine.generate([asked(structure)])
    assert caught.value.param == "structure"


def test_what_contradicts_a_structure_is_refused() -> None:
    for option in (
        {"ignore_eos": True},
        {"min_tokens": 3},
        {"stop": ("a",)},
        {"stop_token_ids": (3,)},
    ):
        with pytest.raises(RequestError, match="ends where the form does"):
            asked(Structure.json_object(), **option)


# Some tokens are more than what is tried out before; what follows has too many alternatives.
FAILS_LATE = "start: /[xy]{50}/ (" + " | ".join(f'"{i}"' for i in range(2100)) + ")"


def test_an_answer_whose_structure_fails_late_fails_alone(engine: Engine) -> None:
    """Kills: an error of one row that ends the batch, or vLLM's whole process."""
    good = asked(Structure.json_schema(PERSON))
    alone = engine.generate([good])[0].text
    collector = Collector()
    engine.submit([good, asked(Structure("grammar", FAILS_LATE)), good, asked(None)], collector)
    collector.wait(4)
    error = collector.error(1)
    assert isinstance(error, RequestError)
    assert error.param == "structure"
    assert "make it simpler" in str(error)
    assert [collector.completion(i).text for i in (0, 2)] == [alone] * 2
    assert collector.completion(3)
    assert engine.generate([good])[0].text == alone


def test_ten_thousand_texts_are_a_choice(engine: Engine) -> None:
    texts = [f'option {i} \u00fc"\\ {i * 7919 % 10007}' for i in range(10_000)]
    for seed in range(3):
        request = asked(Structure.choice(texts), **dict(sampled(seed)))
        assert engine.generate([request])[0].text in texts


def test_a_bias_cannot_break_the_form(engine: Engine) -> None:
    forced = SamplingOptions(logit_bias={7: 100.0})
    got = engine.generate([asked(Structure.choice(["red", "green"]), **dict(forced))])[0]
    assert got.text in ("red", "green")
    assert torch.tensor(got.logprobs).isfinite().all()


def test_objects_have_the_properties_that_are_named_unless_the_schema_says_otherwise(
    engine: Engine,
) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]}
    closed = Structure.json_schema({**schema, "$defs": {"x": inner}})
    texts = [engine.generate([asked(closed, **dict(sampled(seed)))])[0].text for seed in range(8)]
    assert {*texts} <= {'{"a": {"b": true}}', '{"a": {"b": false}}'}
    together = Structure.json_schema(
        {"allOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, inner]}
    )
    got = engine.generate([asked(together)])[0].text
    assert len(got) > 20, "other properties may follow"


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Keep one compiled structure; return what is called, in its thread, before one is compiled."""
    called, compiled = list[Callable[[], None]](), forms.compiled

    def watched(*arguments: Any) -> Any:
        for each in called:
            each()
        return compiled(*arguments)

    monkeypatch.setattr(forms, "compiled", watched)
    monkeypatch.setattr(forms, "N_COMPILED", 1)
    return called


def let_go(engine: BatchingEngine) -> Request:
    """Return a checked request whose structure is no longer kept."""
    request = asked(Structure.choice(["red", "green"]))
    engine.check(request)
    engine.check(asked(Structure.choice(["yes", "no"])))
    return request


def test_a_structure_that_was_let_go_is_not_compiled_in_the_engines_thread(
    compiling: list[Callable[[], None]],
) -> None:
    """Kills: a request that starts as another ends, and holds up all others for a second."""
    engine, collector, threads = loaded().engine, Collector(), set[str]()
    request = let_go(engine)
    compiling.append(lambda: threads.add(current_thread().name))

    def sink(update: Update) -> None:
        if update.is_last:
            engine.begin([request], collector)

    engine.submit([Request.of(prompt_ids=PROMPT, max_tokens=2)], sink)
    collector.wait(1)
    assert collector.completion().text in {"red", "green"}
    assert len(threads) == 1
    assert engine.thread.name not in threads


def test_a_structure_that_cannot_be_compiled_again_ends_its_request(
    compiling: list[Callable[[], None]],
) -> None:
    engine, collector = loaded().engine, Collector()
    request = let_go(engine)

    def fail() -> None:
        raise MemoryError("there is none")

    compiling.append(fail)
    engine.begin([request], collector)
    collector.wait(1)
    assert isinstance(collector.error(), GenerationError)
    assert engine.status.n_running == engine.status.n_waiting == 0


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_request_ends_while_its_structure_is_compiled_again(
    compiling: list[Callable[[], None]], is_closed: bool
) -> None:
    engine, collector, go_on = loaded().engine, Collector(), Event()
    request = let_go(engine)
    compiling.append(go_on.wait)
    (running,) = engine.begin([request], collector)
    if is_closed:
        engine.close()
    else:
        running.cancel()
    go_on.set()
    collector.wait(1)
    assert isinstance(collector.error(), EngineStoppedError if is_closed else CancelledError)
