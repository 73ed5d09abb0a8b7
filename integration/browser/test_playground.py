"""The playground in a real browser, as people use it."""

from __future__ import annotations

import ast
import re
import shutil
import signal
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

import juice
from integration.browser.browsing import FOLDER, OpenPage
from integration.browser.steps import (
    OLIVER,
    PHONE,
    answer,
    asked,
    bodies,
    dial_to,
    run,
    send_more,
    set_options,
    start,
    start_slowly,
    token,
)
from tests.support.serving import KEYS, serving


def test_the_first_load_is_small(url: str) -> None:
    names = re.findall(r'(?:src|href)="(playground/[^"]+)"', httpx.get(url).text)
    modules = {"/", *(f"/{name}" for name in names)}
    todo = [f"/{name}" for name in names if name.endswith(".js")]
    while todo:
        text = httpx.get(url + todo.pop()).text
        found = {f"/playground/{each}" for each in re.findall(r'from "\./([^"]+)"', text)}
        todo += found - modules
        modules |= found
    assert len(modules) > 15
    assert sum(len(httpx.get(url + module).content) for module in modules) < 100_000


def test_what_is_allowed_is_strict(url: str) -> None:
    headers = httpx.get(url).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert httpx.get(f"{url}/playground/none.js").status_code == 404
    assert httpx.get(f"{url}/playground/..%2fapp.py").status_code == 404


def test_the_page_works_under_the_prefix_of_a_proxy(opened: OpenPage) -> None:
    with serving("--root-path", "/juice") as server, opened(f"{server.url}/juice/") as page:
        run(page)
        assert answer(page, "none")
        page.locator("#code summary").click()
        expect(page.locator("#curl")).to_contain_text(f"{server.url}/juice/compare")


