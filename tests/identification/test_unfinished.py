"""What was computed before an interruption is not computed again, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch

import juice
from juice.identification import learned as learning
from juice.identification.examples import usable_examples
from juice.identification.find import Found, find
from juice.identification.learned import learn
from juice.identification.options import IdentificationOptions
from juice.identification.task import Task, Unfinished, UnfinishedFile
from tests.support import tiny
from tests.support.conflicts import examples
from tests.support.marks import FEW_EXAMPLES


class Interrupted(Unfinished):
    """Ends with Ctrl-C at a number of results."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def put(self, key: str, result: object) -> None:
        super().put(key, result)
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", [1, 3])
def test_learning_goes_on_as_if_it_had_never_stopped(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: batches that are not drawn once more, a state of the optimizer that is left out."""
    monkeypatch.setattr(learning, "N_BATCH", 4)
    model = juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())

    def learned(unfinished: Unfinished) -> torch.Tensor:
        options = IdentificationOptions(penalty=0.0)
        task = Task(model=model, target="context", options=options, unfinished=unfinished)
        return learn(task, examples(), examples()[:2])

    whole, stopped = learned(Unfinished()), Interrupted(at)
    with pytest.raises(KeyboardInterrupt):
        learned(stopped)
    again = learned(stopped)
    assert stopped.n_found == 1
    torch.testing.assert_close(again, whole, rtol=0, atol=0)
    assert again.count_nonzero()


@FEW_EXAMPLES
def test_scores_and_tuned_sets_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Random(0).sample(juice.read_examples("mini"), 28)
    with juice.load("mini") as model:
        asked, ask = list[object](), model.engine.generate

        def counted(requests: Sequence[object], **options: object) -> list[juice.Completion]:
            asked.extend(requests)
            return ask(requests, **options)

        monkeypatch.setattr(model.engine, "generate", counted)

        def found(**changes: object) -> Found:
            options = IdentificationOptions(
                **{"target": "context", "name": "mine", "n_examples": 8, "top_k": 3, **changes}
            )
            return find(model, facts, options, kept_in=tmp_path / "kept.json")

        whole = found().head_sets["context"]
        n_whole = len(asked)
        asked.clear()
        usable_examples(model, facts, IdentificationOptions(n_examples=8))
        n_drawing = len(asked)
        asked.clear()
        again = found()
        assert len(asked) == n_drawing < n_whole  # nothing else is asked again
        assert again.unfinished.n_found == 3  # two conflict types and the tuned set
        kept = again.head_sets["context"]
        assert kept.model_dump(mode="json") == whole.model_dump(mode="json")
        assert kept.scores.sha256() == whole.scores_sha256
        assert found(accepted_loss=0.2).unfinished.n_found == 0, "other words, other results"
        again.unfinished.remove()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"identity": {}, "results": 3}'])
def test_a_file_that_is_not_ours_is_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "kept.json").write_text(content)
    kept = UnfinishedFile(tmp_path / "kept.json", {})
    assert kept.get("anything") is None
    kept.put("anything", [1])
    assert UnfinishedFile(tmp_path / "kept.json", {}).get("anything") == [1]
