"""Heads and betas are found in the form in which they are used: through a chat template."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import pytest
import torch

import juice
from juice.errors import UsageError
from juice.head_set.head_set import HeadSet
from juice.identification.tune import tune
from tests.support import naive_scores, tiny
from tests.support.chat_templates import LINES, PLAIN, TURNS, loaded, made_set, sha256, tokenizer
from tests.support.conflicts import ALPHAS_MINUS, ALPHAS_PLUS, TOLERANCE, TYPES, examples

TARGETS = ("parametric", "context")


@pytest.mark.parametrize("name", TURNS)
def test_scores_through_a_template_equal_a_forward_for_every_head_and_alpha_on_its_tokens(
    name: str,
) -> None:
    """Kills: a second start token, a needless space, a merge across the end of the turn."""
    template, turn, glue = TURNS[name]
    network, tokenise = tiny.tiny_model("llama"), tokenizer()
    expected = {
        (target, sign): torch.stack(
            [
                naive_scores.mean_changes(
                    network,
                    [
                        tokenise(turn.format(e.prompts[t]), add_special_tokens=False)["input_ids"]
                        for e in examples()
                    ],
                    [
                        tokenise(glue + e.answer(target), add_special_tokens=False)["input_ids"][0]
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
            method="probe",
            alphas_plus=ALPHAS_PLUS,
            alphas_minus=ALPHAS_MINUS,
            chat_template="default",
            tune=False,
        )
        for sign in ("plus", "minus"):
            table = expected[target, sign]
            torch.testing.assert_close(getattr(found.scores, sign), table, rtol=0, atol=TOLERANCE)
            assert table.abs().max() > 10 * TOLERANCE
        assert found.chat_template_sha256 == sha256(template)


def test_a_file_replaces_the_tokenizers_template_and_is_hashed_byte_for_byte(
    tmp_path: Path,
) -> None:
    file = tmp_path / "chat.jinja"
    file.write_bytes((LINES + "\r\n").encode())
    model = loaded(PLAIN)
    options = {
        "target": "context",
        "method": "probe",
        "alphas_plus": ALPHAS_PLUS,
        "alphas_minus": ALPHAS_MINUS,
        "tune": False,
    }
    by_file = juice.identify(model, examples(), chat_template=file, **options)
    assert by_file.chat_template_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    plain = juice.identify(model, examples(), **options)
    assert plain.chat_template_sha256 is None
    assert by_file.scores_sha256 != plain.scores_sha256
    by_file.save(tmp_path / "set")
    assert HeadSet.load(tmp_path / "set").chat_template_sha256 == by_file.chat_template_sha256


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
    assert tuned.betas() == inside.betas()
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
