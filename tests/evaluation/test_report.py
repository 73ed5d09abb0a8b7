"""The report: its sentences, its files, and the published numbers next to those measured."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from juice.evaluation.report.parts import Section, Table, write_report
from juice.evaluation.report.sections import published, sections, verdict, write
from juice.evaluation.results import Store, frame_of, read_results
from juice.files import LOOK
from juice.head_set.head_set import HeadSet

FACT = {
    "subject": "Peru",
    "parametric_answer": ["Lima", "Ciudad"],
    "context_answer": "Oslo",
    "prompts": {"substitution": "The capital of Peru is Oslo. The capital of Peru is"},
}


def cell(accuracy: float) -> dict:
    return {
        "n": 40,
        "accuracy": accuracy,
        "interval": [0.1, 0.9],
        "p_parametric": 0.5,
        "p_context": 0.25,
        "context_reliance": None,
    }


def method(accuracies: dict[str, float]) -> dict:
    table = {domain: {"substitution": cell(a)} for domain, a in accuracies.items()}
    going_on = {"n": 2, "mean_tokens": 3.0, "ended": 1.0, "repetition": 0.0}
    return {
        "choice": {},
        "table": table,
        "collateral": {},
        "continuations": going_on,
        "perplexity": None,
        "by_popularity": None,
    }


def results(model: str = "mini", **methods: dict[str, float]) -> dict:
    identity = {
        "model": {
            "id": model,
            "architecture": "GPT2LMHeadModel",
            "n_layers": 6,
            "n_heads": 8,
            "fingerprint": None,
        },
        "dtype": "float32",
        "limit": None,
        "seed": 0,
        "versions": {"juice": "1"},
    }
    data = {
        "test": [{}, {}],
        "n_validation": 3,
        "n_large": 0,
        "identification": {"parametric": ["Peru"]},
        "left_out": {"too long": 2},
    }
    of_target = {
        "methods": {name: method(accuracies) for name, accuracies in methods.items()},
        "analyses": {"heads": {"unavailable": "no heads"}},
    }
    return {
        "format": "juice.evaluation/2",
        "identity": identity,
        "data": data,
        "targets": {"parametric": of_target},
        "notes": ["one <note>"],
    }


def verdict_on(n: dict[str, int] | None = None, **methods: dict[str, float]) -> list[str]:
    """Return the verdict on methods with these accuracies, and other numbers of prompts."""
    made = results(**methods)
    for name, method in made["targets"]["parametric"]["methods"].items():
        method["table"]["average"]["substitution"]["n"] = (n or {}).get(name, 40)
    return verdict(frame_of(made, "accuracy"))


def test_the_verdict_names_where_juice_is_not_best() -> None:
    original = {"a": 0.2, "b": 0.3, "average": 0.25}
    juice = {"a": 0.9, "b": 0.5, "average": 0.7}
    june = {"a": 0.8, "b": 0.6, "average": 0.7}
    first, second = verdict_on(original=original, juice=juice, june=june)
    assert first.endswith("juice has 70.0, as has june: a tie for the best.")
    assert second == "Another method is ahead in 1 cells: b substitution (june 60.0, juice 50.0)."
    best = {"a": 1.0, "b": 1.0, "average": 1.0}
    assert "is **not** best: june has 100.0" in verdict_on(juice=juice, june=best)[0]
    assert verdict_on(original=original) == []
    few = verdict_on({"juice": 4, "june": 4}, juice=juice, june=june)
    assert few == ["4 facts are too few to tell methods apart."]


def test_harm_stands_beside_the_accuracy_with_its_interval() -> None:
    made = results(original={"a": 0.5, "average": 0.5}, served={"a": 1.0, "average": 1.0})
    methods = made["targets"]["parametric"]["methods"]
    for name, (true, invented) in {"original": (1.0, 0.98), "served": (0.75, 0.5)}.items():
        methods[name]["collateral"] = {
            "clean": {"clean": cell(1.0)},
            "true_context": {"substitution": cell(true), "coherent": cell(1.0)},
            "unknown_subject": {"coherent": cell(invented)},
        }
    titles = [section.title for section in sections(made)]
    where = titles.index("Where steering toward the parametric answer is not needed")
    assert titles[where - 1] == "Toward the parametric answer"
    harm = sections(made)[where]
    assert harm.level == 2  # the command prints it
    assert harm.text[1] == (
        "original: no context 100.0, true context 100.0, invented subject 98.0; "
        "served: no context 100.0, true context 87.5, invented subject 50.0."
    )
    table = harm.tables[0]
    assert table.header == [
        "method",
        "no context",
        "true context, substitution",
        "true context, coherent",
        "invented subject, coherent",
    ]
    assert table.rows[1][2] == "75.0 (10.0–90.0, n = 40)"


def test_two_runs_are_compared_with_one_fact_by_fact() -> None:
    """Twelve of twenty facts are right only with two runs: that is more than chance."""
    made = results(
        original={"a": 0.0, "average": 0.0},
        served_once={"a": 0.4, "average": 0.4},
        served={"a": 1.0, "average": 1.0},
    )
    made["data"]["test"] = [{**FACT, "relation": "a"}] * 20
    methods = made["targets"]["parametric"]["methods"]
    for name, right in {"original": 0, "served_once": 8, "served": 20}.items():
        answers = [["", i < right, None, None] for i in range(20)]
        methods[name]["answers"] = {"substitution": answers}
    text = sections(made)[1].text
    assert "served has 100.0 and is best; next comes served once with 40.0." in text[1]
    (sentence,) = [line for line in text if line.startswith("served against served once")]
    low, high = re.search(r"ahead, \+([0-9.]+) to \+([0-9.]+) points", sentence).groups()
    assert 20 < float(low) < 60 < float(high) < 90


def test_a_method_that_answers_only_some_facts_is_not_ranked() -> None:
    """Its accuracy is that of other facts."""
    measured = {"original": {"average": 0.2}, "served": {"average": 0.5}, "cad": {"average": 1.0}}
    assert verdict_on({"cad": 14}, **measured)[0].endswith(
        "served has 50.0 and is best; next comes original with 20.0."
    )
    del measured["original"]
    assert verdict_on({"cad": 14}, **measured) == []


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.cells: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [] if tag in ("meta", "img", "link") else [tag]
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_the_page_is_one_file_that_loads_nothing_and_agrees_with_the_markdown(
    tmp_path: Path,
) -> None:
    made = sections(
        results(original={"a": 0.25, "average": 0.25}, juice={"a": 0.75, "average": 0.75})
    )
    write_report(tmp_path, made)
    html, markdown = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    page = Links()
    page.feed(html)
    assert not page.open
    assert page.loads
    assert all(load.startswith(("data:image/png;base64,", "#")) for load in page.loads)
    assert "one &lt;note&gt;" in html
    assert LOOK.read_text() in html, "the look of the playground"
    assert "75.0" in page.cells
    assert "| juice | 75.0 | 75.0 |" in markdown
    assert "left out: too long | 2" in markdown
    assert "Not available: no heads" in markdown
    assert (tmp_path / "figures" / "parametric-methods.png").read_bytes().startswith(b"\x89PNG")
    assert "figures/parametric-methods.png" in markdown


def test_starting_anew_removes_what_another_evaluation_has_written_and_nothing_else(
    tmp_path: Path,
) -> None:
    """Its tables, seeds and pictures would stay beside the new report as if they were its own."""
    out = tmp_path / "out"
    mine = [out / "notes.csv", out / "figures" / "mine.png", out / "seeds" / "3" / "notes.txt"]
    old = [
        *(out / name for name in ("results.json", "report.html", "seeds.csv", "checkpoints.csv")),
        *(out / "seeds" / "1" / name for name in ("results.json", "accuracy.csv")),
        out / "figures" / "checkpoints.png",
    ]
    for path in (*mine, *old):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (out / "report.md").write_text("![A series](figures/checkpoints.png)\n")
    store = Store.open(out, {"seed": 0}, overwrite=True)
    assert sorted(path for path in out.rglob("*") if path.is_file()) == sorted(mine)
    assert not (out / "seeds" / "1").exists()
    store.results |= results(original={"world_capital": 0.5, "average": 0.5})
    store.save()
    write(store)
    assert store.files == ["results.json", "report.md", "report.html", "accuracy.csv"]
    assert {*store.files, "notes.csv"} == {path.name for path in out.iterdir() if path.is_file()}


def test_the_same_results_give_the_same_files(tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        write_report(
            folder,
            sections(
                results(original={"a": 0.25, "average": 0.25}, juice={"a": 0.75, "average": 0.75})
            ),
        )
    names = ("report.md", "report.html", "figures/parametric-methods.png")
    assert all(
        (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        for name in names
    )


@pytest.mark.parametrize("name", ["mini", "inversion"])
def test_the_committed_report_is_what_the_committed_results_say(name: str, tmp_path: Path) -> None:
    """Stored results stay readable, and every number of the page follows from them."""
    folder = Path("docs/results") / name
    results = json.loads((folder / "results.json").read_text())
    write_report(tmp_path, sections(results))
    assert (tmp_path / "report.md").read_text() == (folder / "report.md").read_text()


def test_published_numbers_are_shown_next_to_those_of_the_papers_models() -> None:
    assert published("google/gemma-2-2b", "parametric")["juice"]["world_capital"]["clean"] > 90
    assert published("/models/gemma-2-2b", "context")["cad"]["average"] > 0
    assert published("mini", "parametric") == {}
    made = sections(results("google/gemma-2-2b", juice={"world_capital": 0.5, "average": 0.5}))
    table: Table = next(
        section for section in made if section.title == "Toward the parametric answer"
    ).tables[0]
    printed = next(row for row in table.rows if row[0] == "juice (published)")
    numbers = published("google/gemma-2-2b", "parametric")["juice"]["world_capital"]
    assert printed[2] == f"{numbers['substitution']:.1f}"
    text = next(section for section in made if section.title == "Toward the parametric answer").text
    assert any("ICML 2025" in sentence and "soft cap" in sentence for sentence in text)


def test_what_a_set_costs_ordinary_text_stands_beside_its_heads() -> None:
    head_set = HeadSet.load("head_sets/smollm2-135m-8k-lc100k-mix1-ep2/parametric")
    given, content = results(served={"average": 0.5}), head_set.model_dump(mode="json")
    given["targets"]["parametric"]["head_sets"] = {"served": content}
    chosen = next(one for one in sections(given) if one.title == "What validation chose")
    harm = content["metrics"][f"validation_{content['method']}"]["harm"]
    assert [*harm] == ["0.5", "1", "2"]
    assert chosen.tables[-1].rows == [
        ["served", strength, f"{one['divergence']:.3f}", f"{one['perplexity']:.2f}"]
        for strength, one in harm.items()
    ]


def test_a_cell_with_a_bar_does_not_break_its_row(tmp_path: Path) -> None:
    write_report(tmp_path, [Section("t", tables=[Table(("a", "b"), [["x | y", "line\nbreak"]])])])
    assert "| x \\| y | line break |" in (tmp_path / "report.md").read_text()


def test_a_document_that_is_half_written_is_never_seen(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "out", {"seed": 0})
    store.unit("a", "b", make=lambda: {"x": (1, None, 0.5, float("nan"))})
    found = read_results(tmp_path / "out")
    assert found["a"]["b"] == {"x": [1, None, 0.5, None]}
    assert not (tmp_path / "out" / ".results.json").exists()
    with pytest.raises(KeyboardInterrupt):
        store.unit("a", "c", make=interrupt)
    assert read_results(tmp_path / "out") == found


def interrupt() -> None:
    raise KeyboardInterrupt


def with_answers() -> dict:
    """Return results with two facts, asked under two methods, and a text that must be escaped."""
    made = results(
        original={"world_capital": 0.5, "average": 0.5},
        served={"world_capital": 1.0, "average": 1.0},
    )
    clean = "The capital of Peru is"
    first = {**FACT, "relation": "world_capital", "prompts": {"clean": clean, **FACT["prompts"]}}
    second = {**first, "subject": "<Chad>", "relation": "book_author"}
    made["data"]["test"] = [first, second]
    methods = made["targets"]["parametric"]["methods"]
    for name, right in {"original": False, "served": True}.items():
        answer = " Lima." if right else " Oslo & <b>so on</b>."
        row = [answer, right, 0.25, 0.5]
        methods[name]["answers"] = {"substitution": [row, row], "clean": [row, None]}
    return made


class Items(HTMLParser):
    """Reads the page as a browser without scripts does: the text of every item."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.attributes: list[dict[str, str | None]] = []
        self.depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "details":
            self.depth += 1
            self.texts.append("")
            self.attributes.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag == "details"

    def handle_data(self, data: str) -> None:
        if self.depth:
            self.texts[-1] = " ".join(f"{self.texts[-1]} {data}".split())


