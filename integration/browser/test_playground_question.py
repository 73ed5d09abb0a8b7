"""The playground shows the question that was run, whatever its form says since."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from integration.browser.browsing import OpenPage
from integration.browser.steps import (
    OLIVER,
    answer,
    bodies,
    dial_to,
    run,
    send_more,
    set_options,
    start,
    start_slowly,
    token,
)


def test_a_token_is_explained_after_the_question_that_was_run(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        run(page)
        expect(page.locator("#stale")).to_be_hidden()
        page.select_option("#example", "1")
        expect(page.locator("#stale")).to_contain_text("Run again")
        explained = bodies(page, "/explain")
        token(page, "context").click()
        expect(page.locator("#candidates .of-context tbody th").first).to_have_text("·Nik")
        assert [each["prompt"] for each in explained] == [OLIVER]
        page.select_option("#example", "0")
        expect(page.locator("#stale")).to_be_hidden()


def test_colours_are_those_of_the_question_that_was_run(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        read = bodies(page, "/origins")
        set_options(page, max_tokens="120", temperature="2", seed="1")
        start(page)
        expect(page.locator("#columns .token").nth(5)).to_be_visible()
        page.fill("#context", "Something about fish.")
        page.fill("#prompt", "Fish live in the")
        expect(page.locator("#stale")).to_be_visible()
        expect(page.locator("#legend")).to_contain_text("likelier with the context", timeout=90_000)
        assert [each["prompt"] for each in read] == [OLIVER]


def test_the_dial_answers_the_question_of_its_curves(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        run(page)
        page.locator("#tab-dial").click()
        expect(page.locator("#dial_answer")).to_contain_text("Charles Dickens")
        answered = bodies(page, "/generate")
        page.select_option("#example", "1")
        expect(page.locator("#stale")).to_be_visible()
        dial_to(page, 0)
        expect(page.locator("#dial_answer")).to_contain_text("Nikolai Gogol")
        assert [each["prompt"] for each in answered] == [OLIVER]
        assert answered[0]["steer"]["strength"] == 0


def test_looking_elsewhere_does_not_end_a_run(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        set_options(page, max_tokens="120", temperature="2", seed="1")
        swept, explained = bodies(page, "/sweep"), bodies(page, "/explain")
        start(page)
        expect(page.locator("#columns .token").nth(5)).to_be_visible()
        page.locator("#columns .token").nth(2).click()  # a button only at the end
        page.locator("#tab-dial").click()
        assert (swept, explained) == ([], []), "the dial waits for the run"
        expect(page.locator("#flip")).not_to_be_empty(timeout=90_000)
        page.locator("#tab-compare").click()
        expect(page.locator("#legend")).not_to_be_empty()
        notes = [
            all_inner_text.split("\n")[-1]
            for all_inner_text in page.locator("#columns article").all_inner_texts()
        ]
        assert "…" not in notes
        assert "stopped" not in notes


def test_what_is_stopped_says_so(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        start_slowly(page)
        page.locator("#stop").click()
        expect(page.locator("#status")).to_have_text("stopped")
        for target in ("parametric", "none", "context"):
            expect(page.locator(f"#columns .of-{target} .said").last).to_have_text("stopped")
        token(page, "none").click()
        expect(page.locator("#effects tbody tr")).to_have_count(6)


def test_stop_ends_the_answer_of_the_dial(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        run(page)
        send_more(page, "/generate", max_tokens=900, ignore_eos=True)
        page.locator("#tab-dial").click()
        expect(page.locator("#dial_answer")).not_to_be_empty()
        page.locator("#stop").click()
        expect(page.locator("#dial_answer")).to_contain_text("(stopped)")
        said = page.locator("#dial_answer").inner_text()
        page.wait_for_timeout(700)
        assert page.locator("#dial_answer").inner_text() == said
        expect(page.locator("#stop")).to_be_hidden()
        dial_to(page, 2)
        expect(page.locator("#stop")).to_be_visible()
        page.locator("#stop").click()  # before the dial has come to rest
        expect(page.locator("#status")).to_have_text("stopped")


def link(page: Page) -> str:
    """Return the link to the view, as a browser without a clipboard shows it."""
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    if page.locator("#code").get_attribute("open") is None:
        page.locator("#code summary").click()
    page.locator("#share").click()
    expect(page.locator("#link")).to_be_focused()
    found = page.input_value("#link")
    selected = page.evaluate(
        "(own => own.selectionEnd - own.selectionStart)(document.activeElement)"
    )
    assert selected == len(found)
    return found


def test_a_link_shows_the_same_again(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        page.select_option("#example", "1")
        set_options(page, max_tokens="5")
        run(page)
        page.locator("#tab-dial").click()
        page.select_option("#dial_target", "context")
        dial_to(page, 2.5)
        of_the_dial = link(page)
        page.locator("#tab-compare").click()
        token(page, "context", 1).click()
        expect(page.locator("#effects tbody tr")).to_have_count(6)
        said, explained = answer(page, "context"), page.locator("#explained").inner_text()
        of_the_token = link(page)
    with opened(of_the_dial) as page:
        expect(page.locator("#curves svg")).to_be_visible()
        assert page.input_value("#dial_target") == "context"
        expect(page.locator("#dial_value")).to_have_text("2.5")
        assert page.input_value("#max_tokens") == "5"
        assert page.locator("#columns .of-context .answer").text_content().strip() == said
        page.fill("#prompt", "Something else")
        page.goto(of_the_token)  # in the tab that is open
        expect(page.locator("#explained")).to_have_text(explained)
        assert page.input_value("#prompt") == "The name of the capital city of Peru is"
