"""Answers that call functions, read as they come: each form, cut anywhere, right or wrong."""

from __future__ import annotations

import json

import pytest

from juice_server.tool_parser import Call, CallReader, Part, Thought, Words
from juice_server.tools import FORMATS, Format, Function, Offer, format_of
from tests.support import tiny

WEATHER = Function(
    "weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
)
OFFER = Offer((WEATHER, Function("now")))
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lima"}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nSão\nPaulo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
LLAMA = '{"name": "weather", "parameters": {"city": "Lima"}}'
CALLED = ("weather", {"city": "Lima"})
# The form, the answer, and what it holds.
ANSWERS: list[tuple[str, str, list[object]]] = [
    ("hermes", "It is <b>7</b> o'clock. ", ["It is <b>7</b> o'clock. "]),
    ("hermes", f"I'll look.\n{HERMES}", ["I'll look.", CALLED]),
    ("hermes", f"{HERMES}\n{HERMES}\n", [CALLED, CALLED]),
    ("hermes", f"{HERMES} and then  more \n", [CALLED, "and then  more"]),
    ("hermes", "<tool_call>now</tool_call>!", ["<tool_call>now</tool_call>!"]),
    ("hermes", HERMES.replace("weather", "other"), [HERMES.replace("weather", "other")]),
    ("hermes", HERMES[:-20], [HERMES[:-20]]),
    ("hermes", "a <tool", ["a <tool"]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', [("now", {})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": 3}</tool_call>', None),
    ("qwen3_coder", f"So:\n{CODER}", ["So:", ("weather", {"city": "São\nPaulo", "days": 3})]),
    ("qwen3_coder", CODER[:60], [CODER[:60]]),
    ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA}", [CALLED, CALLED]),
    ("llama3", LLAMA, [CALLED]),
    ("llama3", f"See {LLAMA}", [f"See {LLAMA}"]),
    ("llama3", '{"answer": 42}', ['{"answer": 42}']),
    ("mistral", f"So[TOOL_CALLS] [{LLAMA}, {LLAMA}]", ["So", CALLED, CALLED]),
    ("mistral_args", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}", [("now", {})] * 2),
    ("mistral_args", '[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{"city": "Lima"}', [CALLED]),
    ("json", f"[{LLAMA}, {LLAMA}]", [CALLED, CALLED]),
    ("json", f"[{LLAMA}, {LLAMA[:18]}", [CALLED]),
    ("hermes", f"{HERMES}\n{HERMES[:20]}", [CALLED]),
    ("json", f"[{LLAMA.replace('weather', 'x')}]", [f"[{LLAMA.replace('weather', 'x')}]"]),
]


def read(form: Format, answer: str, *, step: int, offer: Offer = OFFER) -> list[Part]:
    reader = CallReader(form, offer, "")
    parts: list[Part] = []
    for start in range(0, len(answer), step):
        parts += reader.feed(answer[start : start + step])
    return parts + reader.finish()


def held(parts: list[Part]) -> list[object]:
    """Return texts, joined, and calls as their name and arguments."""
    made: list[object] = []
    for part in parts:
        if isinstance(part, Call):
            made.append((part.name, json.loads(part.arguments)))
        elif made and isinstance(made[-1], str):
            made[-1] += part.text
        else:
            made.append(part.text)
    return made


# Arguments that Python reads as JSON, or cannot read, and that nobody can send.
UNSENDABLE = [
    '{"city": "\\ud800"}',
    '{"\\udc00": 1}',
    '{"days": NaN}',
    '{"days": -Infinity}',
    '{"days": 1e999}',
    f'{{"days": {"9" * 5000}}}',
    f'{{"city": {"[" * 300}{"]" * 300}}}',
    f'{{"city": {"[" * 3000}{"]" * 3000}}}',
]