def test_every_answer_is_on_the_page_with_its_question_context_and_what_was_expected(
    tmp_path: Path,
) -> None:
    write_report(tmp_path, sections(with_answers()))
    html = (tmp_path / "report.html").read_text()
    page = Items()
    page.feed(html)
    assert len(page.texts) == 3  # one fact has no answer to its clean prompt
    assert page.texts[0] == (
        "Peru, world capital, substitution (1 of 2 right) The capital of Peru is Oslo. The capital"
        " of Peru is Expected: Lima, Ciudad ; the context answer: Oslo method answer verdict p"
        " parametric p context original Oslo & <b>so on</b>. wrong 0.250 0.500 served Lima. right"
        " 0.250 0.500"
    )
    assert "<Chad>" in page.texts[2] or "<Chad>" in page.texts[1]
    assert '<span class="context">The capital of Peru is Oslo.</span>' in html
    assert page.attributes[0] == {
        "class": "item",
        "data-relation": "world capital",
        "data-conflict": "substitution",
        "data-right": "served",
        "data-wrong": "original",
    }
    # Without scripts nothing is hidden but the filter.
    assert html.count(" hidden") == html.count('<form class="filter" hidden>') == 1
    assert "Single answers" not in (tmp_path / "report.md").read_text()


def test_a_page_of_many_prompts_shows_the_first_and_says_so() -> None:
    made = with_answers()
    made["data"]["test"] *= 1000
    for method in made["targets"]["parametric"]["methods"].values():
        method["answers"] = {"substitution": [["", True, None, None]] * 2000}
    section = sections(made)[-1]
    assert len(section.items) == 1500
    assert section.text[0].startswith("2000 prompts")
    assert section.text[1] == "This page shows the first 1,500 prompts."


def test_the_contents_lead_to_every_section(tmp_path: Path) -> None:
    made = with_answers()
    made["targets"]["context"] = made["targets"]["parametric"]
    every = sections(made)
    write_report(tmp_path, every)
    html, markdown = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    linked = re.findall(r'<a href="#([^"]+)">([^<]+)</a>', html)
    titles = dict(re.findall(r'<h[123] id="([^"]+)">([^<]+)</h[123]>', html))
    assert len(titles) == len(every)
    assert [title for _, title in linked] == [section.title for section in every[1:]]
    assert all(titles[place] == title for place, title in linked)
    assert "  - [Text](#text)\n" in markdown
    assert "  - [Text](#text-1)\n" in markdown


def test_the_average_comes_first() -> None:
    table = sections(with_answers())[1].tables[0]
    assert list(table.header) == ["method", "average", "world capital"]
    assert table.rows[1] == ["served", "100.0", "100.0"]
