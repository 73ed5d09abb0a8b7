"""Chat templates: heads are found in the form in which they are used; any other form warns."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import models, processors
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import juice
from juice.cli.main import app
from juice.data.example import to_json_line
from juice.errors import OutputError, RequestError, UsageError
from juice.evaluation import run as evaluation
from juice.evaluation.methods import Treatment
from juice.evaluation.options import EvaluationOptions
from juice.evaluation.side_effects import plain_text_perplexity
from juice.evaluation.splits import Data
from juice.head_set import HeadSet, Identification
from juice.identification import IdentificationOptions
from juice.identification.probing import scored_prompt
from juice.identification.tuning import tune
from juice.steered_model import SteeredModel
from tests.support import naive_scores, tiny
from tests.support.conflicts import ALPHAS_MINUS, ALPHAS_PLUS, TOLERANCE, TYPES, examples
from tests.support.serving import events, serving

END = tiny.END
PLAIN = (
    "{% for m in messages %}"
    + END
    + "{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}"
    + END
    + "assistant:{% endif %}"
)
LINES = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}"
    + END
    + "{{ m['role'] }}\n\n{{ m['content'] | trim }}{% endfor %}{% if add_generation_prompt %}"
    + END
    + "assistant\n\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}"
    + END
    + "{{ m['content'] | trim }}{% endfor %}{% if add_generation_prompt %}"
    + END
    + "{% endif %}"
)
HM = "{% if m['role'] == 'assistant' %}Hm.{% endif %}"
THINKING = LINES.replace("{{ m['content']", HM + "{{ m['content']")
# Each template, what it renders a prompt to, and what is between that and the answer.
TURNS = {
    "plain": (PLAIN, END + "user: {}\n" + END + "assistant:", " "),
    "lines": (LINES, END + "user\n\n{}" + END + "assistant\n\n", ""),
    "marked": (MARKED, END + "{}" + END, ""),
    "thinking": (THINKING, END + "user\n\n{}" + END + "assistant\n\n", ""),
}
TARGETS = ("parametric", "context")


def tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Return the tiny tokenizer with two traits of chat models' tokenizers.

    It begins every text with a start token, and two line ends are one token.
    """
    made = tiny.tiny_tokenizer()
    state = json.loads(made.backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    made.backend_tokenizer.model = models.BPE(
        vocab={**state["vocab"], "ĊĊ": tiny.VOCAB_SIZE - 1}, merges=[*merges, ("Ċ", "Ċ")]
    )
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, 0)]
    )
    made.chat_template = template
    return made


def loaded(template: str | None = None, head_sets: Path | None = None) -> SteeredModel:
    return juice.load(tiny.tiny_model("llama"), tokenizer=tokenizer(template), head_sets=head_sets)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def made_set(
    model: SteeredModel, name: str, found_through: str | None, target: str = "context"
) -> HeadSet:
    """Return a set that was, as it records, found through a template or on plain prompts."""
    provenance = Identification(
        alphas_plus=(1.0,),
        alphas_minus=(-1.0,),
        n_examples=1,
        seed=0,
        examples_sha256="",
        conflict_types=TYPES,
        top_k=1,
        versions={},
        chat_template_sha256=None if found_through is None else sha256(found_through),
    )
    by_hand = model.make_head_set(
        name=name, target=target, plus=[(1, 2)], minus=[(2, 0)], beta_plus=2.0, beta_minus=-1.0
    )
    return by_hand.model_copy(update={"identification": provenance})


def test_the_tokenizer_of_these_tests_has_the_traps() -> None:
    own = tokenizer()
    two, followed = own("\n\n")["input_ids"], own("\n\nLima")["input_ids"]
    assert two == [0, tiny.VOCAB_SIZE - 1]
    assert followed[:2] != two
    assert own(END)["input_ids"] == [0, 0], "a rendered prompt would begin with two start tokens"


