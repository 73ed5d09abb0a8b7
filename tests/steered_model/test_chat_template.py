"""A model that is asked through a chat template: which one, and whether its head sets fit it."""

from __future__ import annotations

from pathlib import Path

import pytest

import juice
from juice.errors import RequestError, UsageError
from juice.head_set.head_set import HeadSet
from tests.support.chat_templates import LINES, PLAIN, loaded, made_set, sha256
from tests.support.conflicts import examples


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
    for template, each in ((LINES, sha256(LINES)[:12]), (None, "none")):
        with pytest.warns(
            UserWarning, match=f"through the chat template {sha256(PLAIN)[:12]}….* is {each}"
        ):
            assert loaded(template, tmp_path).head_sets.by_name
    assert loaded(LINES, tmp_path).with_chat_template(PLAIN).head_sets.by_name
