"""Training: what is interrupted and resumed ends with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from juice.files import MINI
from lab import train
from lab.recipe import DOUBT, new_model
from lab.train import Phase, Trainer

PHASE = Phase(mixture=DOUBT, n_steps=2, rate_start=1e-2, rate_end=1e-3, warmup=1)


def test_a_resumed_phase_ends_with_the_weights_of_one_that_was_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Processors without bfloat16 need minutes for steps of the real size.
    monkeypatch.setattr(train, "N_ROWS", 2)
    monkeypatch.setattr(train, "LENGTH", 128)
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    model, other = new_model(tokenizer, seed=0), new_model(tokenizer, seed=1)
    halfway = {}
    trainer = Trainer(model, tokenizer, PHASE, seed=3)

    def after_step(step: int) -> None:
        if step == 1:
            halfway.update({name: value.clone() for name, value in model.state_dict().items()})
            trainer.save(tmp_path / "state.pt")

    trainer.run(after_step)

    other.load_state_dict(halfway)
    resumed = Trainer(other, tokenizer, PHASE, seed=3)
    resumed.load(tmp_path / "state.pt")
    resumed.run()

    for name, value in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, msg=name)
        assert not torch.equal(halfway[name], value), f"{name} was trained after the interruption"
