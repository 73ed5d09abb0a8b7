"""The playground in a real browser, as people use it."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.support.browsing import FOLDER, OpenPage
from tests.support.serving import KEYS, serving

FACT = "The name of the capital city of Peru is"
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


def run(page: Page) -> None:
    page.get_by_role("button", name="Run", exact=True).first.click()
    expect(page.locator("#legend")).not_to_be_empty()


def answer(page: Page, target: str) -> str:
    return page.locator(f"#columns .of-{target} .answer").inner_text().strip()


def asked(page: Page) -> dict[str, str]:
    return {name: page.input_value(f"#{name}") for name in ("prompt", "context")}


def dial_to(page: Page, strength: float) -> None:
    page.locator("#dial_strength").evaluate(
        "(own, value) => { own.value = value; own.dispatchEvent(new Event('input')); }",
        str(strength),
    )


def test_the_first_load_is_small(url: str) -> None:
    names = re.findall(r'(?:src|href)="(/playground/[^"]+)"', httpx.get(url).text)
    modules = {"/", *names}
    todo = [name for name in names if name.endswith(".js")]
    while todo:
        text = httpx.get(url + todo.pop()).text
        found = {f"/playground/{own}" for own in re.findall(r'from "\./([^"]+)"', text)}
        todo += found - modules
        modules |= found
    assert len(modules) > 8
    assert sum(len(httpx.get(url + own).content) for own in modules) < 100_000


def test_what_is_allowed_is_strict(url: str) -> None:
    headers = httpx.get(url).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert httpx.get(f"{url}/playground/none.js").status_code == 404
    assert httpx.get(f"{url}/playground/..%2fapp.py").status_code == 404


def test_three_answers_come_and_are_those_of_the_server(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        run(page)
        given = {**asked(page), "max_tokens": 16}
        answers = httpx.post(f"{url}/compare", json=given, timeout=60).json()["answers"]
        for target, own in answers.items():
            assert answer(page, target) == own["text"].strip()
        assert answers["context"]["text"] != answers["parametric"]["text"]
        expect(page.locator("#verdict")).to_contain_text("believes what it was given")
        parted = page.locator("#columns .parts").all_inner_texts()
        assert len(parted) == 2
        assert parted[0] != parted[1]
        expect(page.locator(".of-context .token").first).to_have_class(re.compile("from-context"))
        expect(page.locator(".of-parametric .token").first).to_have_class(re.compile("from-memory"))
        assert "curl -s" in page.locator("#curl").text_content()


def test_ones_own_prompt_without_a_context_has_no_colours(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        page.fill("#context", "")
        page.fill("#prompt", "The official language of Japan is")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#legend")).to_contain_text("Without a context")
        assert page.locator("#columns .from-context").count() == 0
        assert answer(page, "none").startswith("Japanese")


def test_the_dial_flips_the_answer(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        run(page)
        page.get_by_role("tab", name="The dial").click()
        expect(page.locator("#curves svg")).to_be_visible()
        expect(page.locator("#flip")).to_contain_text("change places at strength")
        expect(page.locator("#dial_answer")).to_contain_text("Charles Dickens")
        dial_to(page, 0)
        expect(page.locator("#dial_answer")).to_contain_text("Nikolai Gogol")
        dial_to(page, 2)
        expect(page.locator("#dial_answer")).to_contain_text("Charles Dickens")
        page.select_option("#kind", "clean")
        run(page)
        expect(page.locator("#flip")).to_contain_text("say the same")


def test_a_token_shows_its_candidates_and_the_heads_behind_it(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        run(page)
        page.locator(".of-context .token").first.click()
        expect(page.locator("#effects tbody tr")).to_have_count(6)
        body = {**asked(page), "target": "context"}
        found = httpx.post(f"{url}/explain", json=body, timeout=60).json()
        heads = [f"layer {own['layer']}, head {own['head']}" for own in found["heads"]]
        shown = page.locator("#effects tbody th").all_inner_texts()
        assert sorted(shown) == sorted(heads)
        assert page.locator("#candidates article").count() == 3
        expect(page.locator("#cost")).to_contain_text("% more rows")
        assert page.locator("#maps .chosen").count() == 6
        page.locator("#maps rect:not(.chosen)").nth(10).hover()
        expect(page.locator("#cell")).to_have_text(re.compile(r"layer \d, head \d: -?[\d.e-]+"))
        page.select_option("#map_set", "parametric")
        expect(page.locator("#cost")).to_contain_text("toward memory")


def test_a_file_of_prompts_runs_is_cancelled_and_downloaded(
    opened: OpenPage, url: str, tmp_path: Path
) -> None:
    few, many = tmp_path / "few.csv", tmp_path / "many.jsonl"
    few.write_text(f'prompt,context\n{FACT},\n{FACT},"As ""we"" know, {FACT} Cairo."\n')
    row = {"prompt": FACT, "context": f"{FACT} Cairo."}
    many.write_text("".join(json.dumps(row) + "\n" for _ in range(400)))
    with opened(url) as page:
        page.locator("#batch summary").click()
        page.set_input_files("#file", few)
        expect(page.locator("#batch_count")).to_have_text("2 prompts")
        page.locator("#batch_run").click()
        expect(page.locator("#batch_table tbody tr")).to_have_count(2)
        first = page.locator("#batch_table tbody tr").first.locator("td").all_inner_texts()
        assert (first[0], first[-1]) == ("2", "differ"), "disagreements come first"
        assert first[2] == f'As "we" know, {FACT} Cairo.'
        assert "Lima" in first[4]
        assert "Cairo" in first[5]
        with page.expect_download() as download:
            page.locator("#batch_save").click()
        lines = Path(download.value.path()).read_text().splitlines()
        assert [json.loads(line)["row"] for line in lines] == [2, 1]
        page.set_input_files("#file", many)
        page.locator("#batch_run").click()
        expect(page.locator("#batch_count")).to_contain_text("of 400 done")
        page.locator("#batch_stop").click()
        expect(page.locator("#batch_count")).to_contain_text("cancelled after")
        n = int(re.findall(r"after (\d+)", page.locator("#batch_count").inner_text())[0])
        assert 0 < n < 400
        page.set_input_files("#file", {"name": "x.csv", "mimeType": "text/csv", "buffer": b"a,b\n"})
        expect(page.locator("#problem")).to_contain_text("the columns are a, b; expected prompt")


def test_a_wrong_key_is_told_and_the_right_one_helps(opened: OpenPage) -> None:
    with serving("--api-key", KEYS[0]) as server, opened(server.url, fails=True) as page:
        expect(page.locator("#problem")).to_contain_text("the API key is missing or unknown")
        page.fill("#key", "wrong")
        page.locator("#key").blur()
        expect(page.locator("#problem")).to_contain_text("the API key is missing or unknown")
        page.fill("#key", KEYS[0])
        page.locator("#key").blur()
        expect(page.locator("#model")).to_contain_text("mini")
        run(page)
        assert answer(page, "parametric") == "Charles Dickens."
        assert KEYS[0] not in page.locator("#curl").text_content()
        assert KEYS[0] not in page.evaluate("JSON.stringify([{...localStorage}, document.cookie])")


def test_a_server_that_stops_in_mid_stream_is_told(opened: OpenPage) -> None:
    with serving("--drain", "0") as server, opened(server.url, fails=True) as page:
        page.locator("#ask summary").click()
        page.fill("#max_tokens", "500")
        page.fill("#temperature", "2")
        page.get_by_role("button", name="Run", exact=True).first.click()
        expect(page.locator("#columns .token").nth(20)).to_be_visible()
        server.process.send_signal(signal.SIGTERM)
        expect(page.locator("#problem")).to_be_visible()
        expect(page.locator("#problem")).to_contain_text("server")


def test_what_the_server_refuses_is_shown_in_its_words(opened: OpenPage, url: str) -> None:
    with opened(url, fails=True) as page:
        page.locator("#ask summary").click()
        page.fill("#prompt", "x " * 3000)
        page.get_by_role("button", name="Run", exact=True).first.click()
        expect(page.locator("#problem")).to_contain_text("1024")


def test_it_works_by_keyboard_alone(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        page.locator("#prompt").focus()
        page.keyboard.press("Control+Enter")
        expect(page.locator("#legend")).not_to_be_empty()
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "tab-compare":
                break
        page.keyboard.press("Tab")
        assert "token" in page.evaluate("document.activeElement.className")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        expect(page.locator("#effects tbody tr")).to_have_count(6)
        page.locator("#tab-heads").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#tab-dial")).to_be_focused()
        expect(page.locator("#curves svg")).to_be_visible()
        page.locator("#dial_strength").focus()
        for _ in range(20):
            page.keyboard.press("ArrowLeft")
        expect(page.locator("#dial_value")).to_have_text("0")
        expect(page.locator("#dial_answer")).to_contain_text("Nikolai Gogol")


def test_a_link_shows_the_same_again(opened: OpenPage, url: str) -> None:
    with opened(url) as page:
        page.fill("#context", "The capital of Peru is Oslo.")
        link = page.evaluate(
            "import('/playground/question.js').then(own => own.toAddress({ view: 'dial' }))"
        )
    with opened(link) as page:
        assert page.input_value("#context") == "The capital of Peru is Oslo."
        expect(page.locator("#dial")).to_be_visible()


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
    with opened(url, bypass_csp=True, **options) as page:
        run(page)
        page.evaluate(axe)
        for view in ("compare", "dial", "heads"):
            page.locator(f"#tab-{view}").click()
            page.wait_for_load_state("networkidle")
            found = page.evaluate("axe.run().then(own => own.violations)")
            assert [(own["id"], [n["html"][:90] for n in own["nodes"]]) for own in found] == []
            wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
            assert not wide, "nothing is cut off at the side"
