"""A whole identification: its options, its seed, and targets or scores that come to nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset

import juice
from juice.data.example import to_json_line
from juice.errors import ExampleError, NoConsistentHeadError, UsageError
from juice.head_set.scores import HeadScores
from juice.identification import find as run
from juice.identification.options import IdentificationOptions
from tests.support import tiny
from tests.support.conflicts import ALPHAS_MINUS, ALPHAS_PLUS, examples
from tests.support.marks import FEW_EXAMPLES


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"top_k": 0}, "top_k"),
        ({"alphas_plus": (1.0, -2.0)}, "alphas_plus"),
        ({"alphas_minus": (2.0,)}, "alphas_minus"),
        ({"alphas_plus": ()}, "alphas_plus"),
    ],
)
def test_options_of_the_wrong_sign_or_size_are_refused(
    wrong: dict[str, object], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        IdentificationOptions(**wrong)


@pytest.mark.parametrize(
    ("method", "option"),
    [
        *(("auto", name) for name in ("alphas_plus", "alphas_minus", "tune")),
        *(("learned", name) for name in ("alphas_minus", "top_k", "tune")),
        *(("attribution", name) for name in ("alphas_plus", "penalty", "budget")),
        *(("probe", name) for name in ("penalty", "budget")),
    ],
)
def test_an_option_that_a_method_does_not_take_is_refused(method: str, option: str) -> None:
    values = {"alphas_plus": (1.0,), "alphas_minus": (-3.0,), "june": True, "tune": False}
    values |= {"top_k": 5, "penalty": 0.5, "budget": "1m"}
    with pytest.raises(UsageError, match=f"{option} says nothing to the method {method}"):
        IdentificationOptions(method=method, **{option: values[option]})


def test_a_target_without_heads_does_not_fail_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scored(*_args: object, **_options: object) -> dict[str, HeadScores]:
        table = torch.zeros(2, tiny.N_LAYERS, tiny.N_HEADS)
        good = table.clone()
        good[:, 1, 2] = 0.5
        types = ("substitution", "coherent")
        return {
            t: HeadScores(target=t, conflict_types=types, plus=p, minus=table)
            for t, p in (("parametric", table), ("context", good))
        }

    monkeypatch.setattr(run, "score_heads", scored)
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    how = IdentificationOptions(method="probe", tune=False)
    found = run.find(model, examples(), how)
    assert list(found.head_sets) == ["context"]
    assert found.head_sets["context"].heads.plus == (juice.Head(1, 2),)
    reason = str(found.unreached["parametric"])
    assert reason.startswith("no head raises the probability of the parametric answer")
    with pytest.raises(NoConsistentHeadError):
        run.find(model, examples(), how.but(target="parametric"))


def test_scores_that_overflow_are_an_error_not_a_head_set() -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    with pytest.raises(juice.JuiceError, match="not finite"):
        juice.identify(model, examples(), target="context", method="probe", alphas_plus=(1e38, 1.0))


def test_identification_is_the_same_for_the_same_seed_and_differs_for_another() -> None:
    model = juice.load(tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer())
    options = {
        "target": "context",
        "method": "probe",
        "n_examples": 2,
        "alphas_plus": ALPHAS_PLUS,
        "alphas_minus": ALPHAS_MINUS,
        "tune": False,
    }
    first, again, other = (
        juice.identify(model, examples(), seed=seed, **options) for seed in (0, 0, 3)
    )
    assert first.model_dump() == again.model_dump()
    assert first.identification.examples_sha256 != other.identification.examples_sha256


@FEW_EXAMPLES
@pytest.mark.filterwarnings("ignore:20 of 20 validation examples are about facts that found")
@pytest.mark.long
def test_rows_in_memory_find_and_tune_what_the_same_file_does(tmp_path: Path) -> None:
    """As a list of dicts, as a data set, and by the file's name."""
    rows = [json.loads(to_json_line(e)) for e in juice.read_examples("mini")[:20]]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with juice.load("mini") as model:
        found = [
            juice.identify(model, given, target="context", method="attribution", n_examples=6)
            for given in (juice.read_examples(file), rows, Dataset.from_list(rows), file)
        ]
        tuned = [juice.tune(model, found[0], given) for given in (rows, file)]
        del rows[0]["prompts"]
        with pytest.raises(ExampleError, match="row 1: prompts is missing; expected the columns"):
            juice.identify(model, rows, target="context")
    first, *others = (one.model_dump() for one in found)
    assert others == [first] * 3
    assert tuned[0].model_dump() == tuned[1].model_dump()
