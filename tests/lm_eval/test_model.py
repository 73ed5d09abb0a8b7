"""The model `juice` of the lm-evaluation-harness, as the harness runs it.

Unsteered, its numbers are those of the harness's own class `hf`; steered, those of the two runs of
the definition.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import juice
from tests.support import oracle
from tests.support.commands import juice as forked

ROOT = Path(__file__).parents[2]
MINI = ROOT / "juice" / "models" / "mini"
# Where the harness keeps data sets is read at import.
PROGRAM = """
import os, sys
os.environ["HF_DATASETS_CACHE"] = sys.argv.pop()
from tests.support import lm_eval_runs
lm_eval_runs.main()
"""
KINDS = ("multiple_choice", "generate_until", "loglikelihood_rolling")
N_NEW = 8
# float32 sums of up to a thousand log-probabilities, in batches of different shapes.
TOLERANCE = {"rel": 1e-5, "abs": 2e-4}
TASKS = {
    "multiple_choice": {
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "generate_until": {
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["."], "max_gen_toks": N_NEW},
        "metric_list": [{"metric": "exact_match"}],
    },
    "loglikelihood_rolling": {
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}

MISTAKES = (
    # What is wrong with the steering is said before a model is loaded.
    ({"pretrained": "/no/model", "steer": "contxt"}, "steer is 'contxt'; expected one of"),
    ({"steer": "context", "head_set": "nobody"}, "no head set 'nobody'"),
    ({"max_length": 1024}, "expected 1 to 1023"),
    ({"steer": "context", "gate": "auto"}, "leave gate out for rolling tasks"),
    ({"steer": "context", "method": "cad"}, "method cad needs the context"),
    ({"steer": "context", "strength": [1, 0.5]}, "give strength as one number"),
)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Return ten conflicts; the last one's text is longer than the model's context."""
    made = [
        {
            # One in five has no context, which a gate leaves alone.
            "prompt": e.prompts["clean" if i % 5 == 4 else "substitution"],
            "choices": [f" {e.parametric_answer[0]}", f" {e.context_answer[0]}"],
            "label": 0,
            "answer": e.parametric_answer[0],
            "text": e.prompts["coherent"],
        }
        for i, e in enumerate(juice.read_examples("mini")[100:700:60])
    ]
    made[0]["prompt"] += " "  # the harness moves it to the choices
    made[-1]["text"] = (MINI / "plain_text.txt").read_text().replace("\n", " ")
    return made


@pytest.fixture(scope="module")
def folder(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a task of each kind, on the rows."""
    made = tmp_path_factory.mktemp("tasks")
    (made / "rows.json").write_text(json.dumps(rows))
    for kind in KINDS:
        task = {
            "task": kind_name(kind),
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(made / "rows.json")}},
            "test_split": "test",
            "output_type": kind,
            **TASKS[kind],
        }
        (made / f"{kind}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return made


def kind_name(kind: str) -> str:
    return f"conflict_{kind}"


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the models answer, by run and kind of task, and what mistakes are told."""
    every = [kind_name(kind) for kind in KINDS]
    # The harness's class sees one token more, see JuiceLM.
    args = {
        "hf": {"pretrained": str(MINI), "dtype": "float32", "max_length": 1023},
        "none": {"pretrained": "mini"},
        "context": {"pretrained": "mini", "steer": "context", "head_sets": "head_sets"},
        "gated": {"pretrained": "mini", "steer": "context", "gate": "auto"},
    }
    runs: dict[str, dict[str, Any]] = {
        name: {
            "model": "hf" if name == "hf" else "juice",
            "model_args": arg,
            "batch_size": 4,
            "tasks": every[:2] if name == "gated" else every,
        }
        for name, arg in args.items()
    }
    for name in ("hf", "none"):
        runs[f"{name}_chat"] = {**runs[name], "tasks": every[:2], "apply_chat_template": True}
    for i, (mistake, _) in enumerate(MISTAKES):
        runs[f"mistake_{i}"] = {"model": "juice", "model_args": mistake, "tasks": every[-1:]}
    cache = str(tmp_path_factory.mktemp("cache"))
    done = forked(str(folder), json.dumps(runs), cache, program=PROGRAM, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    return {
        name: {task.removeprefix("conflict_"): each for task, each in tasks.items()}
        for name, tasks in answers.items()
    }


@pytest.fixture(scope="module")
def model() -> Iterator[juice.SteeredModel]:
    with juice.load("mini", head_sets="head_sets") as loaded:
        yield loaded


def harness(
    *arguments: str | Path, cache: Path, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(cache), **environment}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **offline},
        timeout=300,
        check=False,
    )


def scores(answers: Sequence[Any]) -> list[tuple[float, bool]]:
    """Return the choices' log-probabilities, and whether they are greedy, row by row."""
    return [(float(p), is_greedy) for row in answers for ((p, is_greedy),) in row]


def sums(answers: Sequence[Any]) -> list[float]:
    return [float(row[0][0]) for row in answers]


def test_unsteered_numbers_are_those_of_the_harness_own_class(found: dict[str, Any]) -> None:
    """Kills: a shifted window, a second first token, a choice without its space."""
    ours, theirs = found["none"], found["hf"]
    assert len(scores(ours["multiple_choice"])) == 20
    for (p, is_greedy), (expected, expected_greedy) in zip(
        scores(ours["multiple_choice"]), scores(theirs["multiple_choice"]), strict=True
    ):
        assert p == pytest.approx(expected, **TOLERANCE)
        assert is_greedy == expected_greedy
    assert ours["generate_until"] == theirs["generate_until"]
    rolling = sums(ours["loglikelihood_rolling"])
    assert rolling == pytest.approx(sums(theirs["loglikelihood_rolling"]), **TOLERANCE)
    assert len(set(rolling)) == 10