@pytest.mark.parametrize("name", TURNS)
def test_scores_through_a_template_equal_a_forward_for_every_head_and_alpha_on_its_tokens(
    name: str,
) -> None:
    """Kills: a second start token, a needless space, a merge across the end of the turn."""
    template, turn, glue = TURNS[name]
    network, own = tiny.tiny_model("llama"), tokenizer()
    expected = {
        (target, sign): torch.stack(
            [
                naive_scores.mean_changes(
                    network,
                    [
                        own(turn.format(e.prompts[t]), add_special_tokens=False)["input_ids"]
                        for e in examples()
                    ],
                    [
                        own(glue + e.answer(target), add_special_tokens=False)["input_ids"][0]
                        for e in examples()
                    ],
                    alphas,
                )
                for t in TYPES
                if t != "clean" or target == "parametric"
            ]
        )
        for target in TARGETS
        for sign, alphas in (("plus", ALPHAS_PLUS), ("minus", ALPHAS_MINUS))
    }
    model = juice.load(network, tokenizer=tokenizer(template))
    for target in TARGETS:
        found = juice.identify(
            model,
            examples(),
            target=target,
            alphas_plus=ALPHAS_PLUS,
            alphas_minus=ALPHAS_MINUS,
            chat_template="default",
        )
        for sign in ("plus", "minus"):
            table = expected[target, sign]
            torch.testing.assert_close(getattr(found.scores, sign), table, rtol=0, atol=TOLERANCE)
            assert table.abs().max() > 10 * TOLERANCE
        assert found.chat_template_sha256 == sha256(template)


def test_an_answer_begins_after_the_tokens_of_the_rendered_prompt() -> None:
    """Even where the tokens of prompt and answer as one text would be others."""
    own = tokenizer()
    for template, turn, glue in TURNS.values():
        prompts = loaded(template).with_chat_template().prompts
        ids, start = prompts.joined("Capital of Peru:", "Lima")
        assert ids[:start] == prompts.tokens("Capital of Peru:")
        assert own.decode(ids[:start]) == turn.format("Capital of Peru:")
        assert list(ids[start:]) == own(f"{glue}Lima", add_special_tokens=False)["input_ids"]
        assert prompts.first_token("Capital of Peru:", "Lima Callao") == ids[start]


def test_plain_prompts_keep_their_own_start_token_and_a_space_before_the_answer() -> None:
    model = loaded(PLAIN)
    scored = scored_prompt(model, examples()[0], "clean")
    assert scored.ids == tuple(tokenizer()(examples()[0].prompts["clean"])["input_ids"])
    assert scored.ids[0] == 0
    assert (
        scored.answer_tokens["parametric"]
        == tokenizer()(" Paris", add_special_tokens=False)["input_ids"][0]
    )


def test_a_file_replaces_the_tokenizers_template_and_is_hashed_byte_for_byte(
    tmp_path: Path,
) -> None:
    file = tmp_path / "chat.jinja"
    file.write_bytes((LINES + "\r\n").encode())
    model = loaded(PLAIN)
    options = {"target": "context", "alphas_plus": ALPHAS_PLUS, "alphas_minus": ALPHAS_MINUS}
    by_file = juice.identify(model, examples(), chat_template=file, **options)
    assert by_file.chat_template_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    plain = juice.identify(model, examples(), **options)
    assert plain.chat_template_sha256 is None
    assert by_file.scores_sha256 != plain.scores_sha256
    by_file.save(tmp_path / "set")
    assert HeadSet.load(tmp_path / "set").chat_template_sha256 == by_file.chat_template_sha256


