"""A head set is named by its folder, its scores file or its name, wherever a command takes one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from juice.cli.tune import answer_effect
from juice.errors import HeadSetError, HeadSetNotFoundError
from juice.head_set.head_set import HeadSet
from juice.head_set.library import find_head_set, find_scores
from tests.support.commands import juice
from tests.support.head_sets import MEASURED, change, content, scores_in
from tests.support.serving import CONFLICT

SHIPPED = Path("head_sets")
WAYS = (
    "head_sets/mini/context",
    str(scores_in(Path("head_sets/mini/context"))),
    "mini/context",
)


@pytest.mark.parametrize("given", WAYS)
def test_every_way_names_the_same_set(given: str) -> None:
    folder, head_set = find_head_set(given, SHIPPED)
    assert folder.resolve() == (SHIPPED / "mini" / "context").resolve()
    assert head_set.model_dump() == HeadSet.load(SHIPPED / "mini" / "context").model_dump()


@pytest.mark.parametrize("given", WAYS)
def test_inspect_and_select_take_every_way(given: str) -> None:
    shipped = HeadSet.load(SHIPPED / "mini" / "context")
    shown = juice("inspect", given, "--head-sets", str(SHIPPED.resolve()), "--json")
    assert json.loads(shown.stdout)["scores_sha256"] == shipped.scores_sha256
    top_k = str(shipped.identification.top_k)
    sets = str(SHIPPED.resolve())
    chosen = juice("select", given, "--head-sets", sets, "--top-k", top_k, "--json")
    assert json.loads(chosen.stdout)["heads"] == shipped.heads.model_dump(mode="json")


@pytest.mark.parametrize("given", [*WAYS, "context"])
def test_generate_takes_every_way_but_the_model_in_the_name(given: str) -> None:
    options = ("--head-sets", str(SHIPPED.resolve()), "--max-tokens", "2", "--json")
    done = juice("generate", CONFLICT, "--steer", "context", "--head-set", given, *options)
    if given == "mini/context":  # the loaded model says whose
        assert (done.returncode, "no head set 'mini/context'" in done.stderr) == (2, True)
        return
    assert json.loads(done.stdout)["steering"]["head_set"] == "context"


def test_a_set_of_a_folder_steers_whatever_the_folder_of_sets_holds(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED / "mini" / "parametric", tmp_path / "mine")
    change(tmp_path / "mine", name="mine")
    (tmp_path / "none").mkdir()
    options = ("--head-sets", str(tmp_path / "none"), "--max-tokens", "3", "--json")
    steer = ("--steer", "parametric", "--head-set", str(tmp_path / "mine"))
    done = json.loads(juice("generate", CONFLICT, *steer, *options).stdout)
    assert done["steering"]["head_set"] == "mine"
    assert done["text"].startswith(" Lima")


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_a_name_wins_over_a_file_or_folder_called_the_same(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    place = tmp_path / "sets" / "mini" / "context"
    shutil.copytree(SHIPPED / "mini" / "context", place)
    heads = HeadSet.load(place).heads.model_dump()
    betas = {"plus": 1.0, "minus": 0.0}
    one = {"heads": {"plus": heads["plus"][:1], "minus": []}, "betas": betas}
    change(place, methods={"juice": one})
    make(tmp_path / "context")
    steer = ("--steer", "context", "--head-set", "context", "--head-sets", str(tmp_path / "sets"))
    done = juice("generate", "Peru", *steer, "--max-tokens", "1", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["steering"]["n_heads"] == 1


def test_a_file_of_scores_alone_can_be_chosen_from(tmp_path: Path) -> None:
    alone = tmp_path / "some.safetensors"
    shutil.copy(scores_in(SHIPPED / "mini" / "context"), alone)
    assert find_scores(alone).target == "context"
    assert juice("select", str(alone), "--top-k", "1").returncode == 0


def test_what_cannot_be_found_is_one_line_that_says_what_there_is(tmp_path: Path) -> None:
    for model in ("one", "two"):
        shutil.copytree(SHIPPED / "mini" / "context", tmp_path / model / "context")
    with pytest.raises(HeadSetNotFoundError, match="give one/context or two/context"):
        find_head_set("context", tmp_path)
    with pytest.raises(HeadSetNotFoundError, match=r"a name in .*one/context, two/context"):
        find_head_set("nothing", tmp_path)
    with pytest.raises(HeadSetNotFoundError, match=r"has no head_set\.json"):
        find_head_set(tmp_path, tmp_path)
    (tmp_path / "one" / "context" / "head_set.json").write_text("{")
    with pytest.raises(HeadSetError, match="not JSON"):
        find_head_set("one/context", tmp_path)


def test_inspect_maps_the_scores_and_marks_the_chosen_heads() -> None:
    found = HeadSet.load(SHIPPED / "mini" / "context")
    shown = juice("inspect", str(SHIPPED / "mini" / "context")).stdout.splitlines()
    start = next(i for i, line in enumerate(shown) if line.startswith("all heads"))
    rows = {int(line[:9]): line[10:] for line in shown[start + 1 : start + 7]}
    for mark, heads in (("[]", found.heads.plus), ("()", found.heads.minus)):
        for head in heads:
            cell = rows[head.layer][3 * head.index : 3 * head.index + 3]
            assert cell[0] + cell[2] == mark
    assert sum(row.count("[") for row in rows.values()) == len(found.heads.plus)
    scores = found.scores.plus.mean(0)
    layer, head = divmod(int(scores.abs().argmax()), scores.shape[1])
    assert rows[layer][3 * head + 1] == "█"
    # The mini model's context is steered in layers 3 to 5.
    assert [row[9] for row in shown[start + 1 : start + 7]] == [" ", " ", " ", "│", "│", "│"]
    assert any(line.startswith("clean run") and "layers 3 to 5: 3 of 6" in line for line in shown)
    legend = " ".join(" ".join(shown[start + 8 :]).split())
    assert "[ ] chosen, to be added; ( ) chosen, to be taken away" in legend
    assert "█ above zero, toward the context; █ and - below zero, toward memory" in legend
    assert "│ the clean run goes along in these layers" in legend


def test_what_a_set_could_not_reach_and_what_is_beyond_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    changed = {**MEASURED, "allowed": 0.04}
    measured = content(metrics={"validation_juice": changed})
    answer_effect(HeadSet.parse(measured, "test"), "juice")
    said = " ".join(capsys.readouterr().out.split())
    assert "strength 1: ordinary text diverges by 0.044 nats a token" in said
    assert said.count("(beyond the 0.04 allowed)") == 1
    assert "0.95 of the conflicts would be won at 0.210 nats a token (--max-divergence)" in said


def test_inspect_shows_the_harm_and_its_page_the_line_as_well(tmp_path: Path) -> None:
    metrics = {"validation_juice": MEASURED}
    HeadSet.parse(content(metrics=metrics), "test").save(tmp_path / "own")
    page = tmp_path / "page.html"
    shown = juice("inspect", str(tmp_path / "own"), "--html", str(page))
    assert shown.returncode == 0, shown.stderr
    said = " ".join(shown.stdout.split())
    assert "strength 1: ordinary text diverges by 0.044 nats a token, perplexity x 1.07" in said
    assert "strength 2: ordinary text diverges by 0.179 nats a token, perplexity x 1.32" in said
    assert "juice keeps clean 0.95 -> 0.80, irrelevant 0.90 -> 0.20 (should not change)" in said
    html = page.read_text()
    for strength, harm in MEASURED["harm"].items():
        cells = (strength, f"{harm['divergence']:.3f}", f"{harm['perplexity']:.3f}")
        assert re.search(r"\s*".join(f"<td[^>]*>{re.escape(c)}</td>" for c in cells), html)
    assert "accuracy against harm" in html
    assert html.count("data:image/png;base64,") == 1
    without = {"validation_juice": {**MEASURED, "harm": {}, "line": [], "allowed": None}}
    HeadSet.parse(content(metrics=without), "test").save(tmp_path / "old")
    assert (
        "diverges"
        not in juice("inspect", str(tmp_path / "old"), "--html", str(page), "--force").stdout
    )
    assert "data:image" not in page.read_text()


@pytest.mark.parametrize(
    ("by_relation", "said"),
    [
        ({"sport": [0.5, 9], "author": [0.25, 4]}, "2 of 2 relations"),
        (
            {"sport": [0.5, 9], "capital": [-0.125, 8], "author": [0.0, 4]},
            "1 of 3 relations; no gain: author +0.00, capital -0.12",
        ),
        ({"sport": [0.5, 9]}, "only the relation sport: on others expect less"),
        ({}, None),
    ],
)
def test_inspect_says_which_relations_a_set_covers(
    tmp_path: Path, by_relation: dict[str, list[float]], said: str | None
) -> None:
    metrics = {"validation_juice": {**MEASURED, "by_relation": by_relation}}
    HeadSet.parse(content(metrics=metrics), "test").save(tmp_path / "one")
    shown = " ".join(juice("inspect", str(tmp_path / "one")).stdout.split())
    assert (f"juice covers {said}" in shown) if said else ("covers" not in shown)


def test_inspect_wraps_long_facts_at_words_on_a_terminal() -> None:
    plain = [
        re.sub(r"\x1b\[[\d;]*m", "", line)
        for line in juice(
            "inspect", str(SHIPPED / "mini" / "context"), FORCE_COLOR="1", COLUMNS="60"
        ).stdout.splitlines()
    ]
    at = next(i for i, line in enumerate(plain) if line.startswith("juice did"))
    assert plain[at + 1].startswith(" " * 14)
    assert len(plain[at]) <= 60
    whole = f"{plain[at]} {plain[at + 1].strip()}"
    assert "coherent" in whole


@pytest.mark.parametrize("command", ["select", "inspect"])
@pytest.mark.parametrize("folder", ["head_sets", "head_sets/mini"])
def test_a_folder_of_sets_is_refused_in_words(command: str, folder: str) -> None:
    done = juice(command, folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no head_set.json; give the folder of one head set" in done.stderr
    assert "Errno" not in done.stderr


def test_doctor_lists_the_models_own_sets_and_counts_the_others() -> None:
    done = juice("doctor", "--head-sets", str(SHIPPED.resolve()))
    assert "head set        context (toward context" in done.stdout
    assert "gemma" not in done.stdout
    n_others = len([each for each in SHIPPED.glob("*/*/") if each.parent.name != "mini"])
    assert n_others > 3
    assert done.stdout.rstrip().endswith(f"{n_others} for other models")
    found = json.loads(juice("doctor", "--head-sets", str(SHIPPED.resolve()), "--json").stdout)
    assert (found["unfit_head_sets"], found["n_foreign_head_sets"]) == ({}, n_others)
