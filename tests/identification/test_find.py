"""One door: the same words find the same head set in Python and on the command line."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

import juice
from juice.data.example import ConflictExample, examples_sha256, fact_keys, to_json_line
from juice.files import LOOK
from juice.head_set.head_set import HeadSet
from juice.identification.examples import usable_examples
from juice.identification.options import IdentificationFields, IdentificationOptions
from tests.support import little
from tests.support.commands import juice as juice_command
from tests.support.marks import FEW_EXAMPLES

LITTLE_IS_WON = pytest.mark.filterwarnings("ignore:toward .* are won where:UserWarning")
# The command, a process of its own, reads little text and tries few betas, too.
pytestmark = [FEW_EXAMPLES, LITTLE_IS_WON, pytest.mark.usefixtures("little_text", "few_betas")]


def facts_of(n: int) -> list[ConflictExample]:
    """Return facts with two answers, the right one first."""
    every = [e for e in juice.read_examples("mini") if len(e.parametric_answer) == 1]
    return [
        e.model_copy(update={"parametric_answer": (*e.parametric_answer, "Nowhere")})
        for e in every[:: len(every) // n][:n]
    ]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return juice_command(*arguments, program=little.COMMAND)


ATTRIBUTION = ("--method", "attribution")
CONTEXT = ("--target", "context", "--n-examples", "2")
PROBES = (*CONTEXT, "--method", "probe", "--alphas-plus", "3")
# Few facts show little gain within the harm that is allowed by default.
FREER = (*ATTRIBUTION, "--max-divergence", "1", "--protect", "unknown,clean")
FREER_WORDS = {"method": "attribution", "max_divergence": 1.0, "protect": ("unknown", "clean")}
FEW, ENOUGH = facts_of(10), facts_of(48)  # to tune on, after those that find heads


def written(facts: list[ConflictExample], folder: Path) -> Path:
    """Write facts whose answers stand in no order, as on the hub: the model chooses one."""
    path = folder / "facts.jsonl"
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
        if name == "budget":  # which may be a text, such as 5m
            assert kind == asked | float
        elif get_origin(asked) is tuple:  # of which any sequence is made
            assert get_args(kind) == get_args(asked)[:1]
        else:
            assert kind == asked
    assert not options


def by_command(file: Path, out: Path, *flags: str) -> HeadSet:
    done = command("identify", "--examples", str(file), "--out", str(out), "--force", *flags)
    assert done.returncode == 0, done.stderr
    (folder,) = (out / "mini").iterdir()
    return HeadSet.load(folder)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(FEW, tmp_path_factory.mktemp("facts"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return where the command keeps a head set of a few heads, and what it says."""
    out = tmp_path_factory.mktemp("saved")
    file = written(ENOUGH, out)
    words = ("--target", "parametric", "--html", str(out / "page.html"), "--json", *FREER)
    done = command("identify", "--examples", str(file), "--out", str(out / "sets"), *words)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["path"] == str(out / "sets" / "mini" / "parametric")
    assert (found["saved"], found["not_saved_because"]) == (True, None)
    return out, done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param((), {"target": "parametric", **FREER_WORDS}, marks=pytest.mark.long),
        pytest.param(
            (*PROBES, "--june"),
            {
                "target": "context",
                "method": "probe",
                "n_examples": 2,
                "alphas_plus": (3.0,),
                "june": True,
            },
            marks=pytest.mark.long,
        ),
        (
            (*ATTRIBUTION, *CONTEXT, "--top-k", "3", "--no-tune"),
            {
                "method": "attribution",
                "n_examples": 2,
                "target": "context",
                "top_k": 3,
                "tune": False,
            },
        ),
        pytest.param(
            (*ATTRIBUTION, *CONTEXT, "--protect", "none", "--top-k", "3"),
            {
                "method": "attribution",
                "n_examples": 2,
                "target": "context",
                "protect": (),
                "top_k": 3,
            },
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("--target", "context", "--method", "learned", "--name", "mine", "--penalty", "0.05"),
            {"target": "context", "method": "learned", "name": "mine", "penalty": 0.05},
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("--target", "context", "--max-divergence", "0.1", "--seed", "1"),
            {"target": "context", "max_divergence": 0.1, "seed": 1},
            marks=pytest.mark.long,
        ),
    ],
)
def test_python_and_the_command_find_the_same_head_set(
    mini: juice.SteeredModel,
    file: Path,
    saved: tuple[Path, str],
    tmp_path: Path,
    flags: tuple[str, ...],
    words: dict[str, Any],
) -> None:
    """Kills: another default, answers in the file's order, betas or a gate left out of one."""
    kept = saved[0] / "sets" / "mini" / "parametric"
    facts, source = (FEW, file) if flags else (ENOUGH, saved[0] / "facts.jsonl")
    expected = by_command(file, tmp_path, *flags) if flags else HeadSet.load(kept)
    found = juice.identify(mini, source, **words)
    assert found.model_dump(mode="json") == expected.model_dump(mode="json")
    assert found.scores.sha256() == expected.scores_sha256
    drawn, _ = usable_examples(mini, facts, IdentificationOptions(**words))
    assert found.identification.examples_sha256 == examples_sha256(drawn)
    assert {*fact_keys(drawn)} < {*found.facts} <= {*fact_keys(facts)}
    is_tuned = words.get("tune", True)
    assert (found.betas() is not None) is is_tuned
    assert (found.validation() is not None) is is_tuned