def test_the_error_without_a_template_or_with_a_broken_one_explains_what_to_do(
    tmp_path: Path,
) -> None:
    model = loaded()
    with pytest.raises(UsageError, match="has no chat template; give a Jinja file"):
        juice.identify(model, examples(), target="context", chat_template="default")
    with pytest.raises(UsageError, match="cannot read the chat template"):
        model.with_chat_template(tmp_path / "nothing.jinja")
    with pytest.raises(RequestError, match="the chat template refuses these messages"):
        model.with_chat_template("{% for")
    with pytest.raises(RequestError, match="no user here"):
        model.with_chat_template("{{ raise_exception('no user here') }}")
    with pytest.raises(UsageError, match="leaves out the user's message"):
        model.with_chat_template("{{ 'hello' }}")


def test_a_path_given_as_a_string_is_a_file_not_a_template_of_one_word(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(LINES)
    by_text, by_path = (loaded(PLAIN).with_chat_template(given) for given in (str(file), file))
    assert by_text.prompts.chat_template == by_path.prompts.chat_template == LINES
    with pytest.raises(UsageError, match="cannot read the chat template"):
        loaded().with_chat_template("no such file")


def test_betas_are_tuned_in_the_form_in_which_the_heads_were_found() -> None:
    model = loaded(PLAIN)
    chat_set = made_set(model, "t", PLAIN)
    pool = [
        e.model_copy(update={"prompts": {"substitution": e.prompts["substitution"]}})
        for e in examples()
    ]
    with warnings.catch_warnings(category=UserWarning, action="ignore"):  # about so few examples
        tuned = tune(model, chat_set, pool)
        inside = tune(model.with_chat_template(), chat_set, pool)
        plain = tune(model, made_set(model, "t", None), pool)
    assert tuned.metrics == inside.metrics
    assert tuned.beta == inside.beta
    asked = model.with_chat_template().request(pool[0].prompts["substitution"]).prompt_ids
    assert asked != model.request(pool[0].prompts["substitution"]).prompt_ids
    assert plain.chat_template_sha256 is None
    assert model.in_form_of(chat_set).prompts.sha256 == sha256(PLAIN)
    assert model.in_form_of(model.make_head_set(name="h", target="context", plus=[(0, 0)])) is model
    with pytest.raises(
        UsageError, match=r"the tokenizer's own is [0-9a-f]{12}….*--chat-template FILE"
    ):
        tune(model, made_set(model, "t", LINES), pool)
    with pytest.raises(UsageError, match="the tokenizer's own is none"):
        tune(loaded(), chat_set, pool)
    with pytest.raises(UsageError, match="leave out --chat-template"):
        tune(model.with_chat_template(), made_set(model, "t", None), pool)
    with pytest.raises(UsageError, match="the one given is"):
        tune(model.with_chat_template(LINES), chat_set, pool)


def test_an_evaluation_scores_plain_text_without_a_template_and_keeps_forms_apart(
    tmp_path: Path,
) -> None:
    model, chat_set, steer = (
        loaded(PLAIN),
        made_set(loaded(PLAIN), "context", PLAIN),
        juice.Steer(target="context"),
    )
    chat = model.with_chat_template()
    measured = [
        plain_text_perplexity(
            own,
            ["Lima lies by the sea."],
            {
                "all": Treatment(
                    target="context", steering=own.resolve(replace(steer, head_set=chat_set))
                )
            },
        )
        for own in (model, chat)
    ]
    assert measured[0] == measured[1]
    options = EvaluationOptions(
        targets=("context",),
        methods=("original",),
        n_large=0,
        identification=IdentificationOptions(n_examples=1),
    )
    chat_set.save(tmp_path / "sets" / "m" / "context")
    network = tiny.tiny_model("llama")
    network.config.max_position_embeddings = 512  # instructions are long in bytes
    served = juice.load(network, tokenizer=tokenizer(PLAIN), head_sets=tmp_path / "sets")
    for own, warned in ((served, True), (served.with_chat_template(), False)):
        out = tmp_path / str(warned)
        with warnings.catch_warnings(
            category=UserWarning, action="ignore"
        ):  # about so few examples
            store = evaluation.run(own, Data(examples()), options, out)
        assert any("did not go through one" in note for note in store.results["notes"]) is warned
        assert store.results["identity"]["chat_template_sha256"] == (
            None if warned else sha256(PLAIN)
        )
    with pytest.raises(OutputError, match="chat_template_sha256"):
        evaluation.run(served, Data(examples()), options, out)


def test_a_request_in_another_form_than_the_sets_carries_a_warning() -> None:
    model = loaded(PLAIN)
    raw, chat = made_set(model, "raw", None), made_set(model, "chat", PLAIN)
    forms = {
        "plain": model,
        "chat": model.with_chat_template(),
        "other": model.with_chat_template(LINES),
    }

    def warned(form: str, head_set: HeadSet, **steer: object) -> tuple[str, ...]:
        spec = juice.Steer(target="context", **steer)
        return (
            forms[form]
            .generate("Hi", steer=spec, head_set=head_set, max_tokens=1)[0]
            .steering.warnings
        )

    assert warned("plain", raw) == warned("chat", chat) == ()
    assert (
        "'raw' was found on plain prompts, but this prompt went through a chat template"
        in warned("chat", raw)[0]
    )
    assert "'chat' was found through the chat template" in warned("plain", chat)[0]
    assert "did not go through one" in warned("plain", chat)[0]
    assert f"went through {sha256(LINES)[:12]}" in warned("other", chat)[0]
    assert warned("chat", raw, strength=0) == (), "nothing is applied"
    by_hand = raw.model_copy(update={"identification": None})
    assert warned("chat", by_hand) == warned("plain", by_hand) == (), (
        "the form in which these heads were found is unknown"
    )
    assert model.with_chat_template().generate("Hi", max_tokens=1)[0].steering.warnings == ()


def test_a_set_of_another_template_is_warned_of_when_the_sets_are_scanned(tmp_path: Path) -> None:
    made_set(loaded(), "context", PLAIN).save(tmp_path / "m" / "context")
    assert loaded(PLAIN, tmp_path).head_sets.by_name, "the same template needs no warning"
    for template, own in ((LINES, sha256(LINES)[:12]), (None, "none")):
        with pytest.warns(
            UserWarning, match=f"through the chat template {sha256(PLAIN)[:12]}….* is {own}"
        ):
            assert loaded(template, tmp_path).head_sets.by_name
    assert loaded(LINES, tmp_path).with_chat_template(PLAIN).head_sets.by_name


def test_the_command_line_finds_tunes_shows_and_uses_a_set_through_a_template(
    tmp_path: Path,
) -> None:
    tiny.save(tmp_path / "tiny", tiny.tiny_model("llama"), tokenizer(PLAIN))
    pool = tmp_path / "pool.jsonl"
    pool.write_text("".join(map(to_json_line, examples())))
    common = ("--model", str(tmp_path / "tiny"))

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(
            app, [str(argument) for argument in arguments], catch_exceptions=False
        )
        assert done.exit_code == 0, done.stderr
        return done.stdout

    sets, folder = tmp_path / "sets", tmp_path / "sets" / "tiny" / "context"
    run(
        "identify",
        *common,
        "--examples",
        str(pool),
        "--target",
        "context",
        "--no-tune",
        "--chat-template",
        "default",
        "--out",
        str(sets),
    )
    assert sha256(PLAIN) in run("inspect", str(folder))
    asked = (
        "--head-sets",
        str(sets),
        "--steer",
        "context",
        "--beta-plus",
        "2",
        "--beta-minus",
        "-2",
        "--max-tokens",
        "3",
        "--json",
    )
    through = json.loads(run("generate", "Hi", *common, *asked, "--chat-template", "default"))
    assert through["steering"]["applied"] is True
    assert through["steering"]["warnings"] == []
    assert through["n_prompt_tokens"] == len(
        tokenizer()(TURNS["plain"][1].format("Hi"), add_special_tokens=False)["input_ids"]
    )
    assert (
        "did not go through one"
        in json.loads(run("generate", "Hi", *common, *asked))["steering"]["warnings"][0]
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Serve a chat model with its template from a file and head sets found in every form."""
    place = tmp_path_factory.mktemp("chat") / "tiny"
    folder = tiny.save(place, tiny.tiny_model("llama"), tokenizer(LINES))
    (folder / "plain.jinja").write_text(PLAIN)
    model = juice.load(folder)
    for name, found_through in (("raw", None), ("chat", PLAIN), ("other", LINES)):
        made_set(model, name, found_through).save(folder / "sets" / "m" / name)
    arguments = (
        "--model",
        str(folder),
        "--head-sets",
        str(folder / "sets"),
        "--chat-template",
        str(folder / "plain.jinja"),
    )
    with (
        serving(*arguments, "--served-model-name", "tiny") as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        client.server_errors = running.errors
        yield client


WARNINGS = {
    ("/generate", "raw"): None,
    ("/v1/completions", "raw"): None,
    ("/v1/chat/completions", "raw"): "went through a chat template",
    ("/generate", "chat"): "did not go through one",
    ("/v1/completions", "chat"): "did not go through one",
    ("/v1/chat/completions", "chat"): None,
    ("/v1/chat/completions", "other"): f"went through {sha256(PLAIN)[:12]}",
}


@pytest.mark.parametrize(("route", "name"), WARNINGS)
def test_every_answer_reports_whether_its_set_was_found_in_another_form(
    server: httpx.Client, route: str, name: str
) -> None:
    asked = (
        {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in route else {"prompt": "Hi"}
    )
    body = {
        **asked,
        "steer": {"target": "context", "head_set": name},
        "max_tokens": 2,
        "temperature": 0,
    }
    plain = server.post(route, json={**asked, "max_tokens": 2}).json()["steering"]
    assert (plain["applied"], plain["warnings"]) == (False, [])
    steering = server.post(route, json=body).json()["steering"]
    assert steering["applied"] is True
    expected = WARNINGS[route, name]
    assert len(steering["warnings"]) == (expected is not None)
    assert (expected or "") in "".join(steering["warnings"])
    with server.stream("POST", route, json={**body, "stream": True}) as response:
        assert (
            next(event["steering"] for event in reversed(events(response)) if "steering" in event)
            == steering
        )


def test_a_chat_over_http_is_steered_as_in_the_library_through_the_same_template(
    server: httpx.Client,
) -> None:
    model = loaded(PLAIN)
    chat = model.with_chat_template()
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0}
    texts = {}
    for steer in ({"target": "context", "head_set": "chat"}, "none"):
        answer = server.post("/v1/chat/completions", json={**body, "steer": steer}).json()
        asked = (
            {}
            if steer == "none"
            else {"steer": "context", "head_set": made_set(model, "chat", PLAIN)}
        )
        own = chat.generate("Hi", max_tokens=12, **asked)[0]
        assert answer["choices"][0]["message"]["content"] == own.text
        assert answer["usage"]["prompt_tokens"] == own.n_prompt_tokens
        texts[str(steer)] = own.text
    assert len(set(texts.values())) == 2


def test_the_server_shows_the_hashes_and_warns_at_startup_of_what_does_not_match(
    server: httpx.Client,
) -> None:
    listed = {
        own["name"]: own["chat_template_sha256"]
        for own in server.get("/v1/head_sets").json()["data"]
    }
    assert listed == {"raw": None, "chat": sha256(PLAIN), "other": sha256(LINES)}
    about = server.get("/info").json()["model"]
    assert (about["has_chat_template"], about["chat_template_sha256"]) == (True, sha256(PLAIN))
    warned = [
        line
        for line in server.server_errors().splitlines()
        if "warning" in line and "chat template" in line
    ]
    assert len(warned) == 1, "the set of the served template needs no warning"
    assert "'other'" in warned[0]