def test_a_chat_is_the_one_of_the_harness_own_class(found: dict[str, Any]) -> None:
    """Kills: a second first token before the template's own."""
    ours, theirs = found["none_chat"], found["hf_chat"]
    got, expected = (scores(answers["multiple_choice"]) for answers in (ours, theirs))
    assert [p for p, _ in got] == pytest.approx([p for p, _ in expected], **TOLERANCE)
    assert ours["generate_until"] == theirs["generate_until"]
    assert got != scores(found["none"]["multiple_choice"])


def test_steered_numbers_are_those_of_the_two_runs(
    found: dict[str, Any], rows: list[dict[str, Any]], model: juice.SteeredModel
) -> None:
    """Kills: an unsteered choice, or a prompt steered without its choice."""
    head_set = model.head_sets.get("context")
    betas = head_set.betas()
    assert betas is not None
    heads = {
        **dict.fromkeys(head_set.heads.plus, betas.plus),
        **dict.fromkeys(head_set.heads.minus, betas.minus),
    }
    network, tokenizer = model.loaded.model, model.description.tokenizer

    def scored(ids: list[int], n: int) -> tuple[float, bool]:
        logits = oracle.steered_logits(network, ids, heads)[-n - 1 : -1]
        last = torch.tensor(ids[-n:])
        p = logits.double().log_softmax(-1).gather(1, last[:, None]).sum()
        return float(p), bool((logits.argmax(-1) == last).all())

    steered, plain = found["context"], found["none"]
    by_choice = iter(scores(steered["multiple_choice"]))
    for row in rows:
        start = len(tokenizer(row["prompt"].strip())["input_ids"])
        for choice in row["choices"]:
            ids = tokenizer(row["prompt"] + choice)["input_ids"]
            p, is_greedy = next(by_choice)
            expected, expected_greedy = scored(ids, len(ids) - start)
            assert p == pytest.approx(expected, **TOLERANCE)
            assert is_greedy == expected_greedy
    for row, (((text,),),) in zip(rows, ([r] for r in steered["generate_until"]), strict=True):
        ids = tokenizer(row["prompt"])["input_ids"]
        tokens = oracle.generate(network, ids, heads, N_NEW)[0]
        expected_text = tokenizer.decode(tokens, skip_special_tokens=True)
        assert text == expected_text.split(".")[0]
    for row, p in zip(rows[:-1], sums(steered["loglikelihood_rolling"]), strict=False):
        ids = tokenizer(row["text"])["input_ids"]
        first = tokenizer.bos_token_id
        assert p == pytest.approx(scored([first, *ids], len(ids))[0], **TOLERANCE)
    assert scores(steered["multiple_choice"]) != scores(plain["multiple_choice"])
    assert steered["generate_until"] != plain["generate_until"]


def test_a_gate_decides_once_for_all_choices_of_a_prompt(
    found: dict[str, Any], rows: list[dict[str, Any]], model: juice.SteeredModel
) -> None:
    asked = [row["prompt"].strip() for row in rows]
    done = model.generate(asked, steer="context", gate="auto", max_tokens=1)
    steers = [c.steering.applied for c in done]
    assert set(steers) == {True, False}
    gated = scores(found["gated"]["multiple_choice"])
    for i, is_steered in enumerate(steers):
        expected = scores(found["context" if is_steered else "none"]["multiple_choice"])
        for at in (2 * i, 2 * i + 1):
            assert gated[at][0] == pytest.approx(expected[at][0], **TOLERANCE), i


@pytest.mark.long
def test_the_command_line_is_the_harness_own_with_our_model(
    folder: Path, tmp_path: Path, found: dict[str, Any]
) -> None:
    task = kind_name("multiple_choice")
    common = ("-m", "juice.lm_eval", "--model", "juice", "--include_path", folder, "--tasks", task)
    args = "pretrained=mini,steer=context,head_sets=head_sets"
    out = tmp_path / "out"
    more = ("--model_args", args, "--output_path", out)
    done = harness(*common, *more, cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = out.rglob("results_*.json")
    results = json.loads(written.read_text())
    pairs = scores(found["context"]["multiple_choice"])
    right = [pairs[i][0] > pairs[i + 1][0] for i in range(0, len(pairs), 2)]
    assert results["results"][task]["acc,none"] == pytest.approx(sum(right) / len(right))
    steering = results["config"]["steering"]
    assert (steering["target"], steering["head_set"]) == ("context", "context")
    assert results["config"]["model_fingerprint"].startswith("sha256:")


@pytest.mark.long
def test_a_mistake_ends_in_one_line(folder: Path, tmp_path: Path) -> None:
    task = kind_name("loglikelihood_rolling")
    common = ("-m", "juice.lm_eval", "--model", "juice", "--include_path", folder, "--tasks", task)
    done = harness(*common, "--model_args", "stear=context", cache=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("juice: error: model_args names 'stear'")
    assert "Traceback" not in done.stderr


def test_what_cannot_be_done_is_refused_with_the_reason(found: dict[str, Any]) -> None:
    for i, (_, named) in enumerate(MISTAKES):
        assert named in found[f"mistake_{i}"]["error"]


def test_without_the_harness_the_import_says_what_to_install() -> None:
    program = "import sys; sys.modules['lm_eval'] = None; import juice.lm_eval"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert "pip install 'juice-steering[lm-eval]'" in done.stderr.splitlines()[-1]
