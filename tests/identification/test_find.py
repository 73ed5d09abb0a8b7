"""One door: the same words find the same head set in Python and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

import juice
from juice.data.example import ConflictExample, examples_sha256, to_json_line
from juice.head_set.head_set import HeadSet
from juice.identification.examples import usable_examples
from juice.identification.options import IdentificationFields, IdentificationOptions
from tests.support.commands import juice as command
from tests.support.marks import FEW_EXAMPLES

pytestmark = FEW_EXAMPLES


@pytest.fixture(scope="module")
def facts() -> list[ConflictExample]:
    """Facts with two answers, the right one first."""
    every = [e for e in juice.read_examples("mini") if len(e.parametric_answer) == 1]
    return [
        e.model_copy(update={"parametric_answer": (*e.parametric_answer, "Nowhere")})
        for e in every[::40][:28]
    ]


@pytest.fixture(scope="module")
def file(facts: list[ConflictExample], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same facts, whose answers stand in no order, as on the hub: the model chooses one."""
    path = tmp_path_factory.mktemp("facts") / "facts.jsonl"
    rows = [json.loads(to_json_line(e)) for e in facts]
    for row in rows:
        row |= {"parametric_answer": row["parametric_answer"][::-1], "scored": "likeliest"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_editors_know_every_option() -> None:
    """Kills: an option that the command has and a type checker refuses in Python."""
    options = {n: f.annotation for n, f in IdentificationOptions.model_fields.items()}
    del options["target"]  # the call's own
    for name, kind in get_type_hints(IdentificationFields).items():
        asked = options.pop(name)
        if get_origin(asked) is tuple:  # of which any sequence is made
            assert get_args(kind) == get_args(asked)[:1]
        else:
            assert kind == asked
    assert not options


def by_command(file: Path, out: Path, *flags: str) -> HeadSet:
    done = command("identify", "--examples", str(file), "--out", str(out), "--force", *flags)
    assert done.returncode == 0, done.stderr
    (folder,) = (out / "mini").iterdir()
    return HeadSet.load(folder)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--target", "parametric"), {"target": "parametric"}),
        pytest.param(
            ("--target", "context", "--method", "probe", "--n-examples", "2", "--alphas-plus", "3"),
            {"target": "context", "method": "probe", "n_examples": 2, "alphas_plus": (3.0,)},
        ),
        pytest.param(
            ("--target", "context", "--protect", "none", "--top-k", "3", "--june", "--seed", "1"),
            {"target": "context", "protect": (), "top_k": 3, "june": True, "seed": 1},
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("--target", "context", "--method", "learned", "--name", "mine", "--penalty", "0.05"),
            {"target": "context", "method": "learned", "name": "mine", "penalty": 0.05},
            marks=pytest.mark.long,
        ),
    ],
)
def test_python_and_the_command_find_the_same_head_set(
    mini: juice.SteeredModel,
    facts: list[ConflictExample],
    file: Path,
    tmp_path: Path,
    flags: tuple[str, ...],
    words: dict[str, Any],
) -> None:
    """Kills: another default, answers in the file's order, betas or a gate left out of one."""
    expected = by_command(file, tmp_path, *flags)
    found = juice.identify(mini, file, **words)
    assert found.model_dump(mode="json") == expected.model_dump(mode="json")
    assert found.scores.sha256() == expected.scores_sha256
    drawn, _ = usable_examples(mini, facts, IdentificationOptions(**words))
    assert found.identification.examples_sha256 == examples_sha256(drawn)
    assert found.betas() is not None
    assert found.validation() is not None


def test_python_and_the_command_tune_alike(
    mini: juice.SteeredModel, file: Path, tmp_path: Path
) -> None:
    shipped = mini.head_sets.get("context")
    made = mini.make_head_set(
        name="mine", target="context", plus=shipped.heads.plus, minus=shipped.heads.minus
    )
    made.save(tmp_path / "mine")
    done = command("tune", str(tmp_path / "mine"), "--validation", str(file))
    assert done.returncode == 0, done.stderr
    expected, tuned = HeadSet.load(tmp_path / "mine"), juice.tune(mini, made, file)
    assert tuned.model_dump(mode="json") == expected.model_dump(mode="json")
    assert tuned.gate() is not None
