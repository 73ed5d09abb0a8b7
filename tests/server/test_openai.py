"""OpenAI's routes through OpenAI's own client: completions, chat, streams, errors and steering."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

import juice
from tests.support import oracle, tiny
from tests.support.on_vllm import wide
from tests.support.serving import CONFLICT, events, serving

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}{{"
    " raise_exception('unknown role ' + message['role']) }}{% endif %}<|endoftext|>{{"
    " message['role'] }}: {{ message['content'] }}\n{% endfor %}{% if add_generation_prompt"
    " %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tiny.save(tmp_path_factory.mktemp("chat"), wide("Llama").build(), tokenizer)


@pytest.fixture(scope="module")
def chat_client(chat_folder: Path) -> Iterator[openai.OpenAI]:
    with (
        serving("--model", str(chat_folder), "--served-model-name", "tiny-chat") as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as made,
    ):
        yield made


def test_a_completion_is_steered_by_the_extra_field_or_by_the_models_name(
    api: openai.OpenAI,
) -> None:
    options = {"prompt": CONFLICT, "max_tokens": 4, "temperature": 0}
    plain = api.completions.create(model="mini", **options)
    assert plain.model_extra["steering"]["applied"] is False
    by_field = api.completions.create(model="mini", extra_body={"steer": "parametric"}, **options)
    by_name = api.completions.create(model="mini:parametric", **options)
    assert by_field.choices[0].text == by_name.choices[0].text
    assert by_name.choices[0].text.startswith(" Lima")
    assert by_name.model_extra["steering"]["head_set"] == "parametric"
    half = api.completions.create(
        model="mini:parametric",
        extra_body={"steer": {"target": "parametric", "strength": 0.5}},
        **options,
    )
    assert half.model_extra["steering"]["strength"] == 0.5
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model="mini:parametric", extra_body={"steer": "context"}, **options)
    assert caught.value.param == "steer"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steer": "context"},
        {"steer": {"target": "parametric", "strength": 0.7}},
        {"temperature": 1.1, "seed": 5, "n": 2},
        {"stop": ["."], "temperature": 1.4, "seed": 2},
        {"logit_bias": {"14": 50}},
        {"presence_penalty": 1.5, "frequency_penalty": 1, "ignore_eos": True},
    ],
)
def test_completions_equal_the_servers_own_generate(url: str, options: dict) -> None:
    body = {"prompt": CONFLICT, "max_tokens": 12, "temperature": 0, **options}
    native = httpx.post(f"{url}/generate", json=body).json()
    theirs = httpx.post(f"{url}/v1/completions", json=body).json()
    expected = [choice["text"] for choice in native.get("choices", [native])]
    assert [choice["text"] for choice in theirs["choices"]] == expected
    assert theirs["usage"] == native["usage"]
    assert theirs["steering"] == native["steering"]


def used(url: str, **body: object) -> dict[str, Any]:
    answer = httpx.post(url, json={"max_tokens": 2, "temperature": 0, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["usage"])


def test_tokens_that_the_prefix_cache_had_are_counted(url: str, chat_client: openai.OpenAI) -> None:
    """Kills: a client that bills or tunes by numbers that are always 0."""
    has_cache = os.environ.get("JUICE_ENGINE") == "vllm"
    prompt = " ".join(f"{CONFLICT} {i}" for i in range(8))
    first, again, steered = (
        used(f"{url}/generate", prompt=prompt, **more) for more in ({}, {}, {"steer": "context"})
    )
    n, n_cached = again["prompt_tokens"], again["prompt_tokens_details"]["cached_tokens"]
    assert (
        first["prompt_tokens_details"] == steered["prompt_tokens_details"] == {"cached_tokens": 0}
    )
    assert (n / 2 < n_cached < n) if has_cache else n_cached == 0
    of_chats = str(chat_client.base_url)
    chat = {"model": "tiny-chat", "messages": [{"role": "user", "content": 4 * "red green blue "}]}
    message = [used(f"{of_chats}messages", **chat) for _ in range(2)][-1]
    n_read, text = message["cache_read_input_tokens"], chat["messages"][0]["content"]
    response = used(f"{of_chats}responses", model="tiny-chat", input=text, max_output_tokens=2)
    assert (n_read > 0) == has_cache
    assert message["input_tokens"] + n_read == response["input_tokens"]
    assert response["input_tokens_details"]["cached_tokens"] == n_read


def test_a_streamed_completion_equals_the_whole_one(api: openai.OpenAI) -> None:
    options = {
        "model": "mini",
        "prompt": [CONFLICT, "Tokyo"],
        "max_tokens": 12,
        "temperature": 1.2,
        "seed": 3,
        "n": 2,
        "logprobs": 2,
    }
    whole = api.completions.create(**options)
    chunks = list(
        api.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    for choice in whole.choices:
        pieces = [
            chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index
        ]
        assert "".join(part.text for part in pieces) == choice.text
        assert pieces[-1].finish_reason == choice.finish_reason
        assert [
            token for part in pieces if part.logprobs for token in part.logprobs.tokens
        ] == choice.logprobs.tokens
        assert [
            offset for part in pieces if part.logprobs for offset in part.logprobs.text_offset
        ] == choice.logprobs.text_offset


def test_token_prompts_equal_the_text_they_spell(api: openai.OpenAI, url: str) -> None:
    ids = httpx.post(f"{url}/tokenize", json={"text": CONFLICT}).json()["tokens"]
    options = {"model": "mini", "max_tokens": 5, "temperature": 0}
    texts = [
        api.completions.create(prompt=prompt, **options).choices[0].text
        for prompt in (CONFLICT, ids, [ids], [CONFLICT])
    ]
    assert len(set(texts)) == 1


def test_echo_scores_the_prompt_as_the_naive_steered_run_does(api: openai.OpenAI) -> None:
    """The oracle runs the steered prompt naively and takes the probability of each token."""
    model = juice.load("mini")
    ids = list(model.tokenize(CONFLICT))
    for steer in ("none", "parametric"):
        coefficients = model.resolve(juice.Steer(target=steer)).coefficients
        heads = {
            (layer, h): float(b)
            for layer, row in coefficients.items()
            for h, b in enumerate(row.tolist())
            if b
        }
        expected = oracle.steered_logits(model.loaded.model, ids, heads).log_softmax(-1)
        answer = api.completions.create(
            model="mini",
            prompt=CONFLICT,
            echo=True,
            logprobs=2,
            max_tokens=3,
            temperature=0,
            extra_body={"steer": steer},
        )
        choice = answer.choices[0]
        scores = choice.logprobs.token_logprobs
        assert choice.text.startswith(CONFLICT)
        assert scores[0] is None
        places = zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
        assert [at for token, at in places if not choice.text[at:].startswith(token)] == [0]
        logprobs = [expected[i, token].item() for i, token in enumerate(ids[1:])]
        torch.testing.assert_close(
            torch.tensor(scores[1 : len(ids)]), torch.tensor(logprobs), rtol=0, atol=1e-4
        )
        assert len(scores) == len(ids) + answer.usage.completion_tokens
        only = api.completions.create(
            model="mini",
            prompt=CONFLICT,
            echo=True,
            logprobs=0,
            max_tokens=0,
            temperature=0,
            extra_body={"steer": steer},
        )
        assert only.choices[0].logprobs.token_logprobs == pytest.approx(
            scores[: len(ids)], abs=1e-5
        )
        assert only.usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "adds", "n_left_out"),
    [
        ("Peru", True, 1),
        ("<|begin|>Peru", True, 1),
        ("<|begin|>Peru", False, 0),
        ("Peru", False, 0),
    ],
)
def test_offsets_are_those_of_the_echoed_text(
    api: openai.OpenAI, prompt: str, adds: bool, n_left_out: int
) -> None:
    """Kills: the special token before the text was counted, which the echo leaves out."""
    choice = api.completions.create(
        model="mini",
        prompt=prompt,
        echo=True,
        logprobs=0,
        max_tokens=2,
        extra_body={"add_special_tokens": adds, "ignore_eos": True, "skip_special_tokens": False},
    ).choices[0]
    assert choice.text.startswith(prompt)
    tokens, offsets = choice.logprobs.tokens[n_left_out:], choice.logprobs.text_offset[n_left_out:]
    assert choice.text == "".join(tokens)
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert choice.logprobs.text_offset[:n_left_out] == [0] * n_left_out


def test_echo_repeats_the_prompt_of_each_choice(api: openai.OpenAI) -> None:
    answer = api.completions.create(
        model="mini", prompt=["Tokyo", "Paris"], echo=True, max_tokens=2, n=2, temperature=0
    )
    assert [choice.text[:5] for choice in answer.choices] == ["Tokyo", "Tokyo", "Paris", "Paris"]
    chunks = api.completions.create(
        model="mini", prompt="Tokyo", echo=True, max_tokens=2, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_openais_routes_have_openais_defaults(api: openai.OpenAI) -> None:
    answer = api.completions.create(
        model="mini", prompt="The", temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 16
    drawn = {
        api.completions.create(model="mini", prompt="The", max_tokens=12).choices[0].text
        for _ in range(6)
    }
    assert len(drawn) > 1, "the temperature is 1 by default"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("suffix", "end"),
        ("tools", [{"type": "function"}]),
        ("use_beam_search", True),
        ("Steer", "context"),
        ("ster", "context"),
        ("steering", "context"),
        ("extra_body", {"steer": "context"}),
        ("head_set", "context"),
        ("strength", 2.0),
    ],
)
def test_fields_that_would_change_the_meaning_are_refused_by_name(
    api: openai.OpenAI, field: str, value: object
) -> None:
    with pytest.raises(openai.BadRequestError, match=field) as caught:
        api.completions.create(model="mini", prompt="x", extra_body={field: value})
    assert caught.value.param == field
    assert caught.value.code == "unsupported_field"


def test_fields_that_change_nothing_are_accepted(api: openai.OpenAI) -> None:
    harmless = {
        "best_of": 1,
        "user": "me",
        "store": True,
        "metadata": {"a": 1},
        "response_format": {"type": "text"},
        "seed": None,
        "stop": None,
    }
    assert api.completions.create(
        model="mini", prompt="x", max_tokens=1, extra_body=harmless
    ).choices


@pytest.mark.parametrize(("options", "error", "param"), [
    ({"model": "gpt-9"}, openai.NotFoundError, "model"),
    ({"prompt": ""}, openai.BadRequestError, "prompt"),
    ({"prompt": []}, openai.BadRequestError, "prompt"),
    ({"prompt": [[]]}, openai.BadRequestError, "prompt"),
    ({"prompt": [5000]}, openai.BadRequestError, "prompt"),
    ({"prompt": [-1]}, openai.BadRequestError, "prompt.0.0"),
    ({"prompt": [True]}, openai.BadRequestError, "prompt.0.0"),
    ({"prompt": [2**40]}, openai.BadRequestError, "prompt.0.0"),
    ({"prompt": "word " * 2000}, openai.BadRequestError, "prompt"),
    ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
    ({"n": 129}, openai.BadRequestError, "n"),
    ({"logprobs": 21}, openai.BadRequestError, "logprobs"),
    ({"extra_body": {"steer": {"target": "context", "x": 1}}}, openai.BadRequestError, "steer.x"),
    ({"extra_body": {"steer": "truth"}}, openai.BadRequestError, "steer.target"),
])  # fmt: skip
def test_the_client_raises_its_own_errors_with_the_field(
    api: openai.OpenAI, options: dict, error: type[openai.APIStatusError], param: str
) -> None:
    for stream in (False, True):
        with pytest.raises(error) as caught:
            api.completions.create(**{"model": "mini", "prompt": "x", **options}, stream=stream)
        assert caught.value.param == param


def test_models_are_listed_and_retrieved(api: openai.OpenAI) -> None:
    names = [model.id for model in api.models.list()]
    assert names == ["mini", "mini:context", "mini:parametric"]
    assert api.models.retrieve("mini:context").id == "mini:context"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("gpt-9")


def test_a_chat_is_the_completion_of_its_template(chat_client: openai.OpenAI) -> None:
    """The template itself writes the start token: the tokenizer must not add a second one."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    prompt = "<|endoftext|>system: Be brief.\n<|endoftext|>user: Hi\nassistant:"
    options = {"model": "tiny-chat", "max_tokens": 20, "temperature": 0}
    chat = chat_client.chat.completions.create(
        messages=messages, logprobs=True, top_logprobs=3, **options
    )
    completion = chat_client.completions.create(prompt=prompt, **options)
    assert chat.choices[0].message.content == completion.choices[0].text
    assert chat.usage.total_tokens == completion.usage.total_tokens
    assert chat.usage.prompt_tokens == len(tiny.tiny_tokenizer()(prompt)["input_ids"])
    first = chat.choices[0].logprobs.content[0]
    assert first.logprob == first.top_logprobs[0].logprob
    assert len(first.top_logprobs) == 3