def test_the_command_saves_a_set_that_generate_and_inspect_use(
    saved: tuple[Path, str], tmp_path: Path
) -> None:
    out, said = saved
    sets = str(out / "sets")
    folder = out / "sets" / "mini" / "parametric"
    head_set = HeadSet.load(folder)
    assert head_set.identification.method == "attribution"
    assert not head_set.validation().is_weak
    assert head_set.betas() is not None
    assert "serve parametric with --head-sets" in said
    prompts = FEW[0].prompts
    generated = command(
        "generate", prompts["substitution"], "--steer", "parametric", "--head-sets", sets, "--json"
    )
    assert json.loads(generated.stdout)["steering"]["applied"] is True
    compared = command("generate", prompts["clean"], "--compare", "--head-sets", sets, "--json")
    assert set(json.loads(compared.stdout)) == {"none", "parametric"}
    assert "no head set 'context'" in compared.stderr
    page = (out / "page.html").read_text()
    found = json.loads((folder / "head_set.json").read_text())
    layer, index = found["methods"]["juice"]["heads"]["plus"][0]
    assert f"L{layer}H{index}" in page
    assert "data:image/png;base64," in page
    for strength, harm in head_set.validation().harm.items():
        assert f"strength {strength}: ordinary text diverges by {harm}" in page
    assert LOOK.read_text() in page, "the look of the playground"
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page), "it needs nothing else"
    shown = command("inspect", str(folder), "--plot", str(tmp_path / "scores.png"))
    assert "- heads" in shown.stdout
    for strength, harm in head_set.validation().harm.items():
        said_here = f"strength {strength}: ordinary text diverges by {harm}"
        assert said_here in " ".join(shown.stdout.split())
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")


def test_a_set_that_breaks_clean_prompts_is_not_saved_unless_it_is_forced(
    file: Path, tmp_path: Path
) -> None:
    """The paper's tuning looks at conflicts alone, and toward the context clean prompts break.

    With `--force`, such words save a set above.
    """
    place = ("--examples", str(file), "--out", str(tmp_path / "sets"))
    refused = command("identify", *place, *PROBES, "--top-k", "5", "--accepted-loss", "0", "--json")
    assert refused.returncode == 1
    assert "context: not saved, because it breaks clean prompts, which need no steering" in (
        " ".join(refused.stderr.split())
    )
    assert "--force" in refused.stderr
    assert not (tmp_path / "sets").exists()
    told = {one["name"]: one for one in json.loads(refused.stdout)}["context"]
    assert not told["saved"]
    before, after = re.findall(
        r"clean prompts.* \((\S+) -> (\S+) right", told["not_saved_because"]
    )[0]
    assert float(after) < float(before)
    forced = command("identify", *place, *PROBES, "--top-k", "5", "--accepted-loss", "0", "--force")
    assert forced.returncode == 0, forced.stderr
    assert "came from an interrupted run" in forced.stderr, "it was computed again"
    assert [*(tmp_path / "sets").rglob("context")]


def test_validation_examples_are_read_before_a_model_is_loaded(file: Path, tmp_path: Path) -> None:
    """The model is not there either, and takes longer to load than a file to read."""
    words = (
        "--examples",
        str(file),
        "--model",
        str(tmp_path / "model"),
        "--validation",
        "/no.jsonl",
    )
    done = command("identify", *words, "--out", str(tmp_path / "sets"))
    assert (done.returncode, "/no.jsonl" in done.stderr) == (2, True), done.stderr


@pytest.mark.long
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
    assert tuned.betas() is not None
    assert tuned.validation().harm["1"].divergence <= 2 * IdentificationOptions().allowed
