"""The command line as a process: where its output goes, and how a user's mistakes end."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path

import pytest
import typer.main

from juice.cli.main import app
from juice.head_set.head_set import HeadSet
from tests.support import tiny
from tests.support.architectures import build
from tests.support.commands import interruptible, juice
from tests.support.serving import CONFLICT, within

STATEMENT = "The name of the capital city of France is"
FACT = {
    "subject": "France",
    "parametric_answer": "Paris",
    "context_answer": "Rome",
    "prompts": {
        "clean": STATEMENT,
        "substitution": f"{STATEMENT} Rome. {STATEMENT}",
        "coherent": (
            "The capital city of France is Rome. Question: What is the capital city of France?"
            " Answer: The capital is"
        ),
    },
}


def test_only_the_answer_goes_to_standard_output() -> None:
    done = juice("generate", STATEMENT, "--max-tokens", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith("Paris")
    assert done.stderr == ""


def test_compare_shows_the_answers_of_context_and_memory() -> None:
    done = juice("generate", CONFLICT, "--compare", "--json", "--max-tokens", "4")
    answers = json.loads(done.stdout)
    assert answers["context"]["text"].startswith(" Cairo")
    assert answers["parametric"]["text"].startswith(" Lima")
    assert answers["parametric"]["steering"]["applied"] is True
    assert answers["none"]["steering"]["applied"] is False


def test_helps_show_no_default_that_nobody_could_give() -> None:
    """Kills: `(PydanticUndefined by default)` where each run makes a new default."""
    commands = typer.main.get_command(app).commands
    helps = [str(param.help) for command in commands.values() for param in command.params]
    assert len(helps) > 100
    assert not [text for text in helps if "Undefined" in text or "factory" in text]


@pytest.mark.parametrize("columns", ["60", "90"])
def test_compare_shows_columns_on_a_terminal(columns: str) -> None:
    done = juice(
        *("generate", STATEMENT, "--context", f"{STATEMENT} Rome.", "--compare"),
        *("--max-tokens", "4"),
        FORCE_COLOR="1",
        COLUMNS=columns,
    )
    assert done.returncode == 0, done.stderr
    plain = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)
    cells = [[each.strip() for each in line.split("┃")[1:-1]] for line in plain.splitlines()]
    assert ["Memory", "Unsteered", "Context"] in cells
    answers = [[each.strip() for each in line.split("│")[1:-1]] for line in plain.splitlines()]
    (said,) = [answer for answer in answers if answer and answer[0].startswith("┃ Paris")]
    assert said[2].startswith("┃ Rome"), "marked where they part"
    bars = [re.fullmatch(r"([█▏]+) *(\d+%|<1%) \S+", answer[0]) for answer in answers if answer]
    assert sum(map(bool, bars)) == 3, "each bar on one line with its candidate"
    assert "Unsteered, this model" in plain
    assert "by more than 1 nat" in " ".join(plain.split())
    assert "\x1b[30;106m" in done.stdout, "what the context makes likelier has its colour"


FILES = {
    "ok": json.dumps(FACT),
    "missing": json.dumps({k: v for k, v in FACT.items() if k != "context_answer"}),
    "empty": json.dumps({**FACT, "parametric_answer": " "}),
    "misspelt": json.dumps({**FACT, "promts": {}}),
    "same": json.dumps({**FACT, "context_answer": "Paris"}),
    "not_json": "{not json",
    "blank": "\n",
}
# Each mistake: the arguments (@name is one of FILES, @@ their folder), the exit code, and a part of
# the error.
MISTAKES = {
    "examples_missing_field": ("identify --examples @missing --out @@/sets", 2, "context_answer"),
    "examples_empty_answer": ("identify --examples @empty --out @@/sets", 2, "must not be empty"),
    "examples_unknown_field": ("identify --examples @misspelt --out @@/sets", 2, "promts"),
    "examples_no_conflict": ("identify --examples @same --out @@/sets", 2, "no conflict"),
    "examples_not_json": ("identify --examples @not_json --out @@/sets", 2, "not_json:1"),
    "examples_empty_file": ("identify --examples @blank --out @@/sets", 2, "is empty"),
    "examples_no_file": ("identify --examples @@/nowhere --out @@/sets", 2, "cannot read"),
    "fewer_examples_than_asked": (
        "identify --examples @ok --n-examples 4 --out @@/sets",
        2,
        "4 examples were requested, 1",
    ),
    "top_k_zero": ("identify --top-k 0 --out @@/sets", 2, "top_k is 0"),
    "alphas_of_the_wrong_sign": ("identify --alphas-plus 1,-3 --out @@/sets", 2, "alphas_plus"),
    "alphas_not_numbers": ("identify --alphas-minus=a,b --out @@/sets", 2, "--alphas-minus"),
    "unknown_relation": ("identify --relation shoe_size --out @@/sets", 2, "shoe_size"),
    "out_is_a_file": ("identify --out @ok", 2, "cannot write"),
    "out_cannot_be_made": ("identify --out /proc/nowhere", 2, "cannot write"),
    "model_folder_missing": ("generate x --model ./nowhere", 2, "there is no such folder"),
    "unknown_model": ("generate x --model no/such-model", 2, "cannot load the model"),
    "unknown_head_set": (
        "generate x --steer context --head-set nothing",
        2,
        "no head set 'nothing'",
    ),
    "head_set_of_the_other_target": (
        "generate x --steer context --head-set parametric",
        2,
        "steers toward parametric",
    ),
    "empty_prompt": ("generate ''", 2, "prompt is empty"),
    "prompt_too_long": (f"generate '{'word ' * 2000}'", 2, "the context has 1024"),
    "beta_of_the_wrong_sign": ("generate x --steer context --beta-minus 1", 2, "beta_minus"),
    "steering_without_a_target": ("generate x --beta-minus -2", 2, "steer is none"),
    "head_set_without_a_target": ("generate x --head-set parametric", 2, "steer is none"),
    "compare_with_a_head_set": ("generate x --compare --head-set parametric", 2, "--compare"),
    "name_that_is_not_a_name": (
        "identify --target context --name 'my set' --out @@/sets",
        2,
        "'my set'",
    ),
    "alphas_infinite": ("identify --alphas-plus inf,1 --out @@/sets", 2, "finite"),
    "chat_template_no_file": (
        "generate x --chat-template @@/nowhere",
        2,
        "cannot read the chat template",
    ),
    "inspect_no_head_set": ("inspect @@", 2, "head_set.json"),
    "tune_no_head_set": ("tune @@ --validation mini", 2, "head_set.json"),
    "pull_without_a_network": ("pull no/such-set --out @@/sets", 2, "HF_HUB_OFFLINE"),
    "select_no_scores": ("select @ok", 2, "cannot read the scores"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_line_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    for file, content in FILES.items():
        (tmp_path / file).write_text(content)
    arguments, code, named = MISTAKES[name]
    done = juice(*shlex.split(arguments.replace("@@", str(tmp_path)).replace("@", f"{tmp_path}/")))
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert [
        line for line in done.stderr.splitlines() if "error" in line
    ] == done.stderr.splitlines()[-1:]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)


def test_a_model_without_attention_heads_is_refused_in_one_clear_line(tmp_path: Path) -> None:
    done = juice("generate", "x", "--model", str(tiny.save(tmp_path, build("Mamba"))))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no attention heads" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_model_without_a_chat_template_is_refused_in_one_clear_line(tmp_path: Path) -> None:
    model = tiny.save(tmp_path, tiny.tiny_model("llama"))
    done = juice("generate", "x", "--model", str(model), "--chat-template", "default")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "has no chat template; give a Jinja file" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_an_interrupted_identification_writes_no_set_and_goes_on_where_it_stopped(
    tmp_path: Path,
) -> None:
    what = ("--method", "probe", "--no-tune", "--target", "context", "--alphas-plus", "1,3")
    out, other = tmp_path / "sets", tmp_path / "other"
    arguments = ("identify", *what, "--out", str(out))
    process = interruptible(*arguments)
    try:
        within(60, lambda: list(tmp_path.glob(".juice-*.json")), "some heads are scored")
        assert process.poll() is None, "identification ended before it could be interrupted"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, output) == (130, "")
    assert "Traceback" not in errors
    assert "no head set was written" in errors.splitlines()[-1]
    assert "run the same command again" in errors.splitlines()[-1]
    assert not out.exists()  # an empty folder would hide the shipped sets
    assert [path.name for path in tmp_path.iterdir()] == [".juice-identify-mini-context.json"]
    done = juice(*arguments)
    assert done.returncode == 0, done.stderr
    assert "results came from an interrupted run" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["sets"]
    assert juice("identify", *what, "--out", str(other)).returncode == 0
    found, expected = (HeadSet.load(path / "mini" / "context") for path in (out, other))
    assert found.model_dump() == expected.model_dump()
    assert found.scores_sha256 == expected.scores_sha256
