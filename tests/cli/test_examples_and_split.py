"""`juice examples` and `juice split`: what they write and report, and a user's mistakes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import juice
from tests.support.commands import invoke
from tests.support.user_data import finetuning, languages


def test_the_command_makes_a_file_that_can_be_read_again(tmp_path: Path) -> None:
    data, out = tmp_path / "rag.csv", tmp_path / "out.jsonl"
    with data.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["q", "passage", "answers", "popularity"])
        writer.writeheader()
        for row in languages(60):
            writer.writerow(
                {
                    "q": row["question"],
                    "passage": row["context"],
                    "answers": json.dumps(row["answers"]),
                    "popularity": 7,
                }
            )
    code, stdout, stderr = invoke(
        "examples",
        str(data),
        "--out",
        str(out),
        "--columns",
        "question=q,context=passage",
        "--json",
    )
    assert code == 0, stderr
    report = json.loads(stdout)
    examples = juice.read_examples(out)
    assert report["n_examples"] == len(examples) >= 4
    assert report["n_rows"] == 60 == report["n_examples"] + sum(report["dropped"].values())
    assert (
        f"{report['dropped']['not_known']} dropped: they ask what the model does not know" in stderr
    )
    assert {e.popularity for e in examples} == {7}
    assert {e.relation for e in examples} == {"name"}
    code, stdout, stderr = invoke(
        "examples",
        str(data),
        "--out",
        str(out),
        "--columns",
        "question=q,context=passage",
        "--limit",
        "50",
        "--force",
    )
    assert (code, stdout) == (0, f"{out}\n"), stderr
    assert " from 50 rows" in stderr


def test_the_command_writes_every_row_or_the_critical_ones(tmp_path: Path) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text(
        "".join(
            json.dumps({**row.values, "id": i}) + "\n"
            for i, row in enumerate(finetuning("Lima", "Oslo", "Rome", "Bonn"))
        )
    )
    code, stdout, stderr = invoke("split", str(data), "--out", str(out), "--json")
    assert code == 0, stderr
    marked = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in marked] == [0, 1, 2, 3]
    assert json.loads(stdout)["n_critical"] == sum(row["context_critical"] for row in marked) == 3
    assert invoke("split", str(data), "--out", str(out), "--drop", "--force")[:2] == (0, f"{out}\n")
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        row for row in marked if row["context_critical"]
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("examples @rows --out @rows", "--force"),
        ("split @rows --out @rows", "--force"),
        ("examples @rows --out @", "is not a file"),
        ("examples @rows --out @rows/x", "cannot write"),
        ("examples @rows --out @out --limit 0", "--limit is 0"),
        ("examples @rows --out @out --columns question", "--columns is 'question'"),
        ("examples @rows --out @out --columns question=x", "column 'x'"),
        ("examples @rows --out @out", "no column context"),
        ("examples @nowhere --out @out", "cannot read"),
        ("split @rows --out @out --share 1.5", "share is 1.5"),
        ("split @rows --out @out", "no column context or input"),
    ],
)
def test_a_mistake_is_reported_in_one_line_before_any_work(
    tmp_path: Path, arguments: str, named: str
) -> None:
    (tmp_path / "rows").write_text('{"question": "q", "answer": "a"}')
    code, stdout, stderr = invoke(
        *arguments.replace("@", f"{tmp_path}/").split(), "--model", "./nowhere"
    )
    assert (code, stdout) == (2, "")
    assert named in " ".join(stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