def test_three_answers_come_and_are_those_of_the_server(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        expect(page.locator("#compare_hint")).to_be_visible()
        run(page)
        expect(page.locator("#compare_hint")).to_be_hidden()
        given = {**asked(page), "max_tokens": 16}
        answers = httpx.post(f"{url}/compare", json=given, timeout=60).json()["answers"]
        for target, each in answers.items():
            assert answer(page, target) == each["text"].strip()
        assert answers["context"]["text"] != answers["parametric"]["text"]
        expect(page.locator("#verdict")).to_contain_text("believes what it was given")
        expect(page.locator("#status")).to_contain_text("believes what it was given")
        parted = page.locator("#columns .parts").all_inner_texts()
        assert len(parted) == 2
        assert parted[0] != parted[1]
        expect(token(page, "context")).to_have_class(re.compile("from-context"))
        expect(token(page, "parametric")).to_have_class(re.compile("from-memory"))


def test_answers_have_all_their_lines_and_characters(opened: OpenPage, url: str) -> None:
    """Several tokens make one character; one that ends a line is a token, too."""
    said = "São 日本\n🙂 in two lines"
    with opened(url) as page:
        set_options(page, max_tokens="64")
        send_more(page, "/compare", structured_outputs={"choice": [said]})
        run(page)
        for target in ("parametric", "none", "context"):
            assert answer(page, target) == said
        expect(page.locator("#verdict")).to_contain_text("say the same")
        n = page.locator("#columns .of-none .token").count()
        assert 4 < n < len(said.encode())
        box = page.locator("#columns .of-none .answer").bounding_box()
        last = token(page, "none", n - 1).bounding_box()
        assert last["y"] > token(page, "none").bounding_box()["y"] + 15, "on a line of its own"
        assert last["height"] < box["height"]
        token(page, "none", n - 1).click()
        expect(page.locator("#explained")).to_contain_text("São 日本")


def test_the_walk_through_of_the_note_is_what_the_page_says(opened: OpenPage, url: str) -> None:
    text = Path("docs/playground.md").read_text()
    note, shown = " ".join(text.split()), text.split("```python\n")[1].split("```")[0]
    with opened(url) as page:
        run(page)
        assert page.locator("#verdict").inner_text() in note
        code = page.locator("#python").text_content().replace(url, "http://127.0.0.1:8000")
        assert ast.unparse(ast.parse(code)) == ast.unparse(ast.parse(shown))
        for target in ("none", "parametric"):
            said = page.locator(f"#columns .of-{target} .said").last.inner_text()
            assert said.split("; ")[1] in note
        page.locator("#tab-dial").click()
        expect(page.locator("#flip")).not_to_be_empty()
        assert page.locator("#flip").inner_text() in note
        page.locator("#tab-compare").click()
        token(page, "parametric").click()
        expect(page.locator("#effects tbody tr")).to_have_count(6)
        said = page.locator("#difference").inner_text().replace(" (a difference of logits)", "")
        lead = re.search(r"“·Charles” leads.*?5\.61\.", said)
        assert lead is not None
        assert lead.group() in note
        for effect in page.locator("#effects tbody tr td:nth-child(3)").all_inner_texts()[:4]:
            assert effect.removeprefix("+") in note
        cost = page.locator("#cost").inner_text().removeprefix("6 heads steer toward memory. ")
        assert cost in note
        page.select_option("#example", "1")
        run(page)
        page.locator("#tab-compare").click()
        expect(page.locator("#verdict")).to_contain_text("trusts its memory")


def test_ones_own_prompt_without_a_context_has_no_colours(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        page.fill("#context", "")
        page.fill("#prompt", "The official language of Japan is")
        expect(page.locator("#kind")).to_be_disabled()
        page.keyboard.press("Control+Enter")
        expect(page.locator("#legend")).to_contain_text("Without a context")
        assert page.locator("#columns .from-context").count() == 0
        assert answer(page, "none").startswith("Japanese")


def test_what_the_gate_decided_is_told_in_words(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        set_options(page, gate="auto")
        run(page)
        notes = page.locator("#columns .of-context .said").last
        expect(notes).to_contain_text(
            "the gate steers: the chance that it copies what it was given"
        )
        expect(notes).to_contain_text(re.compile(r"is [01]\.\d\d, at least 0\.\d\d; it begins"))
        page.select_option("#kind", "clean")
        run(page)
        said = page.locator("#columns .of-context .said").last
        expect(said).to_contain_text(re.compile(r"the gate does not steer: .* less than 0\.\d\d$"))


def test_a_context_that_changes_nothing_is_told(opened: OpenPage, url: str) -> None:
    """Did my context matter? Under the answers, in words."""
    with opened(url) as page:
        page.fill("#context", "x")
        page.fill("#prompt", "The official language of Japan is")
        run(page)
        said = page.locator("#columns .of-none .said").last
        expect(said).to_contain_text("without the context it would begin with “·Japan” (24 %)")
        expect(said).to_contain_text("the context was not used")


def test_one_more_head_set_answers_beside_the_three(opened: OpenPage, tmp_path: Path) -> None:
    """Which of my two sets is better? A set that does nothing lets the context win."""
    shutil.copytree("head_sets/mini", tmp_path / "mini")
    with juice.load("mini") as model:
        idle = model.make_head_set(
            name="idle", target="parametric", plus=[(0, 0)], minus=[], beta_plus=0.001
        )
        idle.save(tmp_path / "mini" / "idle")
    with serving("--head-sets", str(tmp_path)) as server, opened(server.url) as page:
        set_options(page, set_beside='{"target":"parametric","head_set":"idle"}')
        run(page)
        beside = page.locator("#beside .of-parametric")
        expect(beside.locator("h2")).to_have_text("idle")
        expect(beside.locator(".answer")).to_contain_text("Nikolai Gogol")
        expect(beside.locator(".said").last).to_contain_text("1 heads of idle, strength 1")
        verdict = page.locator("#verdict")
        expect(verdict).to_contain_text("The head set idle says something other than parametric.")
        set_options(page, set_beside="")
        run(page)
        assert page.locator("#beside article").count() == 0


def test_drawn_answers_are_called_drawn(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        set_options(page, temperature="0.25", seed="1", max_tokens="4")
        run(page)
        expect(page.locator("#verdict")).to_contain_text(
            "At temperature 0.25 the answers are drawn"
        )


def test_the_dial_flips_the_answer(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        page.get_by_role("tab", name="The dial").click()
        expect(page.locator("#dial_hint")).to_contain_text("Run first")
        run(page)
        expect(page.locator("#curves svg")).to_be_visible()
        expect(page.locator("#dial_hint")).to_be_hidden()
        expect(page.locator("#flip")).to_contain_text("change places at strength")
        expect(page.locator("#dial_answer")).to_contain_text("Charles Dickens")
        dial_to(page, 0)
        expect(page.locator("#dial_answer")).to_contain_text("Nikolai Gogol")
        dial_to(page, 2)
        expect(page.locator("#dial_answer")).to_contain_text("Charles Dickens")
        page.select_option("#dial_target", "context")
        expect(page.locator("#flip")).to_contain_text("do not change places")
        page.select_option("#kind", "clean")
        run(page)
        expect(page.locator("#flip")).to_contain_text("say the same")
        assert "<|" not in page.locator("#flip").inner_text(), "no special token"
        assert page.input_value("#dial_target") == "context", "a choice stays"


def test_the_dial_takes_answers_of_ones_own(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        run(page)
        page.locator("#tab-dial").click()
        expect(page.locator("#curves svg")).to_be_visible()
        swept = bodies(page, "/sweep")
        page.locator("#dial details summary").last.click()
        page.fill("#answer_memory", " Charles Dickens")
        page.fill("#answer_context", " Nikolai Gogol")
        page.locator("#answer_context").blur()
        expect(page.locator("#flip")).to_contain_text("“·Charles·Dickens” (memory)")
        assert [each["answers"] for each in swept] == [[" Charles Dickens", " Nikolai Gogol"]]


def test_a_token_shows_its_candidates_and_the_heads_behind_it(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        run(page)
        explained = bodies(page, "/explain")
        token(page, "context").click()
        expect(page.locator("#effects tbody tr")).to_have_count(6)
        expect(page.locator("#explained")).to_be_focused()
        (body,) = explained
        assert {**asked(page), "target": "context"}.items() <= body.items()
        found = httpx.post(f"{url}/explain", json=body, timeout=60).json()
        heads = [f"layer {head['layer']}, head {head['head']}" for head in found["heads"]]
        shown = page.locator("#effects tbody th").all_inner_texts()
        assert sorted(shown) == sorted(heads)
        assert page.locator("#candidates article").count() == 3
        # What helps the context has its colour, and the map is that of its heads.
        n = sum(head["effect"] >= 0 for head in found["heads"])
        assert page.locator("#effects .for-context").count() == n > 0
        expect(page.locator("#effects_legend")).to_contain_text("helps the context here")
        assert page.input_value("#map_set") == found["steering"]["head_set"] == "context"
        expect(page.locator("#cost")).to_contain_text("3 of the model's 6 layers work twice, 50 %")
        assert page.locator("#maps .chosen").count() == 6
        legend = page.locator("#map_legend").inner_text()
        page.locator("#maps rect:not(.chosen)").nth(10).hover()
        expect(page.locator("#cell")).to_have_text(re.compile(r"layer \d, head \d: -?[\d.e-]+"))
        assert page.locator("#map_legend").inner_text() == legend
        page.locator("#map_table summary").click()
        expect(page.locator("#map_table tbody tr")).to_have_count(6)
        page.locator("#tab-compare").click()
        token(page, "parametric").click()
        expect(page.locator("#difference")).to_contain_text("“·Charles” leads “·Nik” by")
        expect(page.locator("#difference")).to_contain_text("unsteered it trails by")
        expect(page.locator("#cost")).to_contain_text("toward memory")
        assert page.input_value("#map_set") == "parametric"


def test_a_key_is_asked_for_and_leaves_the_form_alone(opened: OpenPage) -> None:
    question = {"prompt": "The official language of Japan is", "context": "In Japan, they speak."}
    with serving("--api-key", KEYS[0]) as server, opened(server.url, fails=True) as page:
        expect(page.locator("#problem")).to_contain_text("the API key is missing or unknown")
        assert page.locator("#example option").count() > 3, "examples need no key"
        for name, text in question.items():
            page.fill(f"#{name}", text)
        page.fill("#key", "wrong")
        page.locator("#key").blur()
        expect(page.locator("#problem")).to_contain_text("the API key is missing or unknown")
        ran = bodies(page, "/compare")
        page.fill("#key", KEYS[0])
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_contain_text("mini")
        expect(page.locator("#problem")).to_be_hidden()
        assert (asked(page), ran) == (question, []), "Enter takes the key, and nothing else"
        page.select_option("#example", "0")
        run(page)
        assert answer(page, "parametric") == "Charles Dickens."
        assert "Bearer KEY" in page.locator("#curl").text_content()
        assert KEYS[0] not in page.content()
        assert KEYS[0] not in page.evaluate("JSON.stringify([{...localStorage}, document.cookie])")


def test_a_server_that_stops_in_mid_stream_is_told(opened: OpenPage) -> None:
    with serving("--drain", "0") as server, opened(server.url, fails=True) as page:
        start_slowly(page)
        server.process.send_signal(signal.SIGTERM)
        expect(page.locator("#problem")).to_be_in_viewport()
        expect(page.locator("#problem")).to_contain_text("server")
        expect(page.locator("#columns .said").last).to_have_text("cut off")
        # A second signal, once the handlers are gone, would end the process in its own way.
        assert server.process.wait(60) == 0


def test_what_the_server_refuses_is_shown_in_its_words(opened: OpenPage, url: str) -> None:
    with opened(url, fails=True) as page:
        page.fill("#prompt", "x " * 3000)
        start(page)
        expect(page.locator("#problem")).to_contain_text("1024")
        page.fill("#prompt", OLIVER)
        run(page)
        expect(page.locator("#problem")).to_be_hidden()


def test_a_wrong_option_that_is_folded_away_is_shown(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        for wrong in ("9999", ""):
            set_options(page, max_tokens=wrong)
            page.locator("#ask summary").click()
            start(page)
            expect(page.locator("#max_tokens")).to_be_visible()
            assert page.locator("#columns article").count() == 0


def test_it_works_by_keyboard_alone(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        page.locator("#prompt").focus()
        page.keyboard.press("Control+Enter")
        expect(page.locator("#status")).to_contain_text("Done.")
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "tab-compare":
                break
        page.keyboard.press("Tab")
        assert "token" in page.evaluate("document.activeElement.className")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Space")
        expect(page.locator("#effects tbody tr")).to_have_count(6)
        expect(page.locator("#explained")).to_be_focused()
        page.locator("#tab-heads").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#tab-dial")).to_be_focused()
        expect(page.locator("#curves svg")).to_be_visible()
        expect(page.locator("#dial_answer")).to_contain_text("Charles Dickens")
        page.locator("#dial_strength").focus()
        for _ in range(20):
            page.keyboard.press("ArrowLeft")
        expect(page.locator("#dial_value")).to_have_text("0")
        expect(page.locator("#dial_answer")).to_contain_text("Nikolai Gogol")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"color_scheme": "dark"},
        PHONE,
        {"viewport": {"width": 640, "height": 450}, "device_scale_factor": 2},
    ],
    ids=["light", "dark", "phone", "200 %"],
)
def test_everybody_can_read_it(opened: OpenPage, url: str, options: dict) -> None:
    axe = (FOLDER / "node_modules" / "axe-core" / "axe.min.js").read_text()
    with opened(url, bypass_csp=True, fails=True, **options) as page:

        def check(state: str) -> None:
            found = page.evaluate("axe.run().then(own => own.violations)")
            told = [(each["id"], [n["html"][:90] for n in each["nodes"]]) for each in found]
            assert told == [], state
            # Not innerWidth: a phone's grows with what is too wide.
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= page.viewport_size["width"], f"it does not fit: {state}"

        page.evaluate(axe)
        check("before the first run")
        run(page)
        check("compare")
        page.locator("#tab-dial").click()
        expect(page.locator("#dial_answer")).to_contain_text("Dickens")
        for item in page.locator("#dial summary").all():
            item.click()
        check("the dial with its table")
        page.locator("#tab-compare").click()
        token(page, "parametric").click()
        expect(page.locator("#effects tbody tr")).to_have_count(6)
        page.locator("#map_table summary").click()
        page.locator("#code summary").click()
        check("an explanation, the map's table, the lines of code")
        page.locator("#batch summary").click()
        rows = b'prompt,context\n"The capital of Peru is","The capital of Peru is Cairo."\n" ",\n'
        page.set_input_files("#file", {"name": "a.csv", "mimeType": "text/csv", "buffer": rows})
        page.locator("#batch_run").click()
        expect(page.locator("#batch_table tbody tr")).to_have_count(2)
        set_options(page)
        check("a batch with results, the options open")
        page.fill("#prompt", "x " * 3000)
        start(page)
        expect(page.locator("#problem")).to_be_visible()
        check("an error")
