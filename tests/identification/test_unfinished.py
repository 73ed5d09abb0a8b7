"""What was computed before an interruption is not computed again, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

import juice
from juice.identification import IdentificationOptions, learning
from juice.identification.drawing import usable_examples
from juice.identification.learning import learn
from juice.identification.protection import Protection
from juice.identification.recipe import find_head_sets
from juice.identification.unfinished import Unfinished, UnfinishedFile
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

    def learned(unfinished: Unfinished | None) -> torch.Tensor:
        return learn(
            model,
            "context",
            examples(),
            examples()[:2],
            penalty=0.0,
            protection=Protection(),
            unfinished=unfinished,
        )

    whole, stopped = learned(None), Interrupted(at)
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
        options = IdentificationOptions(n_examples=8, top_k=3)
        drawn, rest = usable_examples(model, facts, options)

        def find(unfinished: Unfinished) -> juice.HeadSet:
            found = find_head_sets(
                model,
                drawn,
                ["context"],
                options,
                names={"context": "mine"},
                validation=rest,
                unfinished=unfinished,
            )
            return found["context"]

        whole = find(UnfinishedFile(tmp_path / "kept.json", {"seed": 0}))
        other = UnfinishedFile(tmp_path / "kept.json", {"seed": 1})
        assert other.get("tuned context juice") is None
        kept = UnfinishedFile(tmp_path / "kept.json", {"seed": 0})
        monkeypatch.setattr(model.engine, "generate", None)  # nothing is asked again
        again = find(kept)
        assert kept.n_found == 3  # two conflict types and the tuned set
        assert again.model_dump(mode="json") == whole.model_dump(mode="json")
        assert again.scores.sha256() == whole.scores_sha256
        kept.remove()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"identity": {}, "results": 3}'])
def test_a_file_that_is_not_ours_is_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "kept.json").write_text(content)
    kept = UnfinishedFile(tmp_path / "kept.json", {})
    assert kept.get("anything") is None
    kept.put("anything", [1])
    assert UnfinishedFile(tmp_path / "kept.json", {}).get("anything") == [1]