@pytest.mark.parametrize("arguments", UNSENDABLE, ids=[each[:16] for each in UNSENDABLE])
@pytest.mark.parametrize("name", ["hermes", "llama3", "json", "mistral_args"])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_call_that_cannot_be_sent_is_text(name: str, arguments: str, *, as_text: bool) -> None:
    """Kills: an answer that ends in a failure because of what the model wrote."""
    given = json.dumps(arguments) if as_text else arguments
    call = f'{{"name": "weather", "arguments": {given}}}'
    answer = {
        "hermes": f"<tool_call>{call}</tool_call>",
        "llama3": call,
        "json": f"[{call}]",
        "mistral_args": f"[TOOL_CALLS]weather[ARGS]{given}",
    }[name]
    for step in (3, len(answer)):
        assert held(read(FORMATS[name], answer, step=step)) == [answer]


@pytest.mark.parametrize(("name", "answer", "expected"), ANSWERS)
def test_an_answer_holds_the_same_however_it_is_cut(
    name: str, answer: str, expected: list[object] | None
) -> None:
    for step in (1, 2, 3, 7, len(answer)):
        parts = read(FORMATS[name], answer, step=step)
        assert held(parts) == ([answer] if expected is None else expected), step


def test_text_that_cannot_begin_a_call_is_not_held_back() -> None:
    reader = CallReader(FORMATS["hermes"], OFFER, "")
    assert reader.feed("The time is <") == [Words("The time is")], "a space may precede a call"
    assert reader.feed("b>") == [Words(" <b>")]


def test_one_call_is_the_most_where_that_was_asked() -> None:
    single = Offer(OFFER.functions, is_single=True)
    assert held(read(FORMATS["hermes"], f"{HERMES}\n{HERMES}", step=5, offer=single)) == [CALLED]
    assert held(read(FORMATS["json"], f"[{LLAMA}, {LLAMA}]", step=5, offer=single)) == [CALLED]


def test_only_functions_that_may_be_called_are() -> None:
    some = Offer(OFFER.functions, frozenset({"now"}))
    assert held(read(FORMATS["hermes"], HERMES, step=5, offer=some)) == [HERMES]


def test_each_call_has_an_id_of_its_own_that_every_template_takes() -> None:
    ids = {each.id for each in read(FORMATS["json"], f"[{LLAMA}, {LLAMA}]", step=9)}
    assert len(ids) == 2
    assert all(len(each) == 9 and each.isalnum() and each.isascii() for each in ids)


OWN = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "content": {},
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def test_a_tokenizers_own_description_wins_and_tells_thoughts_apart() -> None:
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.response_template = OWN
    form = format_of(tokenizer, "<tool_call>", "auto")
    assert form.is_own
    answer = 'Hm.</think>Well.<call>{"name": "now", "arguments": {}}</call><call>{"na</call> ok'
    for step in (1, 4, 200):
        reader = CallReader(form, OFFER, "<|user|><call><|assistant|><think>")
        parts: list[Part] = []
        for start in range(0, len(answer), step):
            parts += reader.feed(answer[start : start + step])
        parts += reader.finish()
        assert isinstance(parts[0], Thought), "the prompt began it"
        assert held(parts) == ["Hm.Well.", ("now", {}), '<call>{"na</call> ok']


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("… <tool_call>\n{{ call | tojson }}\n</tool_call>", "hermes"),
        ("… <tool_call>\n<function={{ call.name }}>", "qwen3_coder"),
        ('… {"name": function name, "parameters": dictionary}', "llama3"),
        ("… <|python_tag|>{{ call }}", "llama3"),
        ("… [TOOL_CALLS] [{{ calls }}]", "mistral"),
        ("… [TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments }}", "mistral_args"),
        ("{{ tools }}", "json"),
    ],
)
def test_the_template_shows_the_form(template: str, name: str) -> None:
    assert format_of(tiny.tiny_tokenizer(), template, "auto") is FORMATS[name]
    asked = name.removesuffix("_args")
    assert format_of(tiny.tiny_tokenizer(), template, asked) is FORMATS[name]
    assert format_of(tiny.tiny_tokenizer(), template, "qwen3_coder") is FORMATS["qwen3_coder"]
