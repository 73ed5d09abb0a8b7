"""`juice evaluate`: a user's mistakes, an interrupted run, and the data of the paper."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.commands import interruptible, invoke
from tests.support.marks import FEW_EXAMPLES

pytestmark = FEW_EXAMPLES
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--methods", "juise"), "juise"),
        (("--methods", ","), "is empty"),
        (("--analyses", "all,heads"), "'all'"),
        (("--head-set", "nobody"), "no head set 'nobody'"),
        (("--data", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("--text", "/nowhere.txt"), "/nowhere.txt"),
        (("--templates", "/nowhere.json"), "/nowhere.json"),
        (("--checkpoints", "/nowhere"), "no checkpoint"),
        (("--threads", "0", "--checkpoints", "/nowhere"), "threads is 0; expected 1 to"),
        (("--target", "context", "--head-set", "parametric"), "--target parametric"),
        (("--seeds", "0"), "seeds is 0"),
        (("--methods", "cad,cocoa", "--target", "parametric"), "do not steer toward parametric"),
        (("--methods", "grd", "--target", "context"), "do not steer toward context"),
        (("--limit", "0"), "limit is 0"),
        *(
            ((*given, "--checkpoints", "/nowhere"), f"leave {given[0]} out")
            for given in (
                *(("--seeds", "2"), ("--methods", "june"), ("--analyses", "heads")),
                *(("--head-set", "x"), ("--model", "x"), ("--templates", "x"), ("--text", "x")),
                *(("--validation", "x"), ("--examples", "x"), ("--target", "context")),
                *(("--relation", "x"), ("--head-sets", "x"), ("--chat-template", "none")),
                *(("--top-k", "3"), ("--n-examples", "3")),
            )
        ),
        (
            ("--checkpoints", "/nowhere", "--text", "x", "--top-k", "3"),
            "leave --text, --top-k out",
        ),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_and_leaves_no_report(
    tmp_path: Path, arguments: tuple[str, ...], named: str
) -> None:
    code, output, error = invoke("evaluate", "--out", str(tmp_path / "out"), *arguments)
    assert code == 2, error
    assert named in error
    assert "Traceback" not in error + output
    assert not (tmp_path / "out" / "report.md").exists()


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    code, _, error = invoke("evaluate", "--out", str(tmp_path), "--limit", "2")
    assert code == 2
    assert "holds no results.json" in error
    (tmp_path / "results.json").write_text("{}")
    assert "not of the format" in invoke("evaluate", "--out", str(tmp_path), "--limit", "2")[2]


@pytest.mark.long
def test_an_interrupted_run_explains_how_to_resume_and_does(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("evaluate", "--out", str(out), "--limit", "6", "--methods", "original,prompt")
    process = interruptible(*arguments)
    deadline = time.monotonic() + 120
    while (
        not (out / "results.json").exists()
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 130, error
    assert "run the same command again" in error
    assert json.loads((out / "results.json").read_text())["is_complete"] is False
    code, output, error = invoke(*arguments)
    assert code == 0, error
    assert "were already in" in error
    assert "report.html" in output
    assert (out / "report.html").exists()


@pytest.mark.long
def test_several_seeds_are_summed_up_on_the_terminal_in_the_report_and_as_csv(
    tmp_path: Path,
) -> None:
    data, out = tmp_path / "few.jsonl", tmp_path / "out"
    lines = (ROOT / "juice" / "models" / "mini" / "examples.jsonl").read_text().splitlines()
    data.write_text("\n".join(lines[:40]) + "\n")
    chosen = ("--target", "context", "--methods", "original,served", "--limit", "5")
    arguments = ("evaluate", "--out", str(out), "--data", str(data), *chosen, "--seeds", "2")
    code, output, error = invoke(*arguments)
    assert code == 0, error
    cells = json.loads((out / "results.json").read_text())["seeds"]["targets"]["context"]["served"]
    cell = cells["table"]["average"]["coherent"]
    lines = output.partition("Over 2 seeds, context\n")[2].splitlines()
    (shown,) = [line for line in lines if line.startswith("served ")][:1]
    assert f"worst {100 * cell['worst']:.1f}" in shown
    assert f"{100 * cell['mean']:.1f} (" in shown
    assert "### Over 2 seeds, context" in (out / "report.md").read_text()
    code, output, error = invoke(*arguments, "--json")
    assert code == 0, error
    assert {"accuracy.csv", "answers.csv", "harm.csv", "seeds.csv"} <= set(
        json.loads(output)["files"]
    )


@pytest.mark.skipif(
    "JUICE_TEST_DATA" not in os.environ,
    reason="JUICE_TEST_DATA names no folder of third-party samples (paraconflict, memo_trap)",
)
@pytest.mark.parametrize(
    ("name", "target"), [("paraconflict", "parametric"), ("memo_trap", "context")]
)
# The data has duplicates, and rows that mini cannot score.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fifty_facts_of_the_papers_data_are_evaluated(
    tmp_path: Path, name: str, target: str
) -> None:
    """mini knows few of them: what matters is that all of it runs and that the report states it."""
    data = str(Path(os.environ["JUICE_TEST_DATA"]) / name)
    code, output, error = invoke(
        "evaluate",
        "--out",
        str(tmp_path),
        "--data",
        data,
        "--target",
        target,
        "--limit",
        "50",
        "--methods",
        "original,cad,juice",
    )
    assert code == 0, error + output
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["data"]["test"]) == 50
    assert results["data"]["left_out"]
    report = (tmp_path / "report.md").read_text()
    assert "left out: " in report
    assert "original" in results["targets"][target]["methods"]
    # The paper's probes may find no heads for facts that the model hardly knows, and say so.
    is_left_out = f"juice toward the {target} answer is left out: no heads" in report
    assert is_left_out != ("juice" in results["targets"][target]["methods"])
