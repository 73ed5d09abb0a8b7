"""lm-eval over HTTP: its three kinds of request, in batches of 64, against an oracle; steered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from integration.clients import questions
from integration.clients.conftest import JUICE, ROOT
from tests.support.serving import Server

pytest.importorskip("lm_eval", reason="make clients-test installs it")

PACKAGES = ("lm-eval",)
# More than one batch, and a last one that is not full.
N_DOCUMENTS = 70
# Log-probabilities of some ten tokens in float32, summed in another order; of a paragraph, ten
# times that.
TOLERANCE, PARAGRAPH_TOLERANCE = 1e-3, 1e-2


# Prompts begin with the beginning-of-text token, as the model has learned them; where lm-eval
# scores a whole text it puts that token there by itself.
TASKS = {"mini_choice,mini_generate": "add_bos_token=True", "mini_rolling": "add_bos_token=False"}


def run_lm_eval(
    url: str,
    model: str,
    folder: Path,
    asked: Mapping[str, str] = MappingProxyType(TASKS),
    n_documents: int = N_DOCUMENTS,
) -> dict[str, Any]:
    """Run tasks; return the results and, by task, the samples."""
    found: dict[str, Any] = {"results": {}}
    for tasks, begins in asked.items():
        done = subprocess.run(
            [
                str(Path(sys.executable).with_name("lm-eval")),
                *("run", "--model", "local-completions", "--model_args", f"model={model}"),
                *(f"base_url={url}/v1/completions", "tokenizer=juice/models/mini", begins),
                *("tokenizer_backend=huggingface", "max_length=1024", "--tasks", tasks),
                *("--include_path", "integration/clients/tasks", "--limit", str(n_documents)),
                *("--batch_size", "64", "--log_samples", "--output_path", str(folder / tasks)),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (results,) = (folder / tasks).glob("*/results_*.json")
        found["results"] |= json.loads(results.read_text())["results"]
        for task in tasks.split(","):
            (file,) = (folder / tasks).glob(f"*/samples_{task}_*.jsonl")
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            found[task] = sorted(lines, key=lambda line: int(line["doc_id"]))
            assert len(found[task]) == n_documents
    return found


def expected(steer: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return what the oracle finds for the texts that lm-eval asked about."""
    job = {
        "steer": steer,
        "choices": [
            list(asked.values())
            for sample in found["mini_choice"]
            for asked in sample["arguments"].values()
        ],
        "written": [s["arguments"]["gen_args_0"]["arg_0"] for s in found["mini_generate"]],
        "rolling": [s["arguments"]["gen_args_0"]["arg_0"] for s in found["mini_rolling"]],
    }
    done = subprocess.run(
        [str(JUICE.with_name("python")), "-m", "integration.clients.lm_eval_oracle"],
        input=json.dumps(job),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # faster for so small a model
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.smoke
def test_a_batch_is_answered_and_the_models_name_steers(server: Server, tmp_path: Path) -> None:
    """Of 33 questions with two answers each, most choices are memory's, and none the context's."""
    n_documents, share = 33, {}
    for steer in ("context", "parametric"):
        model = f"{questions.MODEL}:{steer}"
        task = {"mini_choice": "add_bos_token=True"}
        found = run_lm_eval(server.url, model, tmp_path / steer, task, n_documents)
        share[steer] = found["results"]["mini_choice"]["acc,none"]
    assert share["context"] < 0.1 < 0.9 < share["parametric"]


Both = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def runs(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Both]:
    """Return, by `steer`, what lm-eval found and what it must find."""
    made = {}
    for steer in questions.STEERS:
        model = questions.MODEL if steer == "none" else f"{questions.MODEL}:{steer}"
        n_before = len(server.log())
        found = run_lm_eval(server.url, model, tmp_path_factory.mktemp(steer))
        lines = [line for line in server.log()[n_before:] if line.get("route") == "/v1/completions"]
        assert {line["steer"] for line in lines} == {steer}
        made[steer] = (found, expected(steer, found))
    return made


EVERY = pytest.mark.parametrize("steer", questions.STEERS)


@EVERY
def test_multiple_choice_has_the_oracles_log_probabilities(
    runs: dict[str, Both], steer: str
) -> None:
    found, oracle = runs[steer]
    scores = [response[0] for sample in found["mini_choice"] for response in sample["resps"]]
    assert len(scores) == 2 * N_DOCUMENTS
    for (score, is_greedy), (choice, own_is_greedy) in zip(scores, oracle["choices"], strict=True):
        assert float(score) == pytest.approx(choice, abs=TOLERANCE)
        assert is_greedy == str(own_is_greedy)
    pairs = zip(oracle["choices"][::2], oracle["choices"][1::2], strict=True)
    n_memory = sum(memory[0] > context[0] for memory, context in pairs)
    assert found["results"]["mini_choice"]["acc,none"] == pytest.approx(n_memory / N_DOCUMENTS)


@EVERY
def test_generate_until_writes_what_the_oracle_does(runs: dict[str, Both], steer: str) -> None:
    found, oracle = runs[steer]
    texts = [sample["resps"][0][0] for sample in found["mini_generate"]]
    assert texts == oracle["written"]
    n_memory = sum(
        text == sample["target"] for text, sample in zip(texts, found["mini_generate"], strict=True)
    )
    share = found["results"]["mini_generate"]["exact_match,none"]
    assert share == pytest.approx(n_memory / N_DOCUMENTS)


@EVERY
def test_loglikelihood_rolling_has_the_oracles_log_probabilities(
    runs: dict[str, Both], steer: str
) -> None:
    found, oracle = runs[steer]
    scores = [float(sample["resps"][0][0]) for sample in found["mini_rolling"]]
    assert scores == pytest.approx(oracle["rolling"], abs=PARAGRAPH_TOLERANCE)


def test_the_models_name_moves_the_choices_toward_the_context(runs: dict[str, Both]) -> None:
    share = {steer: runs[steer][0]["results"]["mini_choice"]["acc,none"] for steer in runs}
    assert share["context"] < 0.1 < 0.5 < share["none"] < 0.9 < share["parametric"]