def test_a_streamed_chat_equals_the_whole_one(chat_client: openai.OpenAI) -> None:
    options = {
        "model": "tiny-chat",
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 1.5,
        "seed": 3,
        "n": 2,
        "max_completion_tokens": 25,
        "stop": ["e"],
    }
    whole = chat_client.chat.completions.create(**options)
    chunks = list(
        chat_client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        pieces = [
            chunk.choices[0]
            for chunk in chunks
            if chunk.choices and chunk.choices[0].index == choice.index
        ]
        assert pieces[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in pieces) == choice.message.content
        assert pieces[-1].finish_reason == choice.finish_reason


def test_a_chat_without_max_tokens_gets_what_the_context_leaves(chat_client: openai.OpenAI) -> None:
    answer = chat_client.chat.completions.create(
        model="tiny-chat",
        messages=[{"role": "user", "content": "Hi"}],
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.total_tokens == 128, "the model's context"


CHAT = {"messages": [{"role": "user", "content": "x"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}
TOOL = {"type": "function", "function": {"name": "f"}}
NO_SCHEMA = {"type": "json_schema"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({**CHAT, "tools": [TOOL]}, "tools"),
        ({**CHAT, "response_format": NO_SCHEMA}, "response_format"),
        ({**CHAT, "top_logprobs": 2}, None),
        ({**CHAT, "max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_wrong_chat_is_refused_with_the_field(
    chat_client: openai.OpenAI, body: dict, param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat_client.post(
            "/chat/completions", body={"model": "tiny-chat", **body}, cast_to=httpx.Response
        )
    if param is not None:
        assert str(caught.value.param).startswith(param)


def test_a_stream_over_the_wire_is_what_openai_documents(url: str) -> None:
    body = {
        "model": "mini",
        "prompt": CONFLICT,
        "max_tokens": 3,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        chunks = events(response)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-2]["choices"][0]["finish_reason"] in ("stop", "length")
    assert chunks[-2]["steering"]["applied"] is False


def test_every_answer_and_chunk_has_the_fingerprint_of_the_system(
    api: openai.OpenAI, client: httpx.Client
) -> None:
    fingerprint = client.get("/info").json()["system_fingerprint"]
    assert fingerprint.startswith("fp_")
    options = {"model": "mini", "max_tokens": 3}
    chat = {**options, "messages": [{"role": "user", "content": "Hello"}]}
    assert api.completions.create(prompt=CONFLICT, **options).system_fingerprint == fingerprint
    assert api.chat.completions.create(**chat).system_fingerprint == fingerprint
    for chunks in (
        api.completions.create(prompt=CONFLICT, stream=True, **options),
        api.chat.completions.create(stream=True, **chat),
    ):
        assert {chunk.system_fingerprint for chunk in chunks} == {fingerprint}


@pytest.mark.skipif(
    os.environ.get("JUICE_ENGINE") == "vllm", reason="vLLM has no deterministic mode on CPUs"
)
def test_a_deterministic_server_says_so_and_has_another_fingerprint(client: httpx.Client) -> None:
    with serving("--deterministic") as running:
        info = httpx.get(f"{running.url}/info").json()
        answer = httpx.post(
            f"{running.url}/generate",
            json={"prompt": CONFLICT, "steer": "parametric", "max_tokens": 4},
        ).json()
    assert info["engine"]["deterministic"] is True
    assert info["system_fingerprint"] != client.get("/info").json()["system_fingerprint"]
    assert answer["text"].startswith(" Lima")
