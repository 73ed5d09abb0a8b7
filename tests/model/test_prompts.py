"""The tokens of a prompt and of its answer, plain and through a chat template."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from juice.identification.examples import scored_prompt
from juice.model.prompts import PromptForm
from tests.support import tiny
from tests.support.chat_templates import END, PLAIN, TURNS, loaded, tokenizer
from tests.support.conflicts import examples
from tests.support.spellings import SPELLINGS


def test_the_tokenizer_of_these_tests_has_the_traps() -> None:
    known = tokenizer()
    two, followed = known("\n\n")["input_ids"], known("\n\nLima")["input_ids"]
    assert two == [0, tiny.VOCAB_SIZE - 1]
    assert followed[:2] != two
    assert known(END)["input_ids"] == [0, 0], "a rendered prompt would begin with two start tokens"


def test_an_answer_begins_after_the_tokens_of_the_rendered_prompt() -> None:
    """Even where the tokens of prompt and answer as one text would be others."""
    known = tokenizer()
    for template, turn, glue in TURNS.values():
        prompts = loaded(template).with_chat_template().prompts
        ids, start = prompts.joined("Capital of Peru:", "Lima")
        assert ids[:start] == prompts.tokens("Capital of Peru:")
        assert known.decode(ids[:start]) == turn.format("Capital of Peru:")
        assert list(ids[start:]) == known(f"{glue}Lima", add_special_tokens=False)["input_ids"]
        assert prompts.first_token("Capital of Peru:", "Lima Callao") == ids[start]


def test_an_opening_is_what_the_model_has_said_and_the_answer_follows_it() -> None:
    """Mistakes caught: an opening in the user's turn, and a first token that is the opening's."""
    known, opening = tokenizer(), "The capital is"
    forms = [(loaded(template), glue, turn) for template, turn, glue in TURNS.values()]
    chats = [(model.with_chat_template(), glue, turn) for model, glue, turn in forms]
    for model, glue, turn in [*chats, (loaded(PLAIN), " ", END + "{}")]:
        ids = model.tokenize("Capital of Peru:", opening=opening)
        assert known.decode(ids) == turn.format("Capital of Peru:") + glue + opening
        assert ids[
            : len(ids) - len(known(glue + opening, add_special_tokens=False)["input_ids"])
        ] == (model.tokenize("Capital of Peru:"))
        first = known(" Lima", add_special_tokens=False)["input_ids"][0]
        assert model.first_token("Capital of Peru:", "Lima Callao", opening=opening) == first


def test_answers_that_begin_alike_part_where_their_texts_do() -> None:
    """Mistakes caught: the first token of both, and a prompt that lacks what they share."""
    known = tokenizer()
    for opening in ("", "It was built in"):
        for template, turn, glue in [*TURNS.values(), (PLAIN, END + "{}", " ")]:
            model = loaded(template)
            model = model if turn == END + "{}" else model.with_chat_template()
            answers = ("1987", "1912 or so")
            ids, tokens = model.prompts.parted("Built:", answers, opening)
            begun = f"{opening} 19" if opening else "19"
            assert known.decode(ids) == turn.format("Built:") + glue + begun
            assert known.decode(tokens) == "81"
            assert model.prompts.parted("Built:", ("1912", "1912 or so"), opening) is None


def test_an_example_whose_answers_begin_alike_is_scored_where_they_part() -> None:
    model = loaded(PLAIN)
    years = examples()[0].model_copy(
        update={"parametric_answer": ("1987",), "context_answer": ("1912",)}
    )
    scored = scored_prompt(model, years, "clean")
    assert tokenizer().decode(scored.ids) == END + years.prompts["clean"] + " 19"
    assert scored.n_shared == 3
    told = {t: tokenizer().decode([token]) for t, token in scored.answer_tokens.items()}
    assert told == {"parametric": "8", "context": "1"}


def test_plain_prompts_keep_their_own_start_token_and_a_space_before_the_answer() -> None:
    model = loaded(PLAIN)
    scored = scored_prompt(model, examples()[0], "clean")
    assert scored.ids == tuple(tokenizer()(examples()[0].prompts["clean"])["input_ids"])
    assert scored.ids[0] == 0
    assert (
        scored.answer_tokens["parametric"]
        == tokenizer()(" Paris", add_special_tokens=False)["input_ids"][0]
    )


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Capital of Peru: ", "Lima"),
        ("Capital of Peru:\n", "Lima"),
        ("Capital of Peru:\n\n", "Lima"),
        ("法国的首都是", "巴黎"),
        ("他写的小说是", "《红楼梦》"),
        ("フランスの首都は", "パリ"),
        ("เมืองหลวงคือ", "ปารีส"),
    ],
)
def test_no_space_is_put_where_a_text_would_have_none(prompt: str, answer: str) -> None:
    """Kills: a second space, and the space itself as the first token of every Chinese answer."""
    known, model = tokenizer(), loaded(PLAIN)
    ids, start = model.prompts.joined(prompt, answer)
    assert ids[:start] == model.tokenize(prompt)
    assert known.decode(ids[start:]) == answer
    assert model.first_token(prompt, answer) == ids[start]
    opening, glue = prompt.rstrip(), " " if answer == "Lima" else ""
    begun = known(glue + answer, add_special_tokens=False)["input_ids"][0]
    assert model.first_token("Told.", answer, opening=opening) == begun
    assert known.decode(model.tokenize("Told.", opening=opening)) == f"{END}Told.{glue}{opening}"


@pytest.mark.parametrize("prompt", ["Capital of Peru: ", "Capital of Peru:\n\n", "東京 "])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_long_answer_is_found_in_the_whole_text_in_a_few_steps(
    spelling: str, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a time that grows with the square of the answer, and tokens of the prompt in it."""
    known = PreTrainedTokenizerFast(tokenizer_object=SPELLINGS[spelling]())
    form, answer = PromptForm(known), "Lima, é 1987 🎉 " * 20 + "Lima"
    decode, decoded = known.decode, list[int]()

    def counted(ids: tuple[int, ...], **options: Any) -> str:
        decoded.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(known, "decode", counted)
    ids, start = form.joined(prompt, answer)
    assert len(decoded) < 20
    whole = form.encode(prompt + answer)
    if whole[:start] == ids[:start]:
        assert ids == whole
    else:
        ends = (whole[i:] for i in range(len(whole)) if decode(whole[i:]) == answer)
        assert ids[start:] == next(ends, form.encode(answer, add_special_tokens=False))


def test_an_answer_in_korean_has_its_space() -> None:
    model = loaded(PLAIN)
    ids, start = model.prompts.joined("프랑스의 수도는", "파리")
    assert tokenizer().decode(ids[start:]) == " 파리"


def test_nothing_is_behind_a_prompt_that_goes_on() -> None:
    """Kills: the end of text that a tokenizer for training puts there."""
    known = tokenizer()
    ends = known.convert_tokens_to_ids("A")
    for begins in ("", f"{END} "):
        known.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begins}$A A", special_tokens=[(END, 0), ("A", ends)]
        )
        form = PromptForm(known)
        ids = form.tokens("Capital of Peru:")
        assert known("Capital of Peru:")["input_ids"] == [*ids, ends]
        assert form.joined("Capital of Peru:", "Lima")[1] == len(ids)
        assert form.position_behind("Told.", "") == len(form.encode(form.behind("Told.", " ")))
