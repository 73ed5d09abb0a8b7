"""What was computed before an interruption is not computed again, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch

import juice
from juice.formula import CONFLICTS
from juice.identification import learned as learning
from juice.identification.examples import known_share, usable_examples
from juice.identification.find import Found, find
from juice.identification.learned import Learned, learn, looked_at
from juice.identification.options import IdentificationOptions
from juice.identification.task import Task, Unfinished, UnfinishedFile
from tests.support import tiny
from tests.support.conflicts import conflicts
from tests.support.marks import FEW_EXAMPLES

pytestmark = [FEW_EXAMPLES, pytest.mark.usefixtures("little_text", "few_betas")]


class Interrupted(UnfinishedFile):
    """Ends with Ctrl-C at a number of results."""

    def __init__(self, path: Path, at: int) -> None:
        super().__init__(path, {})
        self.left = at

    def put(self, key: str, result: object) -> None:
        super().put(key, result)
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_learning_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: batches that are not drawn once more, coefficients that are rounded in the file."""
    monkeypatch.setattr(learning, "FIRST_WEIGHT", 0.1)
    monkeypatch.setattr(learning, "N_STAGES", 3)
    monkeypatch.setattr(learning, "N_FIRST_STEPS", 6)
    monkeypatch.setattr(learning, "N_STEPS", 2)
    model = juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())
    n_steps = list[int]()

    @contextmanager
    def counted(description: str, total: int) -> Iterator[Callable[[int], None]]:
        yield lambda n: n_steps.append(n) if description.startswith("learning") else None

    def learned(unfinished: Unfinished) -> Learned:
        given = {"examples": conflicts(), "validation": conflicts(), "unfinished": unfinished}
        options = IdentificationOptions(penalty=0.0, protect=(), max_divergence=0.01)
        n_steps.clear()
        task = Task(model=model, target="context", options=options, progress=counted, **given)
        return learn(task, looked_at(task))

    whole = learned(Unfinished())
    assert sum(n_steps) == 6 + 2 + 2
    with pytest.raises(KeyboardInterrupt):
        learned(Interrupted(tmp_path / "kept.json", at=3))
    kept = UnfinishedFile(tmp_path / "kept.json", {})
    again = learned(kept)
    assert sum(n_steps) == 2
    assert kept.n_found == 2  # how text responds, and the stages
    assert again.line == whole.line
    torch.testing.assert_close(again.best.coefficients, whole.best.coefficients, rtol=0, atol=0)
    assert again.best.coefficients.any()


def test_scores_and_tuned_sets_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Random(0).sample(juice.read_examples("mini"), 10)
    with juice.load("mini") as model:
        asked, ask = list[object](), model.engine.generate

        def counted(requests: Sequence[object], **options: object) -> list[juice.Completion]:
            asked.extend(requests)
            return ask(requests, **options)

        monkeypatch.setattr(model.engine, "generate", counted)

        def found(**changes: object) -> Found:
            options = IdentificationOptions(
                target="context",
                name="mine",
                method="attribution",
                n_examples=4,
                top_k=3,
                **changes,
            )
            return find(model, facts, options, kept_in=tmp_path / "kept.json")

        whole = found().head_sets["context"]
        n_whole = len(asked)
        asked.clear()
        how = IdentificationOptions(method="attribution", n_examples=4)
        known_share(model, usable_examples(model, facts, how)[1], seed=0)
        n_drawing = len(asked)
        asked.clear()
        again = found()
        assert len(asked) == n_drawing < n_whole  # nothing else is asked again
        assert again.unfinished.n_found == 3  # two conflict types and the tuned set
        kept = again.head_sets["context"]
        assert kept.model_dump(mode="json") == whole.model_dump(mode="json")
        assert kept.scores.sha256() == whole.scores_sha256
        assert found(accepted_loss=0.2, tune=False).unfinished.n_found == 0, (
            "other words, other results"
        )
        again.unfinished.remove()
        assert not list(tmp_path.iterdir())


def test_what_one_target_reads_of_another_did_not_come_from_an_interrupted_run() -> None:
    """Both targets' heads are scored together, once."""
    n_scored = list[int]()

    @contextmanager
    def counted(description: str, total: int) -> Iterator[Callable[[int], None]]:
        if description == "scoring heads":
            n_scored.append(total)
        yield lambda _n: None

    model = juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())
    how = IdentificationOptions(method="attribution", n_examples=4, tune=False)
    found = find(model, conflicts(), how, progress=counted)
    assert set(found.head_sets) | set(found.unreached) == {"parametric", "context"}
    assert n_scored == [4 * len(CONFLICTS)]
    assert found.unfinished.n_found == 0


def test_a_folder_that_cannot_be_written_costs_no_result(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    kept = UnfinishedFile(tmp_path / "file" / "kept.json", {})
    with pytest.warns(UserWarning, match=r"would begin anew.*kept\.json"):
        kept.put("first", [1])
    kept.put("second", [2])  # of which nothing is said
    kept.remove()
    assert (kept.get("first"), kept.get("second")) == ([1], [2])


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"identity": {}, "results": 3}'])
def test_a_file_that_is_not_ours_is_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "kept.json").write_text(content)
    kept = UnfinishedFile(tmp_path / "kept.json", {})
    assert kept.get("anything") is None
    kept.put("anything", [1])
    assert UnfinishedFile(tmp_path / "kept.json", {}).get("anything") == [1]
